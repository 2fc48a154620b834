"""The thread of an asyncio engine, with an engine that computes nothing."""

import threading

import pytest

from compiled_llm.engine import turns
from compiled_llm.engine.engine_thread import EngineThread


class IdleEngine:
    """Has no requests; ``is_changing`` until it was looked after three times."""

    def __init__(self) -> None:
        self.looks, self.has_changed = 0, threading.Event()

    @property
    def is_changing(self) -> bool:
        return not self.has_changed.is_set()

    def ask_for_memory(self) -> bool:
        self.looks += 1
        if self.looks == 3:
            self.has_changed.set()
        return False

    def has_unfinished_requests(self) -> bool:
        return False

    move_blocks = has_unfinished_requests

    def close(self) -> None: ...


def test_an_idle_engine_looks_for_compiled_code_until_it_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though no command comes. Afterwards it waits for one: an idle server takes no processor time."""
    monkeypatch.setattr(turns, "LOOK_SECONDS", 0.001)
    engine = IdleEngine()
    thread = EngineThread(lambda: engine)  # type: ignore[arg-type, return-value]
    assert engine.has_changed.wait(30)
    assert not threading.Event().wait(0.05)
    assert engine.looks == 3
    thread.stop()
    thread.ended.result(30)
