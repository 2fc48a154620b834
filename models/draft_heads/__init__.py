"""Networks that draft from the hidden states of the model that they draft for: a file for each layout."""
