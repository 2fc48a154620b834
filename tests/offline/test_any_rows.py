"""Whatever a row holds, it ends as one line, a result or an error, and the rows beside it are served."""

import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from compiled_llm.engine.engine import CompiledEngine
from compiled_llm.offline.formats import row_of_text
from compiled_llm.offline.order import OrderGain, ordered_for_speed
from compiled_llm.offline.reading import RowReader
from compiled_llm.offline.rows import Row, RowIterator, row_to_json
from compiled_llm.offline.serving import RowServer
from compiled_llm.system.child_process import decoded, encoded
from tests.offline import random_rows

GOOD = {"prompt": "def f():", "sampling_params": {"max_tokens": 2}}
SAMPLING = {"max_tokens": 24, "temperature": 0.7}


@pytest.fixture(scope="module")
def engine() -> Iterator[CompiledEngine]:
    with CompiledEngine(
        dtype="float32", enforce_eager=True, bucket_sizes=(1, 8), num_kv_blocks=64, max_model_len=96, progress="off"
    ) as engine:
        yield engine


def no_constant(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


def serve(engine: CompiledEngine, rows: Sequence[Row]) -> dict[int, dict[str, Any]]:
    """The lines of rows by their number, on the way of an offline run; also as rows of a worker."""
    sent = [Row(**decoded(encoded(row_to_json(row)))) for row in rows]
    assert sent == list(rows)
    ordered = ordered_for_speed(iter(sent), len(sent), SAMPLING["max_tokens"], OrderGain())  # type: ignore[arg-type]
    server, found = RowServer(engine, SAMPLING), {}
    for result in server.serve(RowIterator(ordered)):
        if result is not None:
            assert result.index not in found, "a row ends twice"
            found[result.index] = json.loads(result.line, parse_constant=no_constant)
            assert (result.error is not None) == ('"error": {' in result.line.decode(errors="surrogatepass"))
    assert found.keys() == {row.index for row in rows}
    assert not server.faults
    return found


def error_of(line: dict[str, Any]) -> dict[str, Any] | None:
    return (line["response"]["body"] if "response" in line else line).get("error")


def check(lines: dict[int, dict[str, Any]], good: set[int]) -> int:
    """The rows of ``good`` have results, and no error is one of ours; returns how many have one."""
    errors = {index: error for index, line in lines.items() if (error := error_of(line)) is not None}
    assert not good & errors.keys()
    ours = [error for error in errors.values() if error["type"] != "invalid_request_error"]
    assert not [error["message"] for error in ours]
    assert all(len(error["message"]) < 1000 for error in errors.values())
    return len(errors)


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 200), *(pytest.param(seed, 2000, marks=pytest.mark.battery) for seed in range(1, 6))]
)
def test_any_json(engine: CompiledEngine, seed: int, count: int) -> None:
    rng = random.Random(seed)
    texts = [json.dumps(random_rows.row(rng)) for _ in range(count)]
    texts[::25] = [json.dumps(GOOD)] * len(texts[::25])
    rows = [row_of_text(index, f"row {index}", text) for index, text in enumerate(texts)]
    num_errors = check(serve(engine, rows), set(range(0, count, 25)))
    assert count // 4 < num_errors < count


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 30), *(pytest.param(seed, 500, marks=pytest.mark.battery) for seed in range(1, 4))]
)
def test_any_table(engine: CompiledEngine, tmp_path: Path, seed: int, count: int) -> None:
    rng = random.Random(seed)
    paths, good = [], set()
    for number in range(count):
        path = tmp_path / f"{number}.parquet"
        pyarrow.parquet.write_table(random_rows.table(rng, 3), path)
        (tmp_path / f"{number}.jsonl").write_text(json.dumps(GOOD) + "\n")
        paths += [path, path.with_suffix(".jsonl")]
        good.add(number * 4 + 3)
    rows = list(RowReader([str(path) for path in paths]))
    assert [row.index for row in rows] == list(range(4 * count))
    check(serve(engine, rows), good)


def test_min_tokens_is_compared_with_the_runs_max_tokens(engine: CompiledEngine) -> None:
    values = [{"prompt": "a", "sampling_params": {"min_tokens": least}} for least in (20, 25)]
    rows = [row_of_text(index, f"row {index}", json.dumps(row)) for index, row in enumerate(values)]
    served, refused = (serve(engine, rows)[index] for index in (0, 1))
    assert 20 <= len(served["token_ids"]) <= 24
    assert refused["error"]["message"] == "min_tokens must be an integer from 0 to 24, given 25"


def test_an_error_of_ours_as_a_row_is_taken_in_costs_that_row_alone(
    engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = CompiledEngine.add_request

    def fail(self: CompiledEngine, request_id: str, *others: Any, **named: Any) -> None:
        if request_id == "1":
            raise KeyError("x")
        add(self, request_id, *others, **named)

    monkeypatch.setattr(CompiledEngine, "add_request", fail)
    lines = serve(engine, [row_of_text(index, f"row {index}", json.dumps(GOOD)) for index in range(3)])
    assert lines[1]["error"] == {"message": "the row could not be taken in: KeyError: 'x'", "type": "server_error"}
    assert [index for index, line in lines.items() if error_of(line) is None] == [0, 2]
