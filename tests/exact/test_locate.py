"""Differences that are planted into the ops are found by the matrix, and named."""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm.commands import exact
from compiled_llm.compiling.cache import engine_cache
from compiled_llm.exact import check, matrix
from compiled_llm.models import llama
from compiled_llm.ops import swap
from compiled_llm.ops.rowwise.reference import rms_norm_reference
from compiled_llm.worker import compiled_steps
from tests.drawn import marked
from tests.exact.plans import FEW_GRAPHS, keep, kernels, plan_of, uncompiled
from tests.families import checkpoint


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


@pytest.mark.parametrize("name", marked(PLANTED, ["an order of sums by rows"]))
def test_a_planted_difference_is_found_and_named(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    op, implementation, where = PLANTED[name]
    plan = uncompiled(plan_of(checkpoint("gemma2"), caches=["auto"], num_requests=4, num_tokens=4))
    monkeypatch.setattr(check, "make_plan", lambda *given: plan)
    with replaced(op, implementation):
        assert exact.main("compiled-llm exact", ["--json", str(tmp_path / "result.json")]) == 1
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


def test_a_block_that_comes_back_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What differs is in the cache alone: attention has the same arguments and another result."""
    swap_in = swap.swap_in

    def changed(caches: Any, host: Tensor, device_blocks: Tensor, host_blocks: Tensor) -> None:
        swap_in(caches, host, device_blocks, host_blocks)
        caches[2].view(torch.int16)[device_blocks] ^= 64  # keys of layer 1

    monkeypatch.setattr(swap, "swap_in", changed)
    plan = uncompiled(plan_of(checkpoint("llama-biases"), caches=["auto"], num_requests=4, num_tokens=4))
    outcomes, first = check.check(plan, disable_bar=True)
    assert first is not None
    assert first.departure is not None
    assert {outcome.setting.way for outcome in outcomes if outcome.differing} == {"swapped"}
    call = first.departure.seen.call
    assert (call.where, call.op) == ("layers.1.attention", "compiled_llm::paged_attention")
    assert first.departure.seen.is_result


def test_a_difference_after_the_step_is_none_of_its_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_for_a_row(own: Callable, logits: Tensor) -> tuple[Tensor, Tensor]:
        peak, total = own(logits)
        return peak, total * (1 + 2**-20) if logits.shape[0] == 1 else total

    plan = plan_of(checkpoint("llama-biases"), caches=["auto"], num_requests=3, num_tokens=4)
    with replaced("log_sum_exp", other_for_a_row):
        _, first = check.check(uncompiled(plan, "not preempted"), disable_bar=True)
    assert first is not None
    assert first.departure is None
    assert "log-probabilities at position" in str(first)
    assert "it is what runs after the step" in str(first)


@pytest.mark.battery
def test_an_op_is_found_in_compiled_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the graphs of ``test_odd_models``: compiled code calls the op, whatever takes its place."""
    monkeypatch.setitem(matrix.SIZES, "few", FEW_GRAPHS)
    settings = matrix.settings_of(["int8"], ["few"], [True])
    plan = dataclasses.replace(plan_of(checkpoint("llama-biases")), settings=settings)
    with replaced("packed_linear", summed_otherwise_for_many_rows):
        _, first = check.check(plan, disable_bar=True)
    assert first is not None
    assert first.departure is not None
    assert str(first.departure.seen.call) == "layers.0.mlp.down: compiled_llm::packed_linear"
    assert first.departure.seen.is_result
    assert str(first).endswith("; uncompiled too")


@pytest.mark.battery
def test_what_only_the_compiler_does_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
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
    plan = plan_of(checkpoint("llama-biases"), caches=["auto"], sizes=["1 row, 512 tokens"], num_tokens=4)
    _, first = check.check(keep(plan, lambda setting: setting.compiled), disable_bar=True)
    assert first is not None
    departure = first.departure
    assert departure is not None
    assert not departure.seen.is_result
    assert departure.only_compiled
    assert {"aten::mean", "aten::rsqrt"} <= set(departure.between)
    assert "layers." in departure.seen.call.where
    assert "the code between the ops (" in str(first)
    assert str(first).endswith("; only when compiled")
