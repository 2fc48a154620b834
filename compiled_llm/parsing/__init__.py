"""What a model writes -> reasoning, content and tool calls, in the format of its family."""
