"""What runs on the device: weights, KV cache, buffers, the steps' launches."""
