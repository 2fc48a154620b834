"""Published quantised checkpoints: what their ``quantization_config`` says, and how their tensors become codes."""
