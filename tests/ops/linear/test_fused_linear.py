"""The linear layer with norm, activation and residual, without a GPU: interpreted, and compiled ahead of time.

As in ``test_exact_linear.py``, the interpreted cases run in one child process: this file as a program.
"""

import functools
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from compiled_llm.ops.linear.fused_linear import MAX_ROWS, fused_linear, fused_linear_reference

triton = pytest.importorskip("triton")

from compiled_llm.ops.linear import triton_fused_linear  # noqa: E402
from tests.ops import ahead_of_time, interpreted  # noqa: E402

DTYPES = (torch.bfloat16, torch.float16)
TOLERANCE = {torch.bfloat16: 2**-6, torch.float16: 2**-9}
EPS = 1e-5


def arguments(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, *, bias: bool = False, norm: torch.dtype | None = None,
    activation: str = "", residual: bool = False, device: str = "cpu",
) -> dict[str, Any]:  # fmt: skip
    """``outputs``: of the result."""
    generator = torch.Generator().manual_seed(outputs * inputs)

    def drawn(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    wide = outputs * (2 if activation else 1)
    return {
        "x": drawn(rows, inputs),
        "weight": (torch.randn(wide, inputs, generator=generator) / inputs**0.5).to(dtype).to(device),
        "bias": drawn(wide) if bias else None,
        "norm": None if norm is None else drawn(inputs, dtype=norm),
        "eps": EPS,
        "activation": activation,
        "residual": drawn(rows, outputs) if residual else None,
    }


def of_rows(given: dict[str, Any], rows: slice) -> dict[str, Any]:
    residual = given["residual"]
    return {**given, "x": given["x"][rows], "residual": None if residual is None else residual[rows]}


SURROUNDINGS: dict[str, dict[str, Any]] = {
    "plain": {"bias": True},
    "norm": {"norm": torch.bfloat16},
    "norm-float32": {"norm": torch.float32, "bias": True},
    "gated": {"activation": "silu", "bias": True},
    "gelu": {"activation": "gelu_tanh"},
    "residual": {"residual": True},
    "all": {"norm": torch.bfloat16, "activation": "silu", "residual": True, "bias": True},
}


# ---- interpreted ----------------------------------------------------------------------------------------------------


def agrees_with_the_reference(dtype: torch.dtype, around: str, device: str = "cpu") -> None:
    surroundings = dict(SURROUNDINGS[around])
    if surroundings.get("norm") == torch.bfloat16:
        surroundings["norm"] = dtype
    for rows, outputs, inputs in ((1, 40, 100), (5, 17, 300), (17, 7, 129), (MAX_ROWS, 24, 64)):
        given = arguments(rows, outputs, inputs, dtype, **surroundings, device=device)
        got, want = triton_fused_linear.fused_linear(**given), fused_linear_reference(**given)
        assert got.dtype == dtype
        torch.testing.assert_close(got, want, atol=4 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    if "norm" in surroundings:  # normed inputs as they are: rounded at the same places, but for the sum of squares
        ones = torch.eye(given["x"].shape[1], dtype=dtype, device=device)[:24].contiguous()
        part = {**given, "weight": ones, "bias": None, "activation": "", "residual": None}
        got, want = triton_fused_linear.fused_linear(**part), fused_linear_reference(**part)
        torch.testing.assert_close(got, want, atol=1e-6, rtol=TOLERANCE[dtype])
        assert (got != want).float().mean() < 0.02
    assert triton_fused_linear.fused_linear(**of_rows(given, slice(0, 0))).shape == (0, 24)


def more_rows_agree_with_the_reference(dtype: torch.dtype, device: str = "cpu") -> None:
    """Tiles of 64 and 128 rows, each with one that is not full."""
    for rows in (MAX_ROWS + 1, 64, 130):
        given = arguments(rows, 70, 100, dtype, activation="silu", bias=True, device=device)
        got, want = triton_fused_linear.fused_linear(**given), fused_linear_reference(**given)
        torch.testing.assert_close(got, want, atol=4 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    """Alone and among others, wherever the rows lie; with a last block of inputs cut short."""
    given = arguments(MAX_ROWS, 40, 300, dtype, norm=dtype, activation="silu", residual=True)
    whole = triton_fused_linear.fused_linear(**given)
    for rows in (slice(0, 1), slice(31, 32), slice(15, 18), slice(3, 20)):
        assert torch.equal(triton_fused_linear.fused_linear(**of_rows(given, rows)), whole[rows])
    apart = torch.full((MAX_ROWS, 303), float("nan"), dtype=dtype)
    apart[:, 2:-1] = given["x"]
    assert torch.equal(triton_fused_linear.fused_linear(**{**given, "x": apart[:, 2:-1]}), whole)
    with mock.patch.object(triton_fused_linear, "_MANY", 0):
        torch.testing.assert_close(
            triton_fused_linear.fused_linear(**given), whole, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype]
        )


INTERPRETED: dict[str, tuple[Callable, tuple]] = {
    **{
        f"reference-{str(dtype)[6:]}-{around}": (agrees_with_the_reference, (dtype, around))
        for dtype in DTYPES
        for around in SURROUNDINGS
        if (dtype == torch.bfloat16) != (around == "all")
    },
    **{f"more-rows-{str(dtype)[6:]}": (more_rows_agree_with_the_reference, (dtype,)) for dtype in DTYPES},
    **{f"rows-{str(dtype)[6:]}": (a_row_has_the_same_bits_in_every_batch, (dtype,)) for dtype in DTYPES},
}


def run_interpreted() -> None:
    functions = {name: functools.partial(function, *given) for name, (function, given) in INTERPRETED.items()}
    interpreted.run(functions)


# ---- compiled ahead of time -----------------------------------------------------------------------------------------

CAPABILITIES = ((8, 0), (9, 0), (10, 0))
SHARED_MEMORY = 99 * 1024  # of a program, on GPUs of compute capability 8.6, which have the least
LAYERS: dict[str, tuple[int, int, dict[str, Any]]] = {  # outputs, inputs, surroundings
    "qkv": (4096, 1024, {"norm": torch.bfloat16}),
    "qkv of many": (10240, 8192, {"norm": torch.bfloat16, "bias": True}),
    "o": (1024, 2048, {"residual": True}),
    "gate_up": (3072, 1024, {"norm": torch.bfloat16, "activation": "silu"}),
    "gate_up of many": (14336, 4096, {"norm": torch.bfloat16, "activation": "silu"}),
    "gate_up, 64 rows": (3072, 1024, {"activation": "silu"}),
    "gate_up, 256 rows": (14336, 4096, {"activation": "silu", "bias": True}),
}
MORE_ROWS = {"gate_up, 64 rows": 64, "gate_up, 256 rows": 256}
MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
INSTRUCTIONS = {(8, 0): MMA, (9, 0): "wgmma", (10, 0): "tcgen05"}  # of tiles of 64 rows or more


@pytest.mark.parametrize(
    ("capability", "name"),
    [
        pytest.param(capability, name, marks=() if name.startswith("gate_up of") else pytest.mark.battery)
        for capability in CAPABILITIES
        for name in LAYERS
    ],
    ids=str,
)
def test_nothing_spills_and_few_rows_are_mma_sync(
    capability: tuple[int, int], name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, child: subprocess.Popen
) -> None:
    recorded: list = []
    recorder = ahead_of_time.Recorder(triton_fused_linear.fused_linear_kernel, recorded)
    monkeypatch.setattr(triton_fused_linear, "fused_linear_kernel", recorder)
    outputs, inputs, surroundings = LAYERS[name]
    rows = MORE_ROWS.get(name, 16)
    given = arguments(16, 16, 16, torch.bfloat16, **surroundings)
    wide = outputs * (2 if given["activation"] else 1)
    shapes = {"x": (rows, inputs), "weight": (wide, inputs), "bias": (wide,), "norm": (inputs,)}
    shapes["residual"] = rows, outputs
    for tensor, shape in shapes.items():
        if given[tensor] is not None:
            given[tensor] = torch.empty(*shape, dtype=torch.bfloat16, device="meta")
    triton_fused_linear.fused_linear(**given)
    ((kernel, args, kwargs),) = recorded
    binary = ahead_of_time.compiled(kernel, args, kwargs, capability)
    usage = ahead_of_time.resources(binary.asm["cubin"], tmp_path / "kernel.cubin")
    print(f"{usage['REG']} registers, {binary.metadata.shared} bytes")
    assert usage["STACK"] == usage["LOCAL"] == 0
    assert binary.metadata.shared <= SHARED_MEMORY
    expected = INSTRUCTIONS[capability] if rows > MAX_ROWS else MMA
    assert set(re.findall(r"wgmma|mma\.sync\S+|tcgen05", binary.asm["ptx"])) == {expected}


# ---- registered, refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("around", SURROUNDINGS)
def test_the_op_is_registered_as_torch_expects(around: str) -> None:
    given = arguments(3, 6, 8, torch.bfloat16, **SURROUNDINGS[around])
    torch.library.opcheck(
        torch.ops.compiled_llm.fused_linear, tuple(given.values()), test_utils=("test_schema", "test_faketensor")
    )
    assert torch.equal(fused_linear(given.pop("x"), given.pop("weight"), **given), _by_ops(around))


def _by_ops(around: str) -> Tensor:
    return fused_linear_reference(**arguments(3, 6, 8, torch.bfloat16, **SURROUNDINGS[around]))


GIVEN = arguments(2, 4, 16, torch.bfloat16, **SURROUNDINGS["all"])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"x": GIVEN["x"].float()}, "dtype of x must be bfloat16 or float16"),
        ({"x": GIVEN["x"][0]}, r"x must be \[rows, size\]"),
        ({"weight": GIVEN["weight"][:, :8]}, r"weight must be a contiguous \[N, 16\]"),
        ({"weight": GIVEN["weight"].half()}, r"weight must be a contiguous \[8, 16\] of torch.bfloat16 on cpu"),
        ({"weight": GIVEN["weight"][:7]}, "N must be even, got 7"),
        ({"bias": GIVEN["bias"][:4]}, r"bias must be a contiguous \[8\]"),
        ({"norm": GIVEN["norm"].double()}, "norm must be .* of torch.bfloat16 or torch.float32"),
        ({"activation": "relu"}, "activation must be silu or"),
        ({"residual": GIVEN["residual"][:1]}, r"residual must be like the result, \[2, 4\]"),
    ],
)
def test_refuses_by_name(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        triton_fused_linear.fused_linear(**{**GIVEN, **changed})


# ---- the outcomes of the interpreter ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", INTERPRETED)
def test_interpreted(name: str, outcomes: dict[str, str]) -> None:
    assert not outcomes[name], outcomes[name]


# ---- on a GPU -------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_on_a_gpu_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    for around in SURROUNDINGS:
        agrees_with_the_reference(dtype, around, "cuda")
    for outputs, inputs in ((1024, 2048), (14336, 4096), (1000, 1234)):
        given = arguments(MAX_ROWS, outputs, inputs, dtype, norm=dtype, activation="silu", device="cuda")
        whole = triton_fused_linear.fused_linear(**given)
        for rows in (slice(0, 1), slice(31, 32), slice(15, 18), slice(3, 20), slice(0, 16)):
            assert torch.equal(triton_fused_linear.fused_linear(**of_rows(given, rows)), whole[rows])


if __name__ == "__main__":
    run_interpreted()
