"""check_exact: the matrix is equal on the demo model and odd ones, and planted differences are found and named."""

import contextlib
import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.compiling.cache import engine_cache
from compiled_llm.engine.engine import DEMO_MODEL
from compiled_llm.models import llama
from compiled_llm.ops import native, swap
from compiled_llm.ops.rowwise.reference import rms_norm_reference
from compiled_llm.worker import compiled_steps
from tests.families import EVERY_CONFIG, checkpoint

SCRIPTS = Path(__file__).parents[2] / "scripts"
# Of CONFIGS: windows, soft caps and heads of 24 elements; biases and one KV head for each query head.
IN_CI = {"gemma2": "fp8", "llama-biases": "int8"}
FEW_GRAPHS = {"bucket_sizes": (8,), "token_bucket_sizes": (64,)}


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        import check_exact

        yield check_exact


def plan_of(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *words: str) -> Any:
    monkeypatch.setattr(sys, "argv", ["check_exact.py", *words])
    return script.make_plan(script.parse_arguments())


def keep(plan: Any, wanted: Callable[[Any], bool]) -> Any:
    """The plan with some of its settings."""
    return dataclasses.replace(plan, settings=[setting for setting in plan.settings if wanted(setting)])


def check_equal(script: ModuleType, plan: Any, requests: int, comparisons: int) -> None:
    """All settings are equal, nothing was left out, and at least so much was compared."""
    outcomes, first = script.check(plan, disable_bar=True)
    assert first is None, str(first)
    assert [outcome.missing for outcome in outcomes if outcome.missing] == []
    assert len(outcomes) == len(plan.settings) - len({setting.kv_cache for setting in plan.settings})
    assert sum(outcome.requests for outcome in outcomes) >= requests
    assert sum(outcome.compared["logits"] for outcome in outcomes) >= comparisons


def kernels(name: str) -> Any:
    module = native.load(name)
    if module is None:
        pytest.skip("needs a C++ compiler")
    return module


# -- Equal


@pytest.mark.battery
def test_the_demo_model_compiled(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the default buckets."""
    plan = plan_of(script, monkeypatch, "--requests", "9", "--tokens", "10")
    check_equal(script, keep(plan, lambda s: s.sizes == "default" and s.kv_cache == "auto"), 80, 800)


def test_the_demo_model_uncompiled(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """With quantised caches."""
    words = ["--requests", "9", "--tokens", "10"]
    eager = keep(plan_of(script, monkeypatch, *words, "--quick"), lambda s: not s.compiled and s.kv_cache != "auto")
    check_equal(script, eager, 80, 800)


@pytest.mark.parametrize(
    ("name", "compiled"),
    [("gemma2", False), *(pytest.param(name, True, marks=pytest.mark.battery) for name in IN_CI)],
)
def test_odd_models(name: str, compiled: bool, script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few buckets, and compared with many uncompiled ones."""
    monkeypatch.setitem(sys.modules["exact_matrix"].SIZES, "few", FEW_GRAPHS)
    words = ["--dtype", "bfloat16", "--kv-cache-dtypes", IN_CI[name], "--requests", "9", "--tokens", "10"]
    plan = plan_of(script, monkeypatch, "--model", str(checkpoint(name)), *words)
    settings = sys.modules["exact_matrix"].settings_of([IN_CI[name]], ["few"], [compiled])
    settings += keep(plan, lambda setting: not setting.compiled and setting.sizes != "default").settings
    check_equal(script, dataclasses.replace(plan, settings=settings), 150, 1500)


@pytest.mark.battery
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", ["demo", *EVERY_CONFIG])
def test_every_family_in_full(name: str, dtype: str, script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    model = str(DEMO_MODEL if name == "demo" else checkpoint(name))
    check_equal(script, plan_of(script, monkeypatch, "--model", model, "--dtype", dtype), 500, 5000)


def quick_words(name: str, directory: Path) -> list[str]:
    """For 16 requests; of Qwen3-0.6B the shape, with random weights."""
    words = ["--quick", "--dtype", "bfloat16", "--requests", "16"]
    if name != "qwen3-0.6b":
        return [*words, "--model", str(DEMO_MODEL if name == "demo" else checkpoint(name))]
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPTS))
        from bench.workloads import SHAPES
    (directory / "config.json").write_text(json.dumps(SHAPES[name]))
    return [*words, "--model", str(directory), "--load-format", "dummy", "--tokens", "10"]


@pytest.mark.battery
def test_qwen3_of_600_million(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    check_equal(script, plan_of(script, monkeypatch, *quick_words("qwen3-0.6b", tmp_path)), 500, 5000)


@pytest.mark.battery
@pytest.mark.parametrize(
    ("isa", "name"),
    [
        *itertools.product(["avx512_bf16", "avx512", "avx2", "portable"], ["demo", "gemma2"]),
        *itertools.product(["avx512_bf16", "portable"], ["qwen3-0.6b"]),  # the last one takes an hour
    ],
)
def test_every_instruction_set(isa: str, name: str, tmp_path: Path) -> None:
    """The C++ kernels limited to it, and torch's own code without any; read once, so in a process of its own."""
    if isa not in kernels("linear_cpu").supported_isas():
        pytest.skip("not of this CPU")
    command = [sys.executable, str(SCRIPTS / "check_exact.py"), *quick_words(name, tmp_path)]
    environment = (
        os.environ | {"COMPILED_LLM_ISA": isa} | ({"ATEN_CPU_CAPABILITY": "default"} if isa == "portable" else {})
    )
    command += ["--json", str(tmp_path / "result.json")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["verdict"], result["machine"]["isa"]) == ("equal", isa)
    assert result["requests"] >= 500
    assert result["logits"] >= 5000


# name -> what is unlike ``bucket_sizes=(1, 8)`` and chunks of 64 tokens
CASE: dict[str, dict[str, Any]] = {
    "as it is": {},
    "40 KV blocks": {"num_kv_blocks": 40},
    "one bucket of 1": {"bucket_sizes": (1,)},
    "chunks of 512": {"token_bucket_sizes": (512,)},
    "eager": {"enforce_eager": True},
}


@pytest.mark.parametrize("kv_cache_dtype", [pytest.param("auto", marks=pytest.mark.battery), "fp8"])
@pytest.mark.parametrize("is_eager", [True, pytest.param(False, marks=pytest.mark.battery)])
def test_20_prompts_of_700_characters(kv_cache_dtype: str, is_eager: bool, script: ModuleType) -> None:
    """Once, compiled buckets gave some of these other tokens."""
    matrix = sys.modules["exact_matrix"]
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [text for path in files if len(text := path.read_text(errors="replace")) > 8000][:20]
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, logprobs=3)
    records = {}
    for name, arguments in CASE.items():
        sizes = {"bucket_sizes": (1, 8), "token_bucket_sizes": (64,), "num_kv_blocks": 400, "enforce_eager": is_eager}
        with CompiledEngine(kv_cache_dtype=kv_cache_dtype, **sizes | arguments) as engine:
            assert engine.tokenizer is not None
            requests = [matrix.Request(engine.tokenizer.encode(text[4000:4700]), params) for text in texts]
            recorder = matrix.StepRecorder(engine)
            outputs = matrix.serve(engine, requests, range(len(requests)))
            records[name] = {index: recorder.finish(output) for index, output in outputs.items()}
        compared, differing = matrix.compare(records["as it is"], records[name])
        assert differing == {}, name
        assert compared["logits"] >= 20 * 24


# -- Planted differences


@contextlib.contextmanager
def replaced(op: str, implementation: Callable) -> Iterator[None]:
    """An op with another implementation on CPUs, for compiled code too; ``implementation`` gets the op's own first."""
    for name in ("attention_cpu", "linear_cpu", "rowwise_cpu"):  # whose own must be there, to be replaced
        kernels(name)
    kernel = torch.library.get_kernel(f"compiled_llm::{op}", "CPU")
    on_cpu = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
    own = functools.partial(kernel.call_boxed, on_cpu)
    with torch.library._scoped_library("compiled_llm", "IMPL") as library:
        library.impl(op, functools.partial(implementation, own), "CPU", allow_override=True)
        yield


def _truncated(x: Tensor) -> Tensor:
    """bfloat16 without its last bit."""
    return (x.view(torch.int16) & -2).view(torch.bfloat16)


def rounded_in_chunks(own: Callable, *args: Any) -> Tensor:
    """Attention of layers without a window that rounds otherwise where a request has several tokens in a step."""
    query_start_loc, window = args[9], args[14]
    attended = own(*args)
    return _truncated(attended) if query_start_loc.diff().max() > 1 and window == 0 else attended


def summed_otherwise_for_many_rows(
    own: Callable, x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int
) -> Tensor:
    """A linear layer of 160 inputs that adds two halves up, each rounded, where there are more than 8 rows."""
    if x.shape[0] <= 8 or x.shape[1] != 160:
        return own(x, packed, bias, out_features)
    weight = packed.transpose(1, 2).reshape(-1, 160)[:out_features]
    halves = [(x[:, part].float() @ weight[:, part].float().T).to(x.dtype) for part in (slice(80), slice(80, 160))]
    return halves[0] + halves[1] if bias is None else halves[0] + halves[1] + bias


def summed_in_halves_for_a_row(own: Callable, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """A norm that adds its squares up in two halves, the first of them rounded, in a step of a single row."""
    if x.shape[0] > 1:
        return own(x, weight, eps)
    first, second = x.float().square().chunk(2, dim=-1)
    total = first.sum(-1, keepdim=True).to(x.dtype) + second.sum(-1, keepdim=True)
    y = x.float() * torch.rsqrt(total / x.shape[-1] + eps)
    return weight * y.to(x.dtype) if weight.dtype == x.dtype else (y * weight).to(x.dtype)


# name -> (op, what takes its place, where the settings part)
PLANTED: dict[str, tuple[str, Callable, str]] = {
    "a rounding in chunks": ("paged_attention", rounded_in_chunks, "layers.1.attention"),
    "an order of sums by rows": ("packed_linear", summed_otherwise_for_many_rows, "layers.0.mlp.down"),
    "a reduction by bucket": ("rms_norm", summed_in_halves_for_a_row, "layers.0.input_norm"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_difference_is_found_and_named(
    name: str, script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    op, implementation, where = PLANTED[name]
    words = [
        "--quick",
        "--model",
        str(checkpoint("gemma2")),
        "--dtype",
        "bfloat16",
        "--requests",
        "9",
        "--tokens",
        "10",
    ]
    words += ["--kv-cache-dtypes", "auto", "--json", str(tmp_path / "result.json")]
    plan = plan_of(script, monkeypatch, *words)
    eager = eager_settings(plan)
    monkeypatch.setattr(script, "make_plan", lambda args: eager)
    with replaced(op, implementation):
        assert script.main() == 1
    result = json.loads((tmp_path / "result.json").read_text())
    begins = result["first_difference"]["begins"]
    assert (result["verdict"], begins["where"], begins["op"]) == ("different", where, f"compiled_llm::{op}")
    assert begins["is_result"]
    assert begins["only_compiled"] is None
    assert begins["position"] <= result["first_difference"]["position"]
    assert "elements differ, the most by" in begins["difference"]
    said = capsys.readouterr().out
    assert f"{where}: compiled_llm::{op}: its result differs, and all that goes into it is equal" in said
    assert "DIFFERENT" in said


def eager_settings(plan: Any, *ways: str) -> Any:
    return keep(plan, lambda setting: not setting.compiled and (not ways or setting.way in ways))


def test_a_block_that_comes_back_otherwise_is_found(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """What differs is in the cache alone: attention has the same arguments and another result."""
    swap_in = swap.swap_in

    def changed(caches: Any, host: Tensor, device_blocks: Tensor, host_blocks: Tensor) -> None:
        swap_in(caches, host, device_blocks, host_blocks)
        caches[2].view(torch.int16)[device_blocks] ^= 64  # keys of layer 1

    monkeypatch.setattr(swap, "swap_in", changed)
    words = ["--model", str(checkpoint("llama-biases")), "--dtype", "bfloat16", "--requests", "9", "--tokens", "10"]
    plan = eager_settings(plan_of(script, monkeypatch, "--quick", "--kv-cache-dtypes", "auto", *words))
    outcomes, first = script.check(plan, disable_bar=True)
    assert {outcome.setting.way for outcome in outcomes if outcome.differing} == {"swapped"}
    call = first.departure.seen.call
    assert (call.where, call.op) == ("layers.1.attention", "compiled_llm::paged_attention")
    assert first.departure.seen.is_result


def test_a_difference_after_the_step_is_none_of_its_ops(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def other_for_a_row(own: Callable, logits: Tensor) -> tuple[Tensor, Tensor]:
        peak, total = own(logits)
        return peak, total * (1 + 2**-20) if logits.shape[0] == 1 else total

    words = ["--model", str(checkpoint("llama-biases")), "--dtype", "bfloat16", "--requests", "3", "--tokens", "4"]
    plan = plan_of(script, monkeypatch, "--quick", "--kv-cache-dtypes", "auto", *words)
    with replaced("log_sum_exp", other_for_a_row):
        _, first = script.check(eager_settings(plan, "not preempted"), disable_bar=True)
    assert first.departure is None
    assert "log-probabilities at position" in str(first)
    assert "it is what runs after the step" in str(first)


@pytest.mark.battery
def test_an_op_is_found_in_compiled_code(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the graphs of ``test_odd_models``: compiled code calls the op, whatever takes its place."""
    matrix, name = sys.modules["exact_matrix"], "llama-biases"
    monkeypatch.setitem(matrix.SIZES, "few", FEW_GRAPHS)
    words = ["--model", str(checkpoint(name)), "--dtype", "bfloat16", "--requests", "9", "--tokens", "10"]
    settings = matrix.settings_of([IN_CI[name]], ["few"], [True])
    plan = dataclasses.replace(plan_of(script, monkeypatch, *words), settings=settings)
    with replaced("packed_linear", summed_otherwise_for_many_rows):
        _, first = script.check(plan, disable_bar=True)
    assert str(first.departure.seen.call) == "layers.0.mlp.down: compiled_llm::packed_linear"
    assert first.departure.seen.is_result
    assert str(first).endswith("; uncompiled too")


@pytest.mark.battery
def test_what_only_the_compiler_does_is_said(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Norms in plain torch, which compiled steps of one row, and no others, sum up otherwise."""

    def plain(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        x = x if delta is None else x + delta
        if torch.compiler.is_compiling() and x.shape[0] == 1:
            return x, summed_in_halves_for_a_row(x, weight, eps)
        return x, rms_norm_reference(x, weight, eps)

    def own_cache(*args: Any) -> Any:
        cache = engine_cache(*args)
        cache.directory = tmp_path  # a key does not tell that a function is another than in its file
        return cache

    monkeypatch.setattr(llama, "add_rms_norm", plain)
    monkeypatch.setattr(compiled_steps, "engine_cache", own_cache)
    words = ["--model", str(checkpoint("llama-biases")), "--dtype", "bfloat16", "--requests", "9", "--tokens", "4"]
    plan = plan_of(script, monkeypatch, *words, "--kv-cache-dtypes", "auto")
    compiled = keep(plan, lambda setting: setting.compiled and setting.sizes == "1 row, 512 tokens")
    _, first = script.check(compiled, disable_bar=True)
    departure = first.departure
    assert not departure.seen.is_result
    assert departure.only_compiled
    assert {"aten::mean", "aten::rsqrt"} <= set(departure.between)
    assert "layers." in departure.seen.call.where
    assert "the code between the ops (" in str(first)
    assert str(first).endswith("; only when compiled")


# -- The program and its parts


def test_row_digests_tell_every_bit(script: ModuleType) -> None:
    matrix = sys.modules["exact_matrix"]
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64):
        width = torch.tensor([], dtype=dtype).itemsize
        rows = torch.randint(-128, 128, (3, 5 * width), dtype=torch.int8)
        expected = matrix.row_digests(rows.view(dtype))
        assert len(set(expected)) == 3
        assert matrix.row_digests(rows.view(dtype)[1:]) == expected[1:]
        for bit in range(8):
            changed = rows.clone()
            changed[1, 3] ^= -128 if bit == 7 else 1 << bit
            found = matrix.row_digests(changed.view(dtype))
            assert (found[0], found[2]) == (expected[0], expected[2])
            assert found[1] != expected[1]
    zeros = torch.tensor([[0.0], [-0.0]])
    assert len(set(matrix.row_digests(zeros))) == 2


def test_a_setting_that_did_not_come_about_is_no_proof(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(checkpoint("llama-biases")), "--quick", "--requests", "1", "--tokens", "2"]
    plan = eager_settings(plan_of(script, monkeypatch, *words, "--kv-cache-dtypes", "auto"))
    monkeypatch.setattr(script, "make_plan", lambda args: plan)
    assert script.main() == 1
    said = capsys.readouterr().out
    assert "not proven, nothing was preempted: KV cache auto" in said
    assert "NOT PROVEN" in said
    assert json.loads(said.splitlines()[-1])["verdict"] == "not proven"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "/no/such/directory"], "/no/such/directory"),
        (["--kv-cache-dtypes", "int4"], "kv_cache_dtype must be one of"),
        (["--dtype", "int8"], "dtype must be one of"),
        (["--requests", "0"], "--requests must be at least 1"),
        (["--tokens", "1024"], "--tokens must be below 1024"),
        (["--device", "tpu"], "device must be"),
        (["--json", "/no/such/directory/out.json"], "/no/such/directory"),
    ],
)
def test_bad_arguments_exit_with_2(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["check_exact.py", *words])
    with pytest.raises(SystemExit) as ended:
        script.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
