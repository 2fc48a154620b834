"""The engine for Ray Data: the lines of ``compiled-llm batch`` beside the rows, also after a run that was killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from compiled_llm.offline.ray_data import RayDataEngine
from compiled_llm.offline.serving import EngineFaultsError
from compiled_llm.worker.runner import ModelRunner
from tests.offline.runs import COMMAND

SCRIPT = Path(__file__).parents[2] / "scripts" / "serve_ray_data.py"
FLAGS = ["--device", "cpu", "--dtype", "float32", "--enforce-eager", "--bucket-sizes", "1,4", "--num-kv-blocks", "300"]
ENGINE: dict[str, Any] = {"device": "cpu", "dtype": "float32", "enforce_eager": True, "num_kv_blocks": 300}
ENGINE |= {"bucket_sizes": (1, 4)}
ROWS: list[dict[str, Any]] = [
    {"prompt": "def add(a, b):", "custom_id": "one"},
    {"prompt": "import ", "sampling_params": {"max_tokens": 3, "temperature": 0.0}},
    {"prompt_token_ids": [5, 6, 7], "cache_salt": "a"},
    {"prompt": "class A:", "sampling_params": {"max_tokens": 0}},
    {"prompt": "class B:", "prompt_token_ids": [1]},
]


def table(rows: list[dict[str, Any]]) -> pyarrow.Table:
    """With a column that is no key of a row."""
    columns: dict[str, list[Any]] = {"index": list(range(len(rows)))}
    columns |= {key: [row.get(key) for row in rows] for key in sorted({key for row in rows for key in row})}
    return pyarrow.table({**columns, "source": [f"file {index}" for index in columns["index"]]})


@pytest.fixture(scope="module")
def engine() -> Iterator[RayDataEngine]:
    engine = RayDataEngine(sampling={"max_tokens": 6}, **ENGINE)
    yield engine
    engine.close()


@pytest.mark.battery
def test_answers_are_the_lines_of_the_command(engine: RayDataEngine, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    command = [*COMMAND, *FLAGS, "--max-tokens", "6", "--input", "rows.jsonl", "--output", "out.jsonl", "--ordered"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True).returncode == 1, "two rows are wrong"
    given = table(ROWS)
    done = engine(given)
    assert done.column_names == [*given.column_names, "answer", "error"]
    assert done.select(given.column_names).equals(given)
    assert done.column("answer").to_pylist() == (tmp_path / "out.jsonl").read_text().splitlines()
    errors = done.column("error").to_pylist()
    assert errors[:3] == [None, None, None]
    assert "max_tokens" in errors[3]
    assert "must have exactly one of" in errors[4]
    # The same rows in another company, as after a run that was stopped.
    assert engine(given.slice(2, 3)).column("answer").to_pylist() == done.column("answer").to_pylist()[2:]
    assert engine(given.slice(0, 0)).num_rows == 0


def test_tables_that_cannot_be_served(engine: RayDataEngine) -> None:
    given = table(ROWS)
    with pytest.raises(ValueError, match="batch_format must be 'pyarrow' in map_batches, given batches of dict"):
        engine({"index": [0], "prompt": ["a"]})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"must have a column 'index' of integers, given cache_salt \(string\), "):
        engine(given.drop_columns("index"))
    with pytest.raises(ValueError, match="must not have a column 'answer', which is added: rename it"):
        engine(given.rename_columns({"source": "answer"}))
    for index, times in ((None, 1), (-1, 1), (7, 2)):
        indices = pyarrow.array([index] * times + list(range(len(ROWS) - times)))
        with pytest.raises(ValueError, match=rf"index must be another integer >= 0 in each row, given {index}"):
            engine(given.set_column(0, "index", indices))


def test_an_engine_that_keeps_failing_ends_the_job(engine: RayDataEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(ModelRunner, "launch", broken)
    with pytest.raises(EngineFaultsError, match="for the same kind of fault"):
        engine(table([{"prompt": f"def f{number}("} for number in range(40)]))


@pytest.mark.battery
def test_a_run_that_was_killed_goes_on_by_its_checkpoints(tmp_path: Path) -> None:
    num_rows = 2000
    rows = [{"prompt": f"def f{number}(x):"} for number in range(num_rows)]
    pyarrow.parquet.write_table(table(rows), tmp_path / "rows.parquet", row_group_size=100)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [*FLAGS, "--max-tokens", "6"]
    command = [*COMMAND, *flags, "--input", "rows.jsonl", "--output", "out.jsonl", "--ordered", "--quiet"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)

    paths = ["--input", "rows.parquet", "--output", "answers", "--checkpoint", "done"]
    job = [sys.executable, str(SCRIPT), *paths, "--num-cpus", "0", "--num-threads", "1", "--batch-size", "100", *flags]
    environment = {**os.environ, "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    with open(tmp_path / "log", "w") as log:
        driver = subprocess.Popen(job, cwd=tmp_path, env=environment, stdout=log, stderr=log, start_new_session=True)
        while len(list(tmp_path.glob("done/**/*.parquet"))) < 3:
            assert driver.poll() is None, (tmp_path / "log").read_text()
            time.sleep(0.05)
        os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()
    before = indices(tmp_path / "answers")
    assert 0 < len(before) < num_rows

    done = subprocess.run(job, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(indices(tmp_path / "answers")) == list(range(num_rows)), "each row once"
    answers = pyarrow.parquet.read_table(tmp_path / "answers").sort_by("index").column("answer").to_pylist()
    assert answers == (tmp_path / "out.jsonl").read_text().splitlines()


def indices(directory: Path) -> list[int]:
    files = list(directory.glob("*.parquet"))
    return [index for file in files for index in pyarrow.parquet.read_table(file).column("index").to_pylist()]
