"""gpu_step_tables: the page is that of the lines in the repository; lines are kept, made anew, and joined."""

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield load("gpu_step_tables")
    for name in ("gpu_step_page", "bench"):
        sys.modules.pop(name, None)


@pytest.fixture
def page() -> Any:
    return load("gpu_step_page")


def line(model: str, bucket: str, kv: str, launches: int = 7, slope: float = 0.01, **fields: Any) -> dict[str, Any]:
    """All steps take 1 ms at 90% of the bandwidth; attention ``slope`` us a key."""
    estimates = [
        {
            "gpu": gpu, "keys": keys, "step_us": 1000.0, "bytes": 1, "bandwidth_share": 0.9, "matrix_share": 0.5,
            "attention_us": slope * keys, "layer_us": [1.0], "bound_by": ["memory"], "fits": True,
        }
        for gpu in ("h100", "h200")
        for keys in (1024, 8192, 32768)
    ]  # fmt: skip
    names = {"model": model, "bucket": bucket, "kv_cache_dtype": kv, "source": "s", "commit": "c"}
    counts = {"launches_per_layer": launches, "launches": 10 * launches, "layer": ["a"], "spilled": []}
    return names | counts | {"estimates": estimates} | fields


def test_the_page_of_the_repository_is_that_of_its_lines(page: Any) -> None:
    lines = [page.read_lines(page.FOLDER / f"{name}.jsonl") for name in (page.NOW, page.MEASURED)]
    assert page.page(*lines) == page.PAGE.read_text(), "run python scripts/gpu_step_tables.py"


def test_launches_and_steps_of_a_line(page: Any) -> None:
    text = page.page([line("qwen3-0.6b", "decode_1", "auto")], [])
    assert "| Qwen3-0.6B | decode, 1 | 7 | 70 |" in text
    assert "| decode, 1 | 1k | 1 | 90% |" in text
    assert "Nothing was measured yet" in text


def test_what_was_measured_stands_beside_its_estimate(page: Any) -> None:
    launch = {"name": "mm", "in_layer": True, "megabytes": 33.6, "us": 12.5, "estimate_us": 10.0}
    measured = {
        "model": "llama-3.1-8b", "bucket": "decode_1", "exact": True, "layers": 12, "step_us": 2160.0, "commit": "c",
        "estimated_step_us": 1890.0, "median_error": 0.07, "gpu": "NVIDIA H200", "torch": "2.11.0",
        "rows": [launch, launch | {"name": "embedding", "in_layer": False}],
    }  # fmt: skip
    text = page.page([], [measured])
    assert "| Llama-3.1-8B, decode, 1, exact | 12 | 2.16 | 1.89 | 0.88 | 7% |" in text
    assert "| Llama-3.1-8B, decode, 1, exact | `mm` | 33.6 | 12.5 | 10.0 |" in text
    assert "embedding" not in text


def test_what_does_not_fit_and_caches_that_differ_are_said(page: Any) -> None:
    kinds = {kv: line("qwen3-0.6b", "decode_256", kv, launches=7 + (kv == "fp8")) for kv in ("auto", "int8", "fp8")}
    kinds["auto"]["estimates"][2]["fits"] = False
    text = page.page(list(kinds.values()), [])
    assert "| decode, 256 | bf16 7, int8 7, fp8 8 | bf16 70, int8 70, fp8 80 |" in text
    assert "| decode, 256 | 32k | - | - | 1 | 90% | 1 | 90% |" in text


def test_lines_of_this_code_are_kept_and_others_made_anew(
    tables: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines" / "now.jsonl"
    cases = [tables.Case("qwen3-0.6b", bucket, "auto") for bucket in ("decode_8", "decode_1", "decode_32")]
    asked: list[Any] = []

    def run(missing: list[Any], processes: int) -> Iterator[Any]:
        asked.append(missing)
        for case in missing:
            values = {k: v for k, v in line(*case).items() if k not in (*case._fields, "source", "commit")}
            yield case, "RuntimeError('no code')" if case.bucket == "decode_32" and len(asked) == 1 else values

    monkeypatch.setattr(tables, "run", run)
    assert tables.make(path, cases, 1) == ["qwen3-0.6b decode_32 auto: RuntimeError('no code')"]
    assert [json.loads(one)["bucket"] for one in path.read_text().splitlines()] == ["decode_1", "decode_8"]
    assert tables.make(path, cases, 1) == []
    assert asked[1] == [cases[2]]
    monkeypatch.setattr(tables, "digest", lambda: "another")
    assert tables.make(path, cases[:1], 1) == []
    assert asked[2] == cases[:1]
    sources = [one["source"] for one in map(json.loads, path.read_text().splitlines())]
    assert [source == "another" for source in sources] == [False, True, False]
    assert tables.make(path, cases, 1) == []
    assert asked[3] == [cases[1], cases[2]]
    assert {one["source"] for one in map(json.loads, path.read_text().splitlines())} == {"another"}


def test_gpus_of_the_same_code_share_it_unless_one_is_tuned(tables: Any, tmp_path: Path) -> None:
    assert tables.gpu_groups() == [("h100", "h200")]
    tuned = tmp_path / "tiles.json"
    tuned.write_text("{}")
    tables.path_of = lambda name: tuned if name == "NVIDIA H200" else tmp_path / "none.json"
    assert tables.gpu_groups() == [("h100",), ("h200",)]


def test_a_chunk_sees_itself_at_least(tables: Any) -> None:
    assert tables.keys_of("decode_8") == (1024, 8192, 32768)
    assert tables.keys_of("tokens_2048") == (2048, 8192, 32768)


def test_memory_of_weights_and_of_a_token(tables: Any) -> None:
    model = tables.parse_config(tables.SHAPES["qwen3-0.6b"])
    for kv, of_value in (("auto", 2 * 128), ("int8", 128 + 4), ("fp8", 128 + 4)):
        engine = tables.EngineConfig(device="cuda", kv_cache_dtype=kv)
        assert tables.kv_bytes(engine, model) == 2 * 8 * of_value * 28
    assert 1.19e9 < tables.weight_bytes(engine, model) < 1.22e9


@pytest.mark.battery
def test_a_case_is_estimated_in_a_process_of_its_own(tables: Any, tmp_path: Path) -> None:
    case = tables.Case("qwen3-0.6b", "decode_1", "int8")
    assert tables.make(tmp_path / "now.jsonl", [case], 1) == []
    (made,) = map(json.loads, (tmp_path / "now.jsonl").read_text().splitlines())
    assert made["launches"] > 28 * made["launches_per_layer"] == 28 * len(made["layer"])
    first, *_, last = made["estimates"]
    assert (first["gpu"], first["keys"], last["gpu"], last["keys"]) == ("h100", 1024, "h200", 32768)
    assert last["attention_us"] > first["attention_us"] > 0
