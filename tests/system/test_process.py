"""Signals: the first stops, the second ends. Streams that fail take text and drop it, and logs that nobody reads."""

import fcntl
import io
import os
import signal
import subprocess
import sys

import pytest

from compiled_llm.system.process import GuardedStream, StopSignals, UnwaitingStream

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@pytest.mark.parametrize("number", SIGNALS)
def test_the_first_signal_interrupts_and_the_second_has_its_default(number: int) -> None:
    with pytest.raises(KeyboardInterrupt) as interrupt, StopSignals():
        signal.raise_signal(number)
    assert interrupt.value.args == (number,)
    assert [signal.getsignal(each) for each in SIGNALS] == [signal.SIG_DFL] * 2


@pytest.mark.parametrize("number", SIGNALS)
def test_a_graceful_run_notes_the_first_signal_and_the_second_interrupts(number: int) -> None:
    with StopSignals() as signals, signals.gracefully():
        signal.raise_signal(number)
        assert signals.number == number
        with pytest.raises(KeyboardInterrupt) as interrupt:
            signal.raise_signal(signal.SIGINT)
    assert interrupt.value.args == (signal.SIGINT,)
    assert [signal.getsignal(each) for each in SIGNALS] == [signal.SIG_DFL] * 2


def test_handlers_are_put_back_and_ignored_signals_stay_ignored() -> None:
    before = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with StopSignals():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) == before
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN


def test_a_second_signal_ends_a_process_that_does_not_stop() -> None:
    code = (
        "import time\n"
        "from compiled_llm.system.process import StopSignals\n"
        "with StopSignals():\n"
        "    try:\n"
        "        print('ready', flush=True)\n"
        "        time.sleep(60)\n"
        "    except KeyboardInterrupt:\n"
        "        print('stopping', flush=True)\n"
        "        time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for word in ("ready\n", "stopping\n"):
            assert process.stdout.readline() == word
            process.send_signal(signal.SIGINT)
    assert process.returncode == -signal.SIGINT


def test_a_closed_pipe_is_noted_and_takes_no_more() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "w") as pipe:
        stream = GuardedStream(pipe)
        print("text", file=stream)
        assert stream.failure is None, "it is buffered"
        for _ in range(2):
            print("text" * 10_000, file=stream, flush=True)
            assert isinstance(stream.failure, BrokenPipeError)
        assert stream.encoding == pipe.encoding
    # And closing it above, as Python does when it ends, did not raise.


def test_a_full_disk_is_noted() -> None:
    with open("/dev/full", "w") as full:
        stream = GuardedStream(full)
        print("text", file=stream, flush=True)
        assert stream.failure.strerror == "No space left on device"


def test_characters_that_the_encoding_lacks_are_escaped() -> None:
    content = io.BytesIO()
    stream = GuardedStream(io.TextIOWrapper(content, encoding="ascii"))
    print("é 語 \ud800", file=stream, flush=True)
    assert content.getvalue() == rb"\xe9 \u8a9e \ud800" + b"\n"


def test_a_stream_that_is_not_there_takes_everything() -> None:
    stream = GuardedStream(None)
    print("text", file=stream, flush=True)
    assert stream.failure is None
    stream.close()


def test_a_log_that_nobody_reads_drops_lines_and_counts_them() -> None:
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 8192)
    with open(reader, "rb", buffering=0) as read, open(writer, "w") as pipe:
        stream = UnwaitingStream(pipe)
        lines = [f"{number:099}" for number in range(1000)]
        for line in lines:
            print(line, file=stream, flush=True)
        kept = read.read(1 << 20).decode().splitlines()
        assert kept == lines[: len(kept)]
        assert 4096 <= 100 * len(kept) <= 8192
        print("é", file=stream)
        missing = f"{1000 - len(kept)} lines of this log are missing: nobody read it"
        assert read.read(1 << 20).decode().splitlines() == [missing, "é"]
        print("x" * 10_000, file=stream)
        assert 4096 <= len(read.read(1 << 20)) <= 8192
        print("last", file=stream)
        assert read.read(1 << 20) == b"1 lines of this log are missing: nobody read it\nlast\n"


def test_a_log_takes_parts_of_lines_and_goes_anywhere() -> None:
    content = io.StringIO()
    stream = UnwaitingStream(content)
    print("a", end="", file=stream)
    print("b", file=stream, flush=True)
    assert content.getvalue() == "ab\n"
    for path, failure in (("/dev/full", "No space left on device"), ("/dev/null", None)):
        with open(path, "w") as file:
            stream = UnwaitingStream(file)
            print("a", end="", file=stream, flush=True)
            assert (stream.failure and stream.failure.strerror) == failure
    nowhere = UnwaitingStream(None)
    nowhere.write("text\n")
    nowhere.close()
