"""GGUF files: what llama.cpp's users have. Read as a directory in the layout of the hub, the weights left in the file."""
