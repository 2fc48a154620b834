"""What a model computes between its matrix products, row by row: norms, rotary embeddings, activations."""
