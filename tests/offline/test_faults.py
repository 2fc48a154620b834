"""B12: faults of steps, files, the clock and processes: every row ends once, or the run does and is resumed."""

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_llm.engine.step_engine import StepEngine
from compiled_llm.scheduling.scheduler import Scheduler
from compiled_llm.scheduling.scheduler_output import SchedulerOutput
from compiled_llm.system.child_process import Channel, encoded
from compiled_llm.worker.runner import ModelRunner
from tests.offline import runs
from tests.offline.runs import COMMAND, rows, write_prompts

NUM_ROWS = 12
FAST = [*runs.FAST, "--dtype", "float32", "--quiet"]


def run(*arguments: str) -> int:
    return runs.run(*FAST, *arguments)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("input") / "prompts.jsonl", NUM_ROWS)


@pytest.fixture(scope="module")
def whole(prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict]:
    """The rows without a fault."""
    path = tmp_path_factory.mktemp("whole") / "out.jsonl"
    assert run("--input", str(prompts), "--output", str(path)) == 0
    return rows(path)


def check_resumed(prompts: Path, output: Path, whole: dict[int, dict]) -> None:
    """What a later run makes of the output, without the fault."""
    arguments = ["--input", str(prompts), "--output", str(output), "--resume", "--retry-errors"]
    assert run(*arguments) == 0
    assert rows(output) == whole


# -- Steps


def break_steps(monkeypatch: pytest.MonkeyPatch, causes: set[str], error: Exception) -> None:
    """Steps with a request of ``causes`` raise ``error``."""
    launch = ModelRunner.launch

    def broken(runner: ModelRunner, output: SchedulerOutput) -> Any:
        launched = launch(runner, output)
        if causes.intersection(request_id.name for request_id in output.request_ids):
            raise error
        return launched

    monkeypatch.setattr(ModelRunner, "launch", broken)


def test_a_row_that_breaks_steps_is_found_and_the_others_are_as_without_it(
    prompts: Path, whole: dict[int, dict], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        break_steps(patch, {"5"}, torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"))
        assert run("--input", str(prompts), "--output", str(output)) == 1
    found = rows(output)
    assert found.pop(5)["error"]["type"] == "server_error"
    assert found == {index: row for index, row in whole.items() if index != 5}
    assert "row 5 (prompts.jsonl, line 6) failed" in capsys.readouterr().err
    check_resumed(prompts, output, whole)


def test_a_second_fault_of_a_kind_ends_the_run(
    prompts: Path, whole: dict[int, dict], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, arguments = tmp_path / "out.jsonl", ["--input", str(prompts), "--order-window", "1"]
    with pytest.MonkeyPatch.context() as patch:
        break_steps(patch, {"4", "5"}, RuntimeError("the kernel broke"))
        assert run(*arguments, "--output", str(output)) == 1
        err = capsys.readouterr().err
        assert "2 rows ended for the same kind of fault" in err
        assert "--resume serves the others" in err
        assert 2 <= len(rows(output)) < NUM_ROWS
        more = tmp_path / "more.jsonl"
        assert run(*arguments, "--output", str(more), "--max-faults", "2") == 1
    assert {index for index, row in rows(more).items() if "error" in row} == {4, 5}
    assert len(rows(more)) == NUM_ROWS
    check_resumed(prompts, output, whole)


def test_an_error_outside_the_device_ends_what_ran_and_the_others_are_served(
    prompts: Path, whole: dict[int, dict], tmp_path: Path
) -> None:
    output, update, num_updates = tmp_path / "out.jsonl", Scheduler.update, [0]

    def broken(scheduler: Scheduler, *arguments: Any) -> Any:
        num_updates[0] += 1
        if num_updates[0] == 3:
            raise RuntimeError("a fault of the scheduler")
        return update(scheduler, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Scheduler, "update", broken)
        assert run("--input", str(prompts), "--output", str(output)) == 1
    found = rows(output)
    assert len(found) == NUM_ROWS
    assert any("a fault of the scheduler" in row["error"]["message"] for row in found.values() if "error" in row)
    check_resumed(prompts, output, whole)


# -- Signals


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step_numbers: set[int], number: signal.Signals) -> None:
    step, count = StepEngine.step, [0]

    def interrupted(engine: StepEngine) -> Any:
        count[0] += 1
        if count[0] in step_numbers:
            signal.raise_signal(number)
        return step(engine)

    monkeypatch.setattr(StepEngine, "step", interrupted)


@pytest.mark.parametrize(
    ("number", "status", "steps"), [(signal.SIGINT, 130, {3}), (signal.SIGTERM, 143, {3, 5})], ids=["once", "twice"]
)
def test_a_signal_lets_what_runs_end_and_a_second_one_does_not(
    number: signal.Signals,
    status: int,
    steps: set[int],
    prompts: Path,
    whole: dict[int, dict],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "out.jsonl"
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at(patch, steps, number)
        assert run("--input", str(prompts), "--output", str(output), "--order-window", "1") == status
    captured = capsys.readouterr()
    assert captured.err.endswith(f"serve_offline: stopped by {number.name}\n")
    if len(steps) == 1:
        assert "4 rows; --resume serves the others" in captured.err
        assert rows(output) == {index: whole[index] for index in range(4)}, "those that ran"
        assert "rows         4 in" in captured.out, "a summary"
    else:
        assert not output.exists(), "no row had ended"
        assert "Summary" not in captured.out
    check_resumed(prompts, output, whole)


# -- Files, and the clock


@pytest.mark.parametrize("after", [0, 3])
def test_a_full_disk_ends_the_run_with_whole_rows(
    after: int, prompts: Path, whole: dict[int, dict], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, write, num_writes = tmp_path / "out.jsonl", os.write, [0]

    def full(descriptor: int, data: bytes) -> int:
        num_writes[0] += 1
        if num_writes[0] <= after:
            return write(descriptor, data)
        write(descriptor, data[:20])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "write", full)
        assert run("--input", str(prompts), "--output", str(output)) == 1
    err = capsys.readouterr().err
    assert f"error: --output {output}: No space left on device" in err
    assert "Traceback" not in err
    assert output.exists() == bool(after)
    if after:
        assert len(rows(output)) == after
    check_resumed(prompts, output, whole)


def test_a_clock_that_jumps_changes_nothing(
    prompts: Path, whole: dict[int, dict], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, output = time.time(), tmp_path / "out.jsonl"
    times = iter(lambda: now + 1e9 * (-1) ** int(now), None)
    monkeypatch.setattr(time, "time", lambda: next(times))
    assert run("--input", str(prompts), "--output", str(output)) == 0
    assert rows(output) == whole


# -- Processes


@pytest.mark.battery
@pytest.mark.parametrize("victim", ["worker", "driver"])
def test_a_killed_process_costs_no_row(victim: str, prompts: Path, whole: dict[int, dict], tmp_path: Path) -> None:
    """With two workers. One that is killed is started again; without a driver, workers end by themselves."""
    output, many = tmp_path / "out.jsonl", tmp_path / "many.jsonl"
    many.write_text(prompts.read_text() * 40)
    arguments = ["--input", str(many), "--output", str(output), "--workers", "2", "--resume"]
    with open(tmp_path / "log", "w") as log:
        driver = subprocess.Popen([*COMMAND, *FAST, *arguments], stdout=log, stderr=log)
    while not output.exists() or output.read_bytes().count(b"\n") < 20:
        assert driver.poll() is None, (tmp_path / "log").read_text()
        time.sleep(0.01)
    children = Path(f"/proc/{driver.pid}/task/{driver.pid}/children").read_text().split()
    workers = [pid for pid in map(int, children) if b"offline.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(workers) == 2
    os.kill(workers[0] if victim == "worker" else driver.pid, signal.SIGKILL)
    assert driver.wait() == (0 if victim == "worker" else -signal.SIGKILL), (tmp_path / "log").read_text()
    for pid in workers:
        end = time.monotonic() + 30
        while Path(f"/proc/{pid}").exists() and time.monotonic() < end:
            time.sleep(0.01)
        assert not Path(f"/proc/{pid}").exists(), "a worker outlives its driver"
    if victim == "driver":
        assert len(rows(output)) < 40 * NUM_ROWS
        assert run(*arguments[:-3], "--resume") == 0
    found = rows(output)
    assert len(found) == 40 * NUM_ROWS
    assert all(found[index]["prompt"] == whole[index % NUM_ROWS]["prompt"] for index in found)
    assert {index: found[index] for index in range(NUM_ROWS)} == whole, "sampled tokens too"


@pytest.mark.parametrize("gets_settings", [False, True])
def test_a_worker_whose_driver_goes_while_it_starts_ends_without_a_traceback(gets_settings: bool) -> None:
    own, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "compiled_llm.offline.worker"]
        worker = subprocess.Popen(command, stdin=theirs.fileno(), stderr=subprocess.PIPE, text=True)
    if gets_settings:
        sampling = {"max_tokens": 1}
        settings = {"program": "x", "arguments": FAST, "number": 0, "sampling": sampling, "cpus": None, "overrides": {}}
        Channel(own).send(encoded({**settings, "directory": os.getcwd(), "digests": {}}))
    own.close()
    _, err = worker.communicate()
    assert (worker.returncode, err) == (1, "")
