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

from compiled_llm.ops.linear.fused_linear import (
    add_fused_linear,
    add_fused_linear_reference,
    fused_linear,
    fused_linear_reference,
)
from compiled_llm.ops.linear.product_choices import MAX_ROWS

triton = pytest.importorskip("triton")

from compiled_llm.ops.linear import triton_fused_linear  # noqa: E402
from tests.drawn import marked  # noqa: E402
from tests.ops import ahead_of_time, interpreted  # noqa: E402

DTYPES = (torch.bfloat16, torch.float16)
TOLERANCE = {torch.bfloat16: 2**-6, torch.float16: 2**-9}
EPS = 1e-5


def arguments(
    rows: int, outputs: int, inputs: int, dtype: torch.dtype, *, bias: bool = False, norm: torch.dtype | None = None,
    norm_bias: bool = False, activation: str = "", gated: bool = True, multiplier: float = 1.0, beside: bool = False,
    residual: bool = False, device: str = "cpu",
) -> dict[str, Any]:  # fmt: skip
    """``outputs``: of the result."""
    generator = torch.Generator().manual_seed(outputs * inputs)

    def drawn(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype).to(device)

    wide = outputs * (2 if activation and gated else 1)
    return {
        "x": drawn(rows, inputs),
        "weight": (torch.randn(wide, inputs, generator=generator) / inputs**0.5).to(dtype).to(device),
        "bias": drawn(wide) if bias else None,
        "norm": None if norm is None else drawn(inputs, dtype=norm),
        "norm_bias": drawn(inputs) if norm_bias else None,
        "eps": EPS,
        "activation": activation,
        "gated": gated,
        "multiplier": multiplier,
        "beside": drawn(rows, outputs) if beside else None,
        "residual": drawn(rows, outputs) if residual else None,
    }


def of_rows(given: dict[str, Any], rows: slice) -> dict[str, Any]:
    names = [name for name in ("x", "delta", "factor", "beside", "residual") if given.get(name) is not None]
    return {**given, **{name: given[name][rows] for name in names}}


def with_delta(given: dict[str, Any], norm: torch.dtype | None, multiplies: bool = False) -> dict[str, Any]:
    """The arguments of ``add_fused_linear``, those of ``fused_linear`` given; ``multiplies``: with scale and factor."""
    generator = torch.Generator().manual_seed(1)
    x = given["x"]
    delta = torch.randn(x.shape, generator=generator).to(x)
    delta_norm = None if norm is None else torch.randn(x.shape[1], generator=generator).to(x.device, norm)
    rest = {name: given[name] for name in given if name not in ("x", "multiplier", "beside", "residual")}
    scale = factor = None
    if multiplies:
        outputs = len(given["weight"])
        scale = torch.tensor([0.37], device=x.device)
        factor = torch.randn(len(x), 3 * outputs, generator=generator).to(x)[:, outputs : 2 * outputs]
    return {"x": x, "delta": delta, "delta_norm": delta_norm, "scale": scale, **rest, "factor": factor}


SURROUNDINGS: dict[str, dict[str, Any]] = {
    "plain": {"bias": True},
    "norm": {"norm": torch.bfloat16},
    "norm-float32": {"norm": torch.float32, "bias": True},
    "gated": {"activation": "silu", "bias": True},
    "gelu": {"activation": "gelu_tanh"},
    "residual": {"residual": True},
    "gelu-not-gated": {"activation": "gelu", "gated": False, "bias": True},
    "layer-norm": {"norm": torch.bfloat16, "norm_bias": True, "bias": True},
    "multiplier": {"multiplier": 0.22, "residual": True},
    "beside": {"beside": True, "residual": True, "bias": True},
    "all": {
        "norm": torch.bfloat16,
        "norm_bias": True,
        "activation": "silu",
        "bias": True,
        "multiplier": 3.0,
        "beside": True,
        "residual": True,
    },
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
    if (
        "norm" in surroundings and "norm_bias" not in surroundings
    ):  # normed inputs as they are: rounded at the same places, but for the sum of squares
        ones = torch.eye(given["x"].shape[1], dtype=dtype, device=device)[:24].contiguous()
        rest = {"bias": None, "activation": "", "multiplier": 1.0, "beside": None, "residual": None}
        part = {**given, "weight": ones, **rest}
        got, want = triton_fused_linear.fused_linear(**part), fused_linear_reference(**part)
        torch.testing.assert_close(got, want, atol=1e-6, rtol=TOLERANCE[dtype])
        assert (got != want).float().mean() < 0.02
    assert triton_fused_linear.fused_linear(**of_rows(given, slice(0, 0))).shape == (0, 24)


def adds_before(dtype: torch.dtype, norm: torch.dtype | None, device: str = "cpu") -> None:
    """``add_fused_linear``: the sums are the reference's to the bit, but for those whose norm rounds otherwise."""
    plain = {"activation": "gelu_tanh", "gated": False}
    for around in ({}, {"norm": torch.float32, "activation": "gelu_tanh"}, {"norm": dtype, "norm_bias": True}, plain):
        for rows, outputs, inputs in ((1, 40, 100), (17, 33, 600)):
            surroundings = arguments(rows, outputs, inputs, dtype, **around, device=device)
            given = with_delta(surroundings, norm, multiplies=around is plain)
            total, out = triton_fused_linear.add_fused_linear(**given)
            wanted, want = add_fused_linear_reference(**given)
            torch.testing.assert_close(total, wanted, atol=1e-6, rtol=TOLERANCE[dtype])
            assert (total != wanted).float().mean() < (0.0 if norm is None else 0.02) + 1e-9
            torch.testing.assert_close(out, want, atol=4 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])
            part = slice(rows // 2, rows)
            for of_all, alone in zip(
                (total, out), triton_fused_linear.add_fused_linear(**of_rows(given, part)), strict=True
            ):
                assert torch.equal(of_all[part], alone)


def layer_norms_of_far_rows(dtype: torch.dtype) -> None:
    """Rows far from zero: means and squares of blocks are joined without loss."""
    given = arguments(3, 24, 1300, dtype, norm=dtype, norm_bias=True)
    given["x"] = given["x"] / 4 + torch.tensor([[100.0], [-30.0], [0.0]], dtype=dtype)
    got, want = triton_fused_linear.fused_linear(**given), fused_linear_reference(**given)
    torch.testing.assert_close(got, want, atol=4 * TOLERANCE[dtype], rtol=TOLERANCE[dtype])


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
    **{
        f"adds-{str(dtype)[6:]}-{norm}": (adds_before, (dtype, norm))
        for dtype, norm in (
            (torch.bfloat16, None),
            (torch.bfloat16, torch.bfloat16),
            (torch.bfloat16, torch.float32),
            (torch.float16, torch.float16),
        )
    },
    "layer norms of far rows": (layer_norms_of_far_rows, (torch.float16,)),
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
    "up": (3072, 1024, {"norm": torch.bfloat16, "norm_bias": True, "activation": "gelu", "gated": False, "bias": True}),
    "down beside": (1024, 4096, {"beside": True, "residual": True, "bias": True}),
    "o scaled": (1024, 2048, {"multiplier": 0.22, "residual": True}),
}
MORE_ROWS = {"gate_up, 64 rows": 64, "gate_up, 256 rows": 256}
MMA = "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"
INSTRUCTIONS = {(8, 0): MMA, (9, 0): "wgmma", (10, 0): "tcgen05"}  # of tiles of 64 rows or more
ADDING: dict[str, tuple[int, int, dict[str, Any]]] = {
    "qkv without norm": (4096, 2048, {}),
    "qkv": (4096, 2560, {"norm": torch.float32}),
    "gate_up of few": (8192, 2560, {"norm": torch.float32, "activation": "gelu_tanh"}),
    "gate_up of many": (14336, 3584, {"norm": torch.float32, "activation": "gelu_tanh"}),
    "per-layer gate": (256, 2560, {"activation": "gelu_tanh", "gated": False, "multiplies": True}),
    "up": (
        16384,
        4096,
        {"norm": torch.bfloat16, "norm_bias": True, "activation": "gelu", "gated": False, "bias": True},
    ),
}


ALL = [  # name, whether it adds, rows
    *((name, False, MORE_ROWS[name]) for name in MORE_ROWS),
    *((name, False, rows) for name in LAYERS if name not in MORE_ROWS for rows in (1, 16)),
    *((name, True, rows) for name in ADDING for rows in (1, 16)),
]


@pytest.mark.parametrize(
    ("capability", "name", "adds", "rows"),
    [
        pytest.param(capability, *case, marks=() if case == ("gate_up of many", True, 16) else pytest.mark.battery)
        for capability in CAPABILITIES
        for case in ALL
    ],
    ids=str,
)
def test_nothing_spills_and_few_rows_are_mma_sync(
    capability: tuple[int, int], name: str, adds: bool, rows: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    child: subprocess.Popen,
) -> None:  # fmt: skip
    recorded: list = []
    recorder = ahead_of_time.Recorder(triton_fused_linear.fused_linear_kernel, recorded)
    monkeypatch.setattr(triton_fused_linear, "fused_linear_kernel", recorder)
    outputs, inputs, surroundings = (ADDING if adds else LAYERS)[name]
    surroundings = dict(surroundings)
    multiplies = surroundings.pop("multiplies", False)
    given = arguments(16, 16, 16, torch.bfloat16, **surroundings)
    if adds:
        norm = given["norm"].dtype if given["norm"] is not None else torch.float32
        given = with_delta(given, norm, multiplies)
    wide = outputs * (2 if given["activation"] and given["gated"] else 1)
    shapes = {"weight": (wide, inputs), "bias": (wide,)}
    shapes |= dict.fromkeys(("x", "delta"), (rows, inputs)) | dict.fromkeys(
        ("factor", "beside", "residual"), (rows, outputs)
    )
    shapes |= dict.fromkeys(("norm", "norm_bias", "delta_norm"), (inputs,)) | {"scale": (1,)}
    for tensor, shape in shapes.items():
        if given.get(tensor) is not None:
            given[tensor] = torch.empty(*shape, dtype=given[tensor].dtype, device="meta")
    (triton_fused_linear.add_fused_linear if adds else triton_fused_linear.fused_linear)(**given)
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


def test_the_adding_op_is_registered_as_torch_expects() -> None:
    around = {"norm": torch.float32, "activation": "silu", "gated": False}
    given = with_delta(arguments(3, 6, 8, torch.bfloat16, **around), torch.float32, multiplies=True)
    torch.library.opcheck(
        torch.ops.compiled_llm.add_fused_linear, tuple(given.values()), test_utils=("test_schema", "test_faketensor")
    )
    want = add_fused_linear_reference(**given)
    positional = [given.pop(name) for name in ("x", "delta", "delta_norm", "scale", "weight")]
    got = add_fused_linear(*positional, **given)
    assert all(map(torch.equal, got, want))


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
        ({"norm_bias": None, "norm": GIVEN["norm"].double()}, "norm must be .* of torch.bfloat16 or torch.float32"),
        ({"norm": GIVEN["norm"].float()}, r"norm must be .* of torch.bfloat16 on cpu"),
        ({"norm": None}, "norm_bias is that of a layer norm"),
        ({"norm_bias": GIVEN["norm_bias"][:8]}, r"norm_bias must be a contiguous \[16\]"),
        ({"beside": GIVEN["beside"][:, :2]}, r"beside must be like the result, \[2, 4\]"),
        ({"activation": "relu"}, "activation must be silu or"),
        ({"residual": GIVEN["residual"][:1]}, r"residual must be like the result, \[2, 4\]"),
    ],
)
def test_refuses_by_name(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        triton_fused_linear.fused_linear(**{**GIVEN, **changed})


# ---- the outcomes of the interpreter ---------------------------------------------------------------------------------


def test_the_adding_op_refuses_by_name() -> None:
    given = with_delta(arguments(2, 4, 16, torch.bfloat16), torch.float32, multiplies=True)
    for changed, message in (
        ({"delta": given["delta"].half()}, r"add_fused_linear: delta must be like x, \[2, 16\] of torch.bfloat16"),
        ({"delta_norm": given["delta_norm"][:8]}, r"delta_norm must be a contiguous \[16\] of torch.bfloat16 or"),
        ({"scale": given["scale"].half()}, r"scale must be \[1\] of torch.float32"),
        ({"factor": given["factor"][:, :3]}, r"factor must be \[2, 4\] of torch.bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            triton_fused_linear.add_fused_linear(**{**given, **changed})


ORDINARY = (
    *(f"reference-bfloat16-{around}" for around in ("norm-float32", "gated", "layer-norm", "beside")),
    *("reference-float16-all", "adds-bfloat16-torch.float32", "layer norms of far rows", "rows-bfloat16"),
)


@pytest.mark.parametrize("name", marked(INTERPRETED, ORDINARY))
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
