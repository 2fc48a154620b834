"""Child processes and their messages; what templates and grammars make of them is tested beside those."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from compiled_llm.system import child_process
from compiled_llm.system.child_process import Channel, ChildProcess, decoded, encoded, with_package

TEXT = "naïve \ud800 🚀"


@pytest.fixture
def channels() -> Iterator[tuple[Channel, Channel]]:
    first, second = socket.socketpair()
    with first, second:
        yield Channel(first), Channel(second)


@pytest.fixture
def make() -> Iterator[Callable[[Any], ChildProcess]]:
    made: list[ChildProcess] = []

    def make(settings: Any) -> ChildProcess:
        made.append(ChildProcess("the process that echoes", "tests.echoing_child", (), settings))
        return made[-1]

    yield make
    for child in made:
        child.end()


def ask(child: ChildProcess, word: str, value: Any, seconds: float = 60) -> Any:
    channel, deadline = child.channel(), time.monotonic() + seconds
    channel.send(encoded([word, value]), deadline)
    return decoded(channel.receive(deadline))


@pytest.mark.parametrize("length", [0, 1, 2**20 + 1, 5 * 2**20])
def test_messages_of_any_length(channels: tuple[Channel, Channel], length: int) -> None:
    content = os.urandom(length)
    sender = threading.Thread(target=lambda: [channels[0].send(content), channels[0].send(b"next")])
    sender.start()
    assert channels[1].receive() == content
    assert channels[1].receive(time.monotonic() + 60) == b"next"
    sender.join()


def test_what_does_not_come_in_time_or_is_too_long(channels: tuple[Channel, Channel]) -> None:
    with pytest.raises(TimeoutError):
        channels[0].receive(time.monotonic() + 0.01)
    with pytest.raises(TimeoutError):
        channels[0].send(b"x" * 2**24, time.monotonic() + 0.01)  # nobody reads
    channels[1].send(b"12345")
    with pytest.raises(ValueError, match="5 bytes, and 4 are allowed"):
        channels[0].receive(None, 4)
    channels[1].socket.close()
    with pytest.raises((EOFError, ConnectionError)):
        channels[0].receive()


def test_a_child_gets_its_settings_and_is_started_again_when_it_has_ended(make: Callable[[Any], ChildProcess]) -> None:
    child = make({"text": TEXT})
    assert child.pid is None
    assert ask(child, TEXT, [1, None]) == [{"text": TEXT}, TEXT, [1, None]]
    pid = child.pid
    ask(child, "more", 2)
    assert child.pid == pid
    with pytest.raises(EOFError):
        ask(child, "exit", 3)
    assert (child.status(), child.how_it_ended(), child.pid) == (3, "exit status 3", None)
    assert ask(child, "again", 0)[1] == "again"
    with pytest.raises(EOFError):
        ask(child, "compute", 0.05)
    assert (child.status(), child.how_it_ended()) == (-signal.SIGPROF, "signal SIGPROF")
    ask(child, "again", 0)
    pid = child.pid
    child.end()
    child.end()
    assert not Path(f"/proc/{pid}").exists()


def test_a_python_process_finds_the_package_where_this_one_has_it(tmp_path: Path) -> None:
    """From any directory, installed or not, and before another that it would find."""
    other = tmp_path / "compiled_llm"
    other.mkdir()
    (other / "__init__.py").touch()
    environment = with_package({"PATH": os.environ["PATH"], "PYTHONPATH": str(tmp_path)})
    command = [sys.executable, "-P", "-c", "import compiled_llm, sys; print(compiled_llm.__file__, sys.path)"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert Path(done.stdout.split()[0]).samefile(Path(child_process.__file__).parents[1] / "__init__.py")
    assert repr(str(tmp_path)) in done.stdout, "what the user has named is there still"


def test_a_child_that_does_not_start_says_why(make: Callable[[Any], ChildProcess]) -> None:
    with pytest.raises(ValueError, match=r"^refused$"):
        make("bad").channel()
    child = ChildProcess("the process that is not there", "compiled_llm.nothing", (), None)
    with pytest.raises(
        RuntimeError, match=r"the process that is not there cannot start \(exit status 1\): (.|\n)*ModuleN"
    ):
        child.channel()
    child.end()
