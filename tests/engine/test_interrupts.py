"""Signals wait while they are held back, and none is lost."""

import signal
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from compiled_llm.engine import interrupts as module
from compiled_llm.engine.interrupts import Interrupts


class Alarm(Exception):
    pass


@pytest.fixture
def alarms() -> Iterator[list[int]]:
    """SIGALRM has a handler that raises; a list of the calls."""
    calls: list[int] = []

    def handler(number: int, frame: FrameType | None) -> None:
        calls.append(number)
        raise Alarm

    before = signal.signal(signal.SIGALRM, handler)
    yield calls
    signal.signal(signal.SIGALRM, before)


def send(number: int) -> None:
    signal.raise_signal(number)


def test_a_signal_waits_for_the_end_of_the_block(alarms: list[int]) -> None:
    interrupts, done = Interrupts(), []

    def block() -> None:
        with interrupts:
            send(signal.SIGALRM)
            done.append("the rest of the block")

    with pytest.raises(Alarm):
        block()
    assert done
    assert alarms == [signal.SIGALRM]
    with interrupts:  # it is not raised again
        pass


def test_take_runs_the_handler_at_once_and_the_block_can_clean_up(alarms: list[int]) -> None:
    interrupts, done = Interrupts(), []

    def block() -> None:
        with interrupts:
            try:
                send(signal.SIGALRM)
                interrupts.take()
                done.append("after take")
            finally:
                send(signal.SIGALRM)
                done.append("cleaned up")

    with pytest.raises(Alarm):
        block()
    assert done == ["cleaned up"]
    assert len(alarms) == 2


def test_nested_blocks_wait_for_the_outermost(alarms: list[int]) -> None:
    interrupts, other, done = Interrupts(), Interrupts(), []

    def block() -> None:
        with interrupts:
            with interrupts, other, other:
                send(signal.SIGALRM)
            done.append("after the inner blocks")

    with pytest.raises(Alarm):
        block()
    assert done
    assert len(alarms) == 1


def test_handlers_are_put_back_whatever_happens(alarms: list[int]) -> None:
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]

    def block() -> None:
        with Interrupts():
            assert [signal.getsignal(number) for number in signal.valid_signals()] != handlers
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        block()
    assert [signal.getsignal(number) for number in signal.valid_signals()] == handlers


def test_different_signals_are_all_taken(alarms: list[int]) -> None:
    interrupts = Interrupts()

    def block() -> None:
        with interrupts:
            send(signal.SIGINT)
            send(signal.SIGALRM)

    with pytest.raises(KeyboardInterrupt):
        block()
    with pytest.raises(Alarm):
        interrupts.take()


def test_a_signal_that_comes_again_after_long_is_not_held_back(
    alarms: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupts, done = Interrupts(), []

    def block() -> None:
        with interrupts:
            send(signal.SIGALRM)
            send(signal.SIGALRM)
            done.append("soon after the first")
            monkeypatch.setattr(module, "_PATIENCE_SECONDS", 0.0)
            send(signal.SIGALRM)
            done.append("never reached")

    with pytest.raises(Alarm):
        block()
    assert done == ["soon after the first"]
    assert len(alarms) == 1


def test_handlers_of_the_system_stay_and_other_threads_hold_nothing_back(alarms: list[int]) -> None:
    ignored = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with Interrupts():
            assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR1, ignored)
    seen = []

    def work() -> None:
        with Interrupts():
            seen.append(signal.getsignal(signal.SIGALRM))

    before = signal.getsignal(signal.SIGALRM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]


def test_a_handler_that_is_set_inside_the_block_stays(alarms: list[int]) -> None:
    with Interrupts():
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_IGN
