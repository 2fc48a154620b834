"""What a start shows: a bar on a terminal, lines elsewhere, silence when asked; and that the engine uses it."""

import fcntl
import io
import os
import struct
import termios
import threading
import time
from pathlib import Path

import pytest

from compiled_llm import CompiledEngine
from compiled_llm.compiling.cache import CompileCache
from compiled_llm.ops.kernel_build import OPS
from compiled_llm.system import progress
from compiled_llm.system.progress import Stage, StartProgress
from compiled_llm.worker.cpu_kernels import KernelBuild

EAGER = {"enforce_eager": True, "num_kv_blocks": 8, "bucket_sizes": (1,), "max_model_len": 64}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def run(mode: progress.Mode, stream: io.StringIO, **options: object) -> None:
    with StartProgress(mode, stream).stage("building", {"one": 30.0, "two": 10.0}, **options) as stage:  # type: ignore[arg-type]
        stage.next("one")
        stage.next("two")
        stage.finish("two")


def test_lines_say_what_and_how_many_when_a_long_stage_starts_and_ends() -> None:
    stream = io.StringIO()
    run("auto", stream, seconds=40.0)
    first, last = stream.getvalue().splitlines()
    assert first == "compiled-llm: building: 2 (one, two), about 40 s"
    assert last == "compiled-llm: building: 2 done in 0.0 s"
    assert "\r" not in stream.getvalue()


def test_bytes_of_items_that_are_at_work_count() -> None:
    stage = Stage("loading", {"a": 3e9, "b": 1e9}, in_bytes=True)
    assert stage.head() == "loading 0.00/4.00 GB"
    stage.advance("a", 1e9)
    assert (stage.head(), stage.share) == ("loading 1.00/4.00 GB", 0.25)
    stage.advance("b", 1e9)
    stage.advance("a", 2e9)
    assert (stage.head(), stage.share) == ("loading 4.00/4.00 GB", 1.0)
    assert Stage("loading", {"a": 5e6}, in_bytes=True).head() == "loading 0.00/5.00 MB"


def test_no_part_of_the_work_is_lost_among_threads() -> None:
    stage = Stage("loading", dict.fromkeys("abcd", 1000.0), in_bytes=True)
    threads = [
        threading.Thread(target=lambda name=name: [stage.advance(name, 1.0) for _ in range(1000)]) for name in "abcd"
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stage.share == 1.0
    assert stage.state().startswith("0 s"), "none is at work any more"


def test_a_short_stage_leaves_no_line() -> None:
    stream = io.StringIO()
    run("auto", stream, is_long=False)
    assert stream.getvalue() == ""


def test_a_terminal_shows_a_bar_at_once_and_leaves_nothing_of_it() -> None:
    stream = Terminal()
    shown = StartProgress("auto", stream)
    with shown.stage("building", {"one": 30.0, "two": 10.0}, seconds=40.0) as stage:
        assert "building 0/2" in stream.getvalue(), "before the first item is done"
        assert "about 40 s left" in stream.getvalue()
        stage.next("one")
    assert stream.getvalue().split("\r")[-1].strip() == "", "the bar goes when the stage is done"
    shown.line("ready")
    assert stream.getvalue().endswith("compiled-llm: ready\n")


def test_the_bar_moves_while_one_item_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "_REFRESH_SECONDS", 0.01)
    stream = Terminal()
    with StartProgress("bar", stream).stage("building", {"one": 1.0}, seconds=40.0) as stage:
        stage.begin("one")
        deadline = time.monotonic() + 10
        while "one, " not in stream.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "building 0/1" in stream.getvalue()
    assert "one, 0 s, about 40 s left" in stream.getvalue()


def test_advice_comes_once_and_before_the_first_stage_that_takes_long() -> None:
    stream = io.StringIO()
    shown = StartProgress("lines", stream)
    shown.advise("it is kept here")
    with shown.stage("loading", {"one": 1.0}, is_long=False), shown.stage("nothing", {}):
        assert stream.getvalue() == ""
    for name in ("building", "compiling"):
        with shown.stage(name, {"one": 1.0}, found=3):
            pass
    lines = stream.getvalue().splitlines()
    assert lines[:2] == ["compiled-llm: it is kept here", "compiled-llm: building: 1 (one), 3 more found on disk"]
    assert stream.getvalue().count("kept") == 1


def test_two_stages_at_once_have_a_bar_each_and_a_line_goes_above_them() -> None:
    stream = Terminal()
    shown = StartProgress("bar", stream)
    with shown.stage("building", {"one": 1.0}) as building, shown.stage("compiling", {"two": 1.0}):
        building.begin("one")
        seen = stream.getvalue()
        assert seen.index("building 0/1") < seen.index("compiling 0/1")
        shown.line("note")
        seen = stream.getvalue()
        after = seen[seen.index("compiled-llm: note\n") :]
        assert "building 0/1" in after, "both are drawn again"
        assert "compiling 0/1" in after
    assert stream.getvalue().split("\r")[-1].strip() == ""


@pytest.mark.parametrize(("columns", "shows"), [(100, True), (0, False)])
def test_a_terminal_without_width_gets_lines(columns: int, shows: bool) -> None:
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40 if columns else 0, columns, 0, 0))
    with os.fdopen(theirs, "w") as stream, StartProgress("auto", stream).stage("building", {"one": 1.0}):
        pass
    text = os.read(ours, 4096).decode()
    os.close(ours)
    assert ("building 0/1 |" in text) == shows
    assert ("compiled-llm: building: 1 (one)" in text) != shows


def test_silence_when_asked() -> None:
    stream = Terminal()
    run("off", stream)
    StartProgress("off", stream).line("ready")
    assert stream.getvalue() == ""


def test_a_stderr_that_cannot_be_written_to_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(stream, "write", lambda text: (_ for _ in ()).throw(BrokenPipeError()))
    run("lines", stream)
    stream.close()
    run("lines", stream)
    monkeypatch.setattr("sys.stderr", None)
    StartProgress("auto").line("ready")


def test_what_fails_in_a_stage_comes_through_and_ends_its_thread() -> None:
    for mode in ("bar", "lines"):
        stream = Terminal()
        with pytest.raises(KeyboardInterrupt), StartProgress(mode, stream).stage("building", {"one": 1.0}):  # type: ignore[arg-type]
            raise KeyboardInterrupt
        assert "done" not in stream.getvalue()
    assert not [thread for thread in threading.enumerate() if thread.name == "start-progress"]


def test_what_is_left_follows_from_experience_then_from_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    stage = Stage("building", {"one": 30.0, "two": 10.0}, 40.0)
    stage.next("one")
    now[0] += 10
    assert stage.remaining() == 30
    now[0] += 50
    assert stage.remaining() == 0
    stage.next("two")  # three quarters of the work took 60 s
    assert stage.share == 0.75
    assert stage.remaining() == 17.5, "and not 20: the first item is not all that is known"
    now[0] += 5
    assert stage.remaining() == 12.5
    assert stage.head() == "building 1/2"
    assert stage.state() == "two, 65 s, about 12 s left"
    unknown = Stage("building", {"one": 30.0, "two": 10.0}, None)
    assert unknown.remaining() is None
    unknown.next("one")
    now[0] += 6
    unknown.next("two")
    assert unknown.remaining() == 2


def test_an_engine_says_in_one_line_that_it_is_ready(capsys: pytest.CaptureFixture[str]) -> None:
    KernelBuild(StartProgress(), OPS).finish()  # from now on they are on disk
    with CompiledEngine(**EAGER):
        pass
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("compiled-llm: ready in ")
    assert "nothing compiled" in line


def test_an_engine_is_silent_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with CompiledEngine(**EAGER, progress="off"):
        pass
    assert capsys.readouterr().err == ""


def test_a_cold_start_names_every_graph_and_a_warm_one_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def nothing_is_stored(self: CompileCache, key: object) -> str:
        return "nothing of that name is stored"

    stages: list[tuple[str, list[str], bool]] = []
    shown = StartProgress.stage

    def stage(self, name, weights, *, is_long=True, **options):  # type: ignore[no-untyped-def]
        stages.append((name, list(weights), is_long))
        if name.startswith("compiling graphs"):
            raise RuntimeError("seen")  # what follows is what takes minutes
        return shown(self, name, weights, is_long=is_long, **options)

    monkeypatch.setattr(StartProgress, "stage", stage)
    monkeypatch.setattr(CompileCache, "find", nothing_is_stored)
    with pytest.raises(RuntimeError, match="seen"):
        CompiledEngine(bucket_sizes=(1, 2), token_bucket_sizes=(16,), max_model_len=64, num_kv_blocks=8)
    name, graphs, is_long = stages[-1]
    assert (name.startswith("compiling graphs"), is_long) == (True, True)
    assert sorted(graphs) == ["logprobs", "prompt_logprobs", "sample", "sample_changed", "step"]
