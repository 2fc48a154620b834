"""Placeholder."""

from typing import TextIO

from compiled_llm.offline.serving import RunProgress


class Display:
    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def __enter__(self) -> "Display":
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def update(self, progress: RunProgress) -> None:
        pass
