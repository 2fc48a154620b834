"""A model's files: where they lie, which tensors they hold, and how those become weights."""
