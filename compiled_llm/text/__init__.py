"""Between text and tokens: tokenizer, prompts, chat."""
