"""compiled-llm serve: OpenAI's interface over HTTP in one process, the engine in another."""
