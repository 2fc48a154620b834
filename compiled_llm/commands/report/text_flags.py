"""The flags of a text that a model is run over."""

from pathlib import Path
from typing import Any

from compiled_llm.api.command_line import FlagParser

LEAST: dict[str, Any] = {"max_tokens": 1, "window": 1, "chunk": 1}  # smallest values


def add_text_flags(parser: FlagParser) -> None:
    add = parser.add_argument
    add("--text", type=Path, metavar="FILE", help="UTF-8 (default: files of Python that the demo model did not see)")
    add("--max-tokens", type=int, metavar="N", help="tokens of the text to use (default: all)")
    add("--window", type=int, metavar="N", help="tokens of a window (default: the model's length, 4096 at most)")
    add("--chunk", type=int, default=512, metavar="N", help="tokens a step (default: 512)")
