"""This engine and others on the same requests. The others run in environments of their own: docs/peers.md."""

from compiled_llm.bench.peers.compare import main, parser

__all__ = ["main", "parser"]
