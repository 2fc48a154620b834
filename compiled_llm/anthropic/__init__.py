"""Anthropic's messages: what a request asks for, and the events and the message that answer it."""
