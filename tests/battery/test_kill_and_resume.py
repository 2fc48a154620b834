"""B13: an offline run that is killed at random points and resumed each time has every row of a whole run, once.

In the ordinary run, tests/offline/test_output_file.py kills what writes rows, and test_run.py goes on with the rest.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.offline.runs import COMMAND

ROOT = Path(__file__).parents[2]
NUM_KILLS, NUM_ROWS = 50, 200
ARGUMENTS = ["--input", "prompts.jsonl", "--enforce-eager", "--bucket-sizes", "1,4", "--dtype", "float32"]
ARGUMENTS += ["--token-bucket-sizes", "32", "--max-tokens", "8", "--num-kv-blocks", "100", "--quiet"]

# A process that loads everything once, and forks a whole run, and runs that it kills. Of some kills it makes those of a
# machine that goes down in the middle of a write: the last row loses its end.
KILLER = """
import json, os, random, signal, sys, time

from compiled_llm.commands.batch import main
from compiled_llm.offline.run import run  # all that a run loads, before it is forked

num_kills, num_rows = int(sys.argv[1]), int(sys.argv[2])
arguments = sys.argv[3:]
rng = random.Random(13)
counts = {"kills": 0, "kills before a row": 0, "kills with a row cut off": 0, "runs that were over": 0}


def start(path):
    child = os.fork()
    if child == 0:
        os._exit(main("serve_offline", [*arguments, "--output", path, "--resume"]))
    return child


def finish(path):
    status = os.waitstatus_to_exitcode(os.waitpid(start(path), 0)[1])
    assert status == 0, status


def content():
    if not os.path.exists("killed.jsonl"):
        return b""
    with open("killed.jsonl", "rb") as file:
        return file.read()


finish("whole.jsonl")
for kill in range(num_kills):
    before, ended = content(), 0
    goal = num_rows * (kill + rng.random()) / num_kills
    child = start("killed.jsonl")
    while content().count(b"\\n") < goal and not ended:
        ended, _ = os.waitpid(child, os.WNOHANG)
        time.sleep(0.0005)
    if ended:
        counts["runs that were over"] += 1
        continue
    time.sleep(rng.random() * 0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    counts["kills"] += 1
    after = content()
    whole = before[: before.rfind(b"\\n") + 1]
    assert after.startswith(whole), "rows that were finished are gone"
    counts["kills before a row"] += after == whole
    last = len(after) - after.rfind(b"\\n", 0, -1) - 1
    if rng.random() < 0.5 and last > 1:
        os.truncate("killed.jsonl", len(after) - rng.randrange(1, last))
        counts["kills with a row cut off"] += 1
finish("killed.jsonl")
with open("counts.json", "w") as file:
    json.dump(counts, file)
"""


@pytest.mark.battery
def test_no_row_is_lost_or_there_twice(tmp_path: Path, battery_counts: Counter[str]) -> None:
    prompts = [json.dumps({"prompt": f"def f{n}(x):\n    return "}) + "\n" for n in range(NUM_ROWS)]
    (tmp_path / "prompts.jsonl").write_text("".join(prompts))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", KILLER, str(NUM_KILLS), str(NUM_ROWS), *ARGUMENTS]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr

    whole, killed = ((tmp_path / name).read_text().splitlines() for name in ("whole.jsonl", "killed.jsonl"))
    assert len(killed) == NUM_ROWS
    assert sorted(killed) == sorted(whole), "the same rows, with the same tokens, though they are sampled"
    counts = json.loads((tmp_path / "counts.json").read_text())
    battery_counts.update(counts)
    assert counts["kills"] > NUM_KILLS // 2
    assert counts["kills before a row"]
    assert counts["kills with a row cut off"]


# -- With workers

WAYS = {"two workers": ["--workers", "2"], "ray": ["--workers", "2", "--ray"]}
NUM_ROWS_OF_WORKERS = 3000


class Run:
    """Runs with the same input and output, one after the other, and their processes."""

    def __init__(self, directory: Path, arguments: list[str]) -> None:
        self.output, self._log = directory / "killed.jsonl", directory / "log"
        self._command = [*COMMAND, *ARGUMENTS, *arguments, "--output", self.output.name, "--resume"]
        mark = {"KILLED_IN": str(directory)}  # all processes of these runs have it in their environment
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **mark}
        self._mark, self._directory = mark, directory
        self.start()

    def start(self) -> None:
        with open(self._log, "a") as log:
            self.driver = subprocess.Popen(
                self._command, cwd=self._directory, env=self._environment, stdout=log, stderr=log
            )

    def wait_for_rows(self, count: int) -> bool:
        """False: the run has ended."""
        while self.num_rows() < count:
            if self.driver.poll() is not None:
                assert self.driver.returncode == 0, self._log.read_text()
                return False
            time.sleep(0.001)
        return True

    def num_rows(self) -> int:
        return self.output.read_bytes().count(b"\n") if self.output.exists() else 0

    def workers(self) -> list[int]:
        found = []
        for process in psutil.process_iter(["cmdline"]):
            try:
                if "compiled_llm.offline.worker" in (process.info["cmdline"] or ()):
                    found += [process.pid] * (process.environ().items() >= self._mark.items())
            except psutil.Error:
                continue
        return found


@pytest.mark.battery
@pytest.mark.parametrize("way", WAYS)
def test_workers_and_drivers_that_are_killed_cost_no_row(
    tmp_path: Path, way: str, battery_counts: Counter[str]
) -> None:
    num_kills, num_rows = NUM_KILLS, NUM_ROWS_OF_WORKERS
    prompts = [json.dumps({"prompt": f"def f{n}(x):\n    return "}) + "\n" for n in range(num_rows)]
    (tmp_path / "prompts.jsonl").write_text("".join(prompts))
    whole = [*COMMAND, *ARGUMENTS, "--output", "whole.jsonl"]
    subprocess.run(whole, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True, capture_output=True)

    rng = random.Random(13)
    goals = sorted(round(num_rows * 0.95 * rng.random()) for _ in range(num_kills))
    run = Run(tmp_path, WAYS[way])
    for number, goal in enumerate(goals):
        if not run.wait_for_rows(goal):
            break
        time.sleep(rng.random() * 0.02)
        workers = run.workers()
        if workers and number % 5:
            with suppress(ProcessLookupError):  # it had no more to do
                os.kill(rng.choice(workers), signal.SIGKILL)
                battery_counts["kills of a worker"] += 1
        else:
            run.driver.kill()
            run.driver.wait()
            battery_counts["kills of a driver"] += 1
            run.start()
    run.wait_for_rows(num_rows + 1)

    served, killed = ((tmp_path / name).read_text().splitlines() for name in ("whole.jsonl", "killed.jsonl"))
    assert len(killed) == num_rows
    assert sorted(killed) == sorted(served), "the same rows, with the same tokens, though they are sampled"
    assert battery_counts["kills of a worker"] + battery_counts["kills of a driver"] > num_kills * 3 // 4
