"""Paged attention and its alternatives: what is counted for a case, and every result is compared before it is timed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_llm.bench import attention, harness

TINY = ["--heads", "4", "--kv-heads", "2", "--head-dim", "32", "--seconds", "0"]
SKEWED = "1x70,3x20"


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """FlexAttention as torch runs it without compiling, few copies, and limits that take no time."""
    monkeypatch.setattr(attention, "limit_runs", lambda device, dtype: harness.limit_runs(device, dtype, 16))
    monkeypatch.setattr(harness, "CACHED_BYTES", 1 << 14)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


@pytest.fixture
def run() -> Any:
    return lambda *words: attention.main("compiled-llm bench attention", [*TINY, *words])


def groups(kind: str, text: str) -> list[tuple[int, int, int]]:
    return [(g.count, g.query_len, g.seq_len) for g in attention.parse_case(kind, text).groups]


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
def test_cases_are_parsed(kind: str, text: str, expected: list[tuple[int, int, int]]) -> None:
    assert groups(kind, text) == expected
    assert attention.parse_case(kind, text).name == f"{kind} {text}"


def test_bytes_and_operations_are_those_counted_by_hand() -> None:
    shape = attention.Shape(heads=4, kv_heads=2, head_dim=64, block_size=16, dtype=torch.bfloat16)
    decode, prefill = attention.parse_case("decode", "2x10,1x5"), attention.parse_case("prefill", "2x3+2")
    # 25 keys, each with a key and a value row in 2 heads: 100 rows of 64 elements, and a float32 scale where quantised.
    assert decode.num_bytes(shape, torch.bfloat16) == 100 * 128
    assert decode.num_bytes(shape, torch.float32) == 100 * 256
    assert decode.num_bytes(shape, torch.int8) == 100 * 68
    assert decode.num_bytes(shape, torch.float8_e4m3fn) == 100 * 68
    # A product and a sum for each element of a key and of a value that a query's head sees: 4 * 64 * 4 heads.
    assert decode.num_flops(shape) == 1024 * 25
    assert prefill.num_flops(shape) == 1024 * 2 * (3 + 4 + 5)
    assert prefill.num_bytes(shape, torch.bfloat16) == 2 * 5 * 4 * 128


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_caches_are_laid_out_as_an_engines(dtype: torch.dtype) -> None:
    """On a CPU: blocks of all layers side by side, and their scales."""
    shape = attention.Shape(heads=4, kv_heads=2, head_dim=32, block_size=16, dtype=torch.bfloat16)
    step = attention.Step(attention.parse_case("decode", SKEWED), shape, "cpu", num_layers=3)
    caches = attention.caches_of(step, dtype, num_blocks=9, block_size=16)
    assert len(caches) == 3
    for cache in caches:
        assert cache.k.shape == cache.v.shape == (9, 2, 16, 32)
        assert cache.k.stride(0) == 2 * 3 * 2 * 16 * (32 if dtype is torch.bfloat16 else 32 + 4)
        assert (cache.k_scale is None) == (dtype is torch.bfloat16)


def test_rates_and_ratios(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def seconds_of(name: Any) -> float:
        if isinstance(name, str):
            return {"memory": 1e-3, "matmul": 1e-6}.get(name, 8e-3)
        return 6e-3 / (2 if name[0] == "int8" else 1)

    monkeypatch.setattr(attention, "call_seconds", lambda runs, *a, **k: {name: [seconds_of(name)] for name in runs})
    monkeypatch.setattr(attention, "limit_runs", lambda device, dtype: {"memory": (None, 1e6), "matmul": (None, 1e9)})
    path = tmp_path / "out.json"
    assert run("--decode", SKEWED, "--prefill", "16+0", "--kv-dtype", "int8", "--json", str(path)) == 0
    bfloat16, int8, prefill, _ = json.loads(path.read_text())["rows"]
    memory = 1e6 / 1e-3  # bytes a second
    assert bfloat16["memory_limit_gb_per_s"] == pytest.approx(memory / 1e9)
    assert bfloat16["matmul_limit_tflop_per_s"] == pytest.approx(1e9 / 1e-6 / 1e12)
    assert bfloat16["limit"] == int8["limit"] == "memory"
    assert bfloat16["bytes"] == 130 * 2 * 2 * 64
    assert bfloat16["gb_per_s"] == pytest.approx(bfloat16["bytes"] / 6e-3 / 1e9)
    assert bfloat16["share_of_limit"] == pytest.approx(bfloat16["bytes"] / memory / 6e-3)
    assert int8["share_of_limit"] == pytest.approx(130 * 2 * 2 * 36 / memory / 3e-3)
    assert (bfloat16["to_model_dtype"], int8["to_model_dtype"]) == (1, 0.5)
    assert bfloat16["seconds"]["gather"] == int8["seconds"]["gather"] == 8e-3
    assert prefill["flops"] == 4 * 4 * 32 * 16 * 17 // 2
    assert prefill["tflop_per_s"] == pytest.approx(prefill["flops"] / 6e-3 / 1e12)


@pytest.mark.parametrize(("kind", "text"), [("decode", SKEWED), ("prefill", "2x3+20,1x17+0"), ("prefill", "2x9+0")])
def test_op_and_alternatives_agree_to_the_last_digits(kind: str, text: str) -> None:
    step = attention.Step(
        attention.parse_case(kind, text), attention.Shape(4, 2, 32, 16, torch.float32), "cpu", num_layers=2
    )
    with torch.inference_mode():
        ours = attention.op(step, torch.float32, block_size=16)
        assert torch.equal(ours(0), ours(1)) == (text == "2x9+0"), "layers differ in all but this step's tokens"
        torch.testing.assert_close(ours(0), attention.expected(step, torch.float32), atol=1e-5, rtol=1e-5)
        for name in attention.names_of("cpu", ()):
            other = attention.ALTERNATIVES[name](step)
            for layer in (0, 1):
                torch.testing.assert_close(other(layer), ours(layer), atol=1e-5, rtol=1e-5, msg=name)
        turned = attention.op(step, torch.float32, 16, turned=True)
        torch.testing.assert_close(turned(1), ours(1), atol=0, rtol=0, msg="an angle of 0 changes nothing")
        for dtype in (torch.int8, torch.float8_e4m3fn):
            quantised = attention.op(step, dtype, block_size=8)(0)
            torch.testing.assert_close(quantised, attention.expected(step, dtype), atol=1e-3, rtol=1e-3)
            assert not torch.allclose(quantised, ours(0), atol=2e-3, rtol=2e-3)


def test_an_alternative_with_another_result_is_left_out(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "gather"
    build = attention.ALTERNATIVES[name]

    def wrong_in_one_row(step: Any) -> Any:
        def attend(layer: int) -> torch.Tensor:
            output = build(step)(layer).clone()
            output[-1, -1] *= 1.1
            return output

        return attend

    monkeypatch.setitem(attention.ALTERNATIVES, name, wrong_in_one_row)
    assert run("--decode", "2x40", "3x30", "--prefill", "--kv-dtype", "int8") == 0
    out = capsys.readouterr().out
    for row in json.loads(out.splitlines()[-1])["rows"]:
        assert name not in row["seconds"]
        assert f"{name} gives another result" in row["left_out"][name]
    assert f"{name} is left out: {name} gives another result" in out


@pytest.mark.parametrize("wrong", ["scaled", "NaN", "quantised"])
def test_a_wrong_result_of_the_op_ends_the_run(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    right = attention.paged_attention

    def paged_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, *args, **kwargs):
        output = right(q, k, v, k_cache, *args, **kwargs)
        if wrong == "quantised" and k_cache.dtype != torch.int8:
            return output
        output[0, 0] *= float("nan") if wrong == "NaN" else 1.1
        return output

    monkeypatch.setattr(attention, "paged_attention", paged_attention)
    with pytest.raises(SystemExit, match="1"):
        run("--decode", "2x40", "--prefill", "--kv-dtype", "int8")
    captured = capsys.readouterr()
    assert f"decode 2x40: the op ({'int8' if wrong == 'quantised' else 'bfloat16'}) gives another" in captured.err
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
        assert set(row["seconds"]) == {"op", "sdpa"}


def test_the_table_and_the_op_of_a_step(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--decode", SKEWED, "--prefill", "5+20", "--kv-dtype", "int8", "--block-size", "16", "8") == 0
    out = capsys.readouterr().out
    rows = json.loads(out.splitlines()[-1])["rows"]
    cases = [f"decode {SKEWED}", "prefill 5+20"]
    expected = [(case, dtype, size) for case in cases for dtype in ("bfloat16", "int8") for size in (16, 8)]
    assert [(row["case"], row["kv_dtype"], row["block_size"]) for row in rows] == expected
    for row in rows:
        assert (set(row["seconds"]), row["left_out"]) == ({"op", "gather", "sdpa", "flex"}, {})
    assert sum(line.startswith(("decode ", "prefill ")) for line in out.splitlines()) == len(rows)
    assert run("--decode", "2x40", "--prefill", "--kv-dtype", "--turned", "--hot") == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["turned"]
