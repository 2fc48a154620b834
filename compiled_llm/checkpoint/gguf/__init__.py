"""GGUF files, as llama.cpp's users have them: read as a directory in the layout of the hub, the weights left where
they are."""
