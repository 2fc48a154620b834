"""bench_attention: cases and what is counted for them, every result compared before it is timed, table, JSON, plot."""

import contextlib
import gc
import importlib
import importlib.util
import json
import sys
import types
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).parents[3] / "scripts" / "bench"
TINY = ["--heads", "4", "--kv-heads", "2", "--head-dim", "32", "--seconds", "0"]
SKEWED = "1x70,3x20"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, with limits that are measured in no time and FlexAttention as torch runs it without compiling."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    module = importlib.import_module("bench_attention")
    monkeypatch.setitem(module.LAYERS_BYTES, "cpu", 1 << 16)
    monkeypatch.setitem(module.MATMUL_SIZE, "cpu", 16)
    monkeypatch.setattr(module, "MAX_LAYERS", 2)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    return module


@pytest.fixture
def run(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Any:
    def main(*arguments: str) -> int:
        monkeypatch.setattr(sys, "argv", ["bench_attention.py", *TINY, *arguments])
        try:
            return bench.main()
        except SystemExit as bad_arguments:
            return int(bad_arguments.code or 0)

    return main


def groups(bench: ModuleType, kind: str, text: str) -> list[tuple[int, int, int]]:
    return [(g.count, g.query_len, g.seq_len) for g in bench.parse_case(kind, text).groups]


@pytest.mark.parametrize(
    ("kind", "text", "expected"),
    [
        ("decode", "8x1024", [(8, 1, 1024)]),
        ("decode", "1x8192,31x256", [(1, 1, 8192), (31, 1, 256)]),
        ("prefill", "512+0", [(1, 512, 512)]),
        ("prefill", "4+4096", [(1, 4, 4100)]),
        ("prefill", "8x4+4096", [(8, 4, 4100)]),
        ("prefill", "2x4+10,1+0", [(2, 4, 14), (1, 1, 1)]),
    ],
)
def test_cases_are_parsed(bench: ModuleType, kind: str, text: str, expected: list[tuple[int, int, int]]) -> None:
    assert groups(bench, kind, text) == expected
    assert bench.parse_case(kind, text).name == f"{kind} {text}"


def test_a_skewed_decode_has_a_uniform_counterpart(bench: ModuleType) -> None:
    def uniform(text: str) -> list[tuple[int, int]] | None:
        counterpart = bench.parse_case("decode", text).uniform()
        return counterpart and [(group.count, group.seq_len) for group in counterpart.groups]

    assert uniform("1x8192,31x256") == [(32, 504)]
    assert uniform("1x10,2x2") == [(2, 5), (1, 4)]
    assert uniform("8x1024") is None
    assert uniform("1x64,2x64") is None
    assert bench.parse_case("prefill", "4+10,4+20").uniform() is None


def test_bytes_and_operations_are_those_counted_by_hand(bench: ModuleType) -> None:
    shape = bench.Shape(heads=4, kv_heads=2, head_dim=64, block_size=16, dtype=torch.bfloat16)
    decode, prefill = bench.parse_case("decode", "2x10,1x5"), bench.parse_case("prefill", "2x3+2")
    # 25 keys, each with a key and a value row in 2 heads: 100 rows of 64 elements, and a float32 scale where quantised.
    assert decode.num_bytes(shape, torch.bfloat16) == 100 * 128
    assert decode.num_bytes(shape, torch.float32) == 100 * 256
    assert decode.num_bytes(shape, torch.int8) == 100 * 68
    assert decode.num_bytes(shape, torch.float8_e4m3fn) == 100 * 68
    # A product and a sum for each element of a key and of a value that a query's head sees: 4 * 64 * 4 heads.
    assert decode.num_flops(shape) == 1024 * 25
    assert prefill.num_flops(shape) == 1024 * 2 * (3 + 4 + 5)
    assert prefill.num_bytes(shape, torch.bfloat16) == 2 * 5 * 4 * 128


def test_rows_of_the_table_and_of_the_json(run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    arguments = ["--decode", "2x40", SKEWED, "--prefill", "5+20", "--block-size", "16", "8", "--json", str(path)]
    assert run(*arguments) == 0
    out = capsys.readouterr().out.splitlines()
    record = json.loads(out[-1])
    assert json.loads(path.read_text()) == record
    assert record["benchmark"] == "attention"
    assert f" {' '.join(arguments[:-1])} " in record["command"]  # the path is written as the directory sees it
    assert record["machine"]["torch"] == torch.__version__
    rows = record["rows"]
    assert [(row["case"], row["kv_dtype"], row["block_size"]) for row in rows] == [
        (case, dtype, size)
        for case in ("decode 2x40", f"decode {SKEWED}", "prefill 5+20")
        for dtype in ("bfloat16", "int8", "fp8")
        for size in (16, 8)
    ]
    for row in rows:
        others = {"uniform"} if SKEWED in row["case"] else set()
        assert row["left_out"] == {}
        assert set(row["seconds"]) == {"op", "gather", "sdpa", "flex", "hf-paged"} | others
        assert all(seconds > 0 for seconds in row["seconds"].values())
        assert ("to_uniform" in row) == bool(others)
    assert sum(line.startswith(("decode ", "prefill ")) for line in out) == len(rows)


def test_rates_and_ratios(bench: ModuleType, run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def seconds_of(name: Any) -> float:
        if isinstance(name, str):
            return {"memory": 1e-3, "matmul": 1e-6}.get(name, 8e-3)
        return (6e-3 if name[0] == "op" else 5e-3) / (2 if name[1] == "int8" else 1)

    monkeypatch.setattr(bench, "interleaved", lambda runs, args: {name: seconds_of(name) for name in runs})
    path = tmp_path / "out.json"
    assert run("--decode", SKEWED, "--prefill", "16+0", "--kv-dtype", "int8", "--json", str(path)) == 0
    bfloat16, int8, prefill, _ = json.loads(path.read_text())["rows"]
    memory = bench.LAYERS_BYTES["cpu"] / 1e-3  # bytes a second
    assert bfloat16["memory_limit_gb_per_s"] == pytest.approx(memory / 1e9)
    assert bfloat16["matmul_limit_tflop_per_s"] == pytest.approx(2 * 16**3 / 1e-6 / 1e12)
    assert bfloat16["limit"] == int8["limit"] == "memory"
    assert bfloat16["bytes"] == 130 * 2 * 2 * 64
    assert bfloat16["gb_per_s"] == pytest.approx(bfloat16["bytes"] / 6e-3 / 1e9)
    assert bfloat16["share_of_limit"] == pytest.approx(bfloat16["bytes"] / memory / 6e-3)
    assert int8["share_of_limit"] == pytest.approx(130 * 2 * 2 * 36 / memory / 3e-3)
    assert (bfloat16["to_model_dtype"], int8["to_model_dtype"]) == (1, 0.5)
    assert bfloat16["to_uniform"] == int8["to_uniform"] == pytest.approx(1.2)
    assert bfloat16["seconds"]["gather"] == int8["seconds"]["gather"] == 8e-3
    assert prefill["flops"] == 4 * 4 * 32 * 16 * 17 // 2
    assert prefill["tflop_per_s"] == pytest.approx(prefill["flops"] / 6e-3 / 1e12)


@pytest.mark.parametrize(("kind", "text"), [("decode", SKEWED), ("prefill", "2x3+20,1x17+0"), ("prefill", "2x9+0")])
def test_op_and_alternatives_agree_to_the_last_digits(bench: ModuleType, kind: str, text: str) -> None:
    step = bench.Step(bench.parse_case(kind, text), bench.Shape(4, 2, 32, 16, torch.float32), "cpu", num_layers=2)
    with torch.inference_mode():
        ours = bench.op(step, torch.float32, block_size=16)
        assert torch.equal(ours(0), ours(1)) == (text == "2x9+0"), "layers differ in all but this step's tokens"
        torch.testing.assert_close(ours(0), bench.expected(step, torch.float32), atol=1e-5, rtol=1e-5)
        for name, build in bench.ALTERNATIVES.items():
            other = build(step)
            for layer in (0, 1):
                torch.testing.assert_close(other(layer), ours(layer), atol=1e-5, rtol=1e-5, msg=name)
        for dtype in (torch.int8, torch.float8_e4m3fn):
            quantised = bench.op(step, dtype, block_size=8)(0)
            torch.testing.assert_close(quantised, bench.expected(step, dtype), atol=1e-3, rtol=1e-3)
            assert not torch.allclose(quantised, ours(0), atol=2e-3, rtol=2e-3)


class CapturedGraph:
    """Stands for torch.cuda.CUDAGraph, which knows addresses and keeps no tensor."""

    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[CapturedGraph]:
    """Those that were captured."""
    captured: list[CapturedGraph] = []

    @contextlib.contextmanager
    def capture(graph: CapturedGraph) -> Iterator[None]:
        captured.append(graph)
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", CapturedGraph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    return captured


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Those that a function holds: in its closure, and in what is there."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, types.FunctionType):
        inside: Iterable[Any] = [cell.cell_contents for cell in value.__closure__ or ()]
    else:
        inside = value if isinstance(value, list | tuple) else getattr(value, "__dict__", {}).values()
    return [tensor for one in inside for tensor in tensors_of(one)]


@pytest.mark.parametrize("name", ["op", "gather", "sdpa", "hf-paged"])
def test_a_captured_graph_keeps_what_it_reads(bench: ModuleType, graphs: list[CapturedGraph], name: str) -> None:
    """Caches and tables that nothing else holds: a replay would read what came to lie there later."""
    with torch.inference_mode():
        step = bench.Step(bench.parse_case("decode", SKEWED), bench.Shape(4, 2, 32, 16, torch.float32), "cpu", 2)
        attend = bench.op(step, torch.float32, 16) if name == "op" else bench.ALTERNATIVES[name](step)
        run, calls = bench.all_layers(attend, 2, "cuda")
    read = [weakref.ref(tensor) for tensor in tensors_of(attend)]
    assert calls == 2
    assert len(read) > 4
    del attend, step
    gc.collect()
    assert all(tensor() is not None for tensor in read)
    run()
    assert [graph.replays for graph in graphs] == [1]
    del run
    gc.collect()
    assert not any(tensor() is not None for tensor in read), "nothing else held them"


@pytest.mark.parametrize("name", ["gather", "sdpa", "flex", "hf-paged"])
def test_an_alternative_with_another_result_is_left_out(
    bench: ModuleType, run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    build = bench.ALTERNATIVES[name]

    def wrong_in_one_row(step: Any) -> Any:
        def attend(layer: int) -> torch.Tensor:
            output = build(step)(layer).clone()
            output[-1, -1] *= 1.1
            return output

        return attend

    monkeypatch.setitem(bench.ALTERNATIVES, name, wrong_in_one_row)
    assert run("--decode", "2x40", "3x30", "--prefill", "--kv-dtype", "int8") == 0
    out = capsys.readouterr().out
    for row in json.loads(out.splitlines()[-1])["rows"]:
        assert name not in row["seconds"]
        assert f"{name} gives another result" in row["left_out"][name]
    assert f"{name} is left out: {name} gives another result" in out


@pytest.mark.parametrize("wrong", ["scaled", "NaN", "quantised"])
def test_a_wrong_result_of_the_op_ends_the_run(
    bench: ModuleType, run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    contenders = importlib.import_module("bench_attention_contenders")
    right = contenders.paged_attention

    def paged_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, *args, **kwargs):
        output = right(q, k, v, k_cache, *args, **kwargs)
        if wrong == "quantised" and k_cache.dtype != torch.int8:
            return output
        output[0, 0] *= float("nan") if wrong == "NaN" else 1.1
        return output

    monkeypatch.setattr(contenders, "paged_attention", paged_attention)
    assert run("--decode", "2x40", "--prefill", "--kv-dtype", "int8") == 1
    captured = capsys.readouterr()
    assert f"the op (decode 2x40, {'int8' if wrong == 'quantised' else 'bfloat16'}) gives another" in captured.err
    assert '"rows"' not in captured.out


def test_an_alternative_that_does_not_compile_is_said_once(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("not on\nthis machine")

    monkeypatch.setattr(torch, "compile", refuse)
    assert run("--decode", "2x40", "1x30", "--prefill", "--kv-dtype", "int8", "--skip", "gather") == 0
    out = capsys.readouterr().out
    said = "    flex is left out: does not compile: NotImplementedError: not on this machine"
    assert out.splitlines().count(said) == 1
    for row in json.loads(out.splitlines()[-1])["rows"]:
        assert set(row["seconds"]) == {"op", "sdpa", "hf-paged"}


def test_the_plot_is_written(run: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plot.png"
    assert run("--decode", SKEWED, "--prefill", "5+20", "--skip", "flex", "--plot", str(path)) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_refused_before_the_run(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    assert run("--plot", "plot.png") == 2
    captured = capsys.readouterr()
    assert "pip install matplotlib" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--decode", "8"], "BATCHxCONTEXT"),
        (["--decode", "8x"], "'8x'"),
        (["--decode", "0x8"], "at least 1"),
        (["--decode", "8x0"], "at least 1"),
        (["--decode", "1x8,"], "'1x8,'"),
        (["--decode", "-1x8"], "unknown flag -1x8"),
        (["--prefill", "512"], "TOKENS+CONTEXT"),
        (["--prefill", "0+512"], "at least 1"),
        (["--prefill", "0x4+512"], "at least 1"),
        (["--prefill", "8x1024"], "TOKENS+CONTEXT"),
        (["--decode", "--prefill"], "nothing to measure"),
        (["--kv-dtype", "int4"], "int4"),
        (["--dtype", "int8"], "int8"),
        (["--block-size", "0"], "--block-size must be at least 1"),
        (["--kv-heads", "3"], "multiple of --kv-heads"),
        (["--seconds", "-1"], "--seconds"),
        (["--seconds", "nan"], "--seconds"),
        (["--skip", "op"], "op"),
        (["--json", "/no/such/folder/out.json"], "/no/such/folder"),
        (["--plot", "/no/such/folder/out.png"], "/no/such/folder"),
        (["--plot", "out.jpeg"], ".png"),
    ],
)
def test_bad_arguments_exit_with_2(
    run: Any, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    assert run(*arguments) == 2
    assert words in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA GPU here")
def test_no_gpu_is_no_traceback(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--device", "cuda") == 2
    assert "no CUDA GPU" in capsys.readouterr().err
