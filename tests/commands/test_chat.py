"""compiled-llm chat: as a script of lines, and in a terminal."""

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from compiled_llm import CompiledEngine
from compiled_llm.__main__ import main


def test_a_script(engine: CompiledEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Read a file\n/set\n/system\n/stats\n"))
    assert main(["chat", "--temperature", "0", "--system", "be brief"]) == 0
    out, err = capsys.readouterr()
    assert "\nmax_tokens 64\ntemperature 0.0\nbe brief\n" in out, "a quarter of the context"
    assert "2 messages" in out
    assert err.startswith("(the bundled model completes Python and was trained on no conversation")
    monkeypatch.setattr("sys.stdin", io.StringIO("/sett\n"))
    assert main(["chat", "--max-tokens", "3"]) == 1
    assert "did you mean '/set'?" in capsys.readouterr().err


def test_bad_arguments(engine: CompiledEngine, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--n", "2"], ["--top-p", "4"], ["hello"]):
        with pytest.raises(SystemExit, match="2"):
            main(["chat", *arguments])
        assert len(capsys.readouterr().err.splitlines()) == 3


# In the new process: its standard input becomes the terminal that Ctrl-C is typed into. A fork of this process, which
# has threads, might hang before it runs anything.
_TAKE_TERMINAL = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.executable, [sys.executable, "-m", "compiled_llm", *sys.argv[1:]])
"""


class _Terminal:
    """The command in a terminal of its own."""

    def __init__(self, *arguments: str) -> None:
        self._terminal, side = pty.openpty()
        command = [sys.executable, "-c", _TAKE_TERMINAL, *arguments]
        self._process = subprocess.Popen(command, stdin=side, stdout=side, stderr=side, start_new_session=True)
        os.close(side)

    def type(self, keys: str) -> None:
        os.write(self._terminal, keys.encode())

    def until(self, text: str) -> str:
        """What it shows, up to ``text``; "" waits for its end."""
        shown, end = "", time.monotonic() + 120
        while time.monotonic() < end and not (text and text in shown):
            if select.select([self._terminal], [], [], 1)[0]:
                try:
                    shown += os.read(self._terminal, 4096).decode()
                except OSError:  # it has ended
                    break
        assert text in shown, f"{text!r} is not in {shown!r}"
        return shown

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def status(self) -> int:
        return self._process.wait(60)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._terminal)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Terminal]:
    monkeypatch.setenv("TERM", "dumb")
    sizes = ("--bucket-sizes", "1", "--token-bucket-sizes", "64", "--num-kv-blocks", "64", "--max-model-len", "1024")
    terminal = _Terminal("chat", "--enforce-eager", *sizes, "--max-tokens", "1000", "--ignore-eos")
    yield terminal
    terminal.end()


def test_in_a_terminal_ctrl_c_ends_the_answer_and_ctrl_d_leaves(terminal: _Terminal) -> None:
    assert "(the bundled model completes Python" in terminal.until("> ")
    terminal.type("Read a file\n")
    terminal.until("Read a file\r\n")
    terminal.until("\n")  # of the answer
    terminal.type("\x03")
    assert "(stopped; what came of the answer stays" in terminal.until("> ")
    terminal.type("/st\t\n")
    assert "conversation  2 messages" in terminal.until("> ")
    terminal.type("half a line")
    terminal.until("half a line")
    time.sleep(1)  # readline sees a signal while it waits for keys alone, and waits again a moment after its echo
    terminal.type("\x03")
    assert "(Ctrl-C again or Ctrl-D leaves)" in terminal.until("> ")
    terminal.type("/set\n")
    assert "ignore_eos True" in terminal.until("> "), "the Ctrl-C before is forgotten"
    terminal.type("\x04")
    terminal.until("")
    assert terminal.status() == 0


@pytest.mark.battery
@pytest.mark.parametrize("while_it_answers", [True, False])
def test_sigterm_ends_the_chat(terminal: _Terminal, while_it_answers: bool) -> None:
    terminal.until("> ")
    if while_it_answers:
        terminal.type("Read a file\n")
        terminal.until("Read a file\r\n")
        terminal.until("\n")
    terminal.send(signal.SIGTERM)
    terminal.until("")
    assert terminal.status() == 128 + signal.SIGTERM
