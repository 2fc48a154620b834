"""What a model's predictions are worth on a text: perplexity, what quantisation changes, and lm-eval's tasks."""
