"""What is compiled: forward and sampling as pure functions."""
