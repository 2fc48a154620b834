"""A person at a terminal: answers as they come, a chat, and completion in a shell."""
