"""Which tokens of which requests run next, and in which KV blocks. Plain Python, never torch."""
