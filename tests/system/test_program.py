"""What a program's exit status is, and what it says of its end."""

import io
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from compiled_llm.system.process import GuardedStream, StopSignals
from compiled_llm.system.program import as_program


def status_of(act: Callable[[], object], status: int = 0) -> int:
    @as_program
    def main(program: str, arguments: Sequence[str] | None, stdout: GuardedStream, signals: StopSignals) -> int:
        act()
        return status

    return main("it")


def test_the_status_is_that_of_the_run() -> None:
    assert status_of(lambda: None, 7) == 7
    with pytest.raises(SystemExit, match="2"):
        status_of(lambda: exit(2))


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals(number: signal.Signals, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(lambda: signal.raise_signal(number)) == status
    assert capsys.readouterr().err == f"it: stopped by {number.name}\n"


def test_errors_of_files_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert status_of(Path("/nowhere/at/all").read_text) == 1
    assert capsys.readouterr().err == "it: error: [Errno 2] No such file or directory: '/nowhere/at/all'\n"


class _Failing(io.StringIO):
    def __init__(self, error: OSError) -> None:
        super().__init__()
        self._error = error

    def flush(self) -> None:
        raise self._error


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [
        (BrokenPipeError(32, "Broken pipe"), 141, ""),
        (OSError(28, "No space left"), 1, "it: error: stdout: No space left\n"),
    ],
)
def test_a_stdout_that_fails(
    error: OSError, status: int, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout", _Failing(error))
    assert status_of(lambda: print("text")) == status
    assert capsys.readouterr().err == told
