"""Models without a file of their own: transformers' modelling code, with this engine's attention and linear layers."""
