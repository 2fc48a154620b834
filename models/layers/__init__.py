"""What families are made of: norm, rotary embedding, attention block, gated MLP. Pure functions of tensors."""
