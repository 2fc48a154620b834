"""Adapters: what PEFT publishes of a LoRA, read and checked against the base model, and kept in host memory."""
