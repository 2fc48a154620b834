"""The exact linear layer on the GPU: its Triton kernel, and the launch. ``exact_linear.py`` says what it computes.

Why a row's bits do not depend on how many rows there are. An output is one float32 accumulator that one program carries
over all K inputs, in steps of 16 from the first to the last: no split-K, and no partial sums to join. In 16 bits a step
is one instruction of the tensor cores, and all tiles of a GPU use the same kind: on Hopper ``wgmma``, elsewhere
``mma.sync``. The two kinds may add the 16 products up in different ways, so they are never mixed. A tile's rows and
columns say which outputs an instruction has, not how it adds up one of them. In float32 a step is one fused
multiply-add of each input, in turn.

A tile is ``W x.T``: outputs fill the 64 rows that ``wgmma`` wants, and its other side holds as few as 8 rows of x. So
the tile may follow the number of rows, and ``triton_surroundings.py`` brings norm, activation and residual in.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.linear.quantized_tiles import Tile
from compiled_llm.ops.linear.surroundings import Surroundings
from compiled_llm.ops.linear.triton_surroundings import (
    columns_of,
    inverse_rms_of_rows,
    normed,
    outputs_of,
    store_outputs,
)

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNMENT = 16  # bytes


_BLOCK_K = {2: 64, 4: 16}  # inputs that are loaded at a time, by the bytes of one: for every tile the same
# The first whose rows suffice, else the last. Few rows: many narrow tiles, so that every SM reads weights. But no fewer
# than 16, which would be another instruction with Triton 3.6 and 3.7.
WGMMA = (Tile(16, 64, 4, 8), Tile(32, 64, 4, 8), Tile(128, 64, 4, 4), Tile(128, 256, 8, 3))
WGMMA_ROWS = (Tile(64, 32, 4, 6), Tile(128, 64, 8, 4), Tile(128, 256, 8, 3))  # for ``x W.T``, as experts have it
MMA = (Tile(16, 32, 4, 5), Tile(64, 64, 4, 4), Tile(128, 128, 8, 3))
FLOAT32 = (Tile(16, 32, 4, 4), Tile(64, 64, 8, 2))


def tiles_of(itemsize: int, capability: tuple[int, int], outputs_first: bool = False) -> tuple[Tile, ...]:
    """All tiles of a GPU for elements of ``itemsize`` bytes: their instructions are of one kind.

    ``outputs_first``: tiles are ``W x.T``, not ``x W.T``.
    """
    if itemsize == 4:
        return FLOAT32
    if capability[0] not in (9, 10):
        return MMA
    return WGMMA if outputs_first else WGMMA_ROWS


def tile_for(rows: int, itemsize: int, capability: tuple[int, int], outputs_first: bool = False) -> Tile:
    """The tile for so many rows."""
    tiles = tiles_of(itemsize, capability, outputs_first)
    return next((tile for tile in tiles if rows <= tile.m), tiles[-1])


@functools.cache
def _capability(device: torch.device) -> tuple[int, int]:
    """On a CPU, where only the interpreter runs, that of a GPU with small tiles."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)


@functools.cache
def gpu_name(device: torch.device) -> str:
    """By which files of measured tiles are found; "" for a CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else ""


@triton.jit
def multiply_add(a, b, acc):
    """``acc`` and the products of rows ``a`` ``[M, K]`` and columns ``b`` ``[K, N]``."""
    if INTERPRET:  # whose tl.dot has no order, and computes garbage in bfloat16
        products = a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :]
        return acc + tl.sum(products, 1)
    else:
        return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def inside_inputs(inner, k, IN: tl.constexpr, WHOLE: tl.constexpr):
    """Which of ``k + inner`` there are, of IN inputs. WHOLE: all of them; masks take instructions and registers."""
    if WHOLE:
        return tl.full(inner.shape, True, tl.int1)
    else:
        return inner < IN - k


@triton.jit(do_not_specialize=["num_rows"])
def exact_linear_kernel(
    x, weight, bias, norm, beside, residual, out, num_rows, x_stride, beside_stride, residual_stride, eps,
    OUT: tl.constexpr, IN: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, MULTIPLIER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A program a tile of outputs. Those with the same outputs of other rows follow each other, and share weights."""
    num_m = tl.cdiv(num_rows, BLOCK_M)
    rows = (tl.program_id(0) % num_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    tile = tl.program_id(0) // num_m
    columns = columns_of(tile, OUT, GATED, BLOCK_N)
    inside_columns = columns < (2 * OUT if GATED else OUT)
    inner = tl.arange(0, BLOCK_K)
    inside_rows = rows < num_rows
    x_rows = x + rows * x_stride
    inverse = None
    if norm is not None:
        inverse = inverse_rms_of_rows(x_rows, inside_rows, eps, IN, BLOCK_M)
    x_tile = x_rows[:, None] + inner[None, :]
    w_tile = weight + columns.to(tl.int64)[:, None] * IN + inner[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k in range(0, IN, BLOCK_K):
        inside = inner < IN - k
        a = tl.load(x_tile + k, mask=inside_rows[:, None] & inside[None, :], other=0.0)
        b = tl.load(w_tile + k, mask=inside_columns[:, None] & inside[None, :], other=0.0)
        acc = multiply_add(b, tl.trans(normed(a, inverse, norm, k + inner, IN)), acc)
    store_outputs(
        acc, bias, beside, residual, out, tile, columns, rows, inside_rows, beside_stride, residual_stride,
        OUT, ACTIVATION, GATED, MULTIPLIER, BLOCK_M, BLOCK_N,
    )  # fmt: skip


def exact_linear(x: Tensor, weight: Tensor, bias: Tensor | None, *surroundings: Any) -> Tensor:
    """The op on CUDA tensors (on CPU tensors under Triton's interpreter). Never synchronises.

    ``surroundings``: fields of ``Surroundings``, the first or all of them.

    Raises:
        ValueError: a tensor of another shape, dtype, layout or device; those of ``outputs_of``.
    """
    _check(x, weight, bias)
    rows, in_features = x.shape
    if x.data_ptr() % _ALIGNMENT or (rows > 1 and x.stride(0) * x.itemsize % _ALIGNMENT):
        x = x.clone(memory_format=torch.contiguous_format)
    around = Surroundings(*surroundings)
    out, beside, residual, *strides = outputs_of("exact_linear", x, weight.shape[0], around)
    if not out.numel():
        return out
    tile = tile_for(rows, x.itemsize, _capability(x.device), outputs_first=True)
    with torch.cuda.device_of(x):
        exact_linear_kernel[(triton.cdiv(rows, tile.m) * triton.cdiv(weight.shape[0], tile.n),)](
            x, weight, bias, around.norm, beside, residual, out, rows, x.stride(0) if rows > 1 else in_features,
            *strides, around.eps,
            OUT=out.shape[1], IN=in_features,
            ACTIVATION=around.activation, GATED=around.is_gated, MULTIPLIER=around.multiplier,
            BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=_BLOCK_K[x.itemsize],
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=x.itemsize == 4,
        )  # fmt: skip
    return out


def _check(x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    if x.dim() != 2 or (x.stride(1) != 1 and x.shape[1] != 1) or x.dtype not in _DTYPES:
        raise ValueError(
            "exact_linear: x must be [T, K] of float32, bfloat16 or float16 with the last stride 1, got "
            f"{list(x.shape)} of {x.dtype} with strides {list(x.stride())}"
        )
    like = (x.dtype, x.device)
    if weight.dim() != 2 or weight.shape[1] != x.shape[1] or not weight.is_contiguous() or weight.shape[1] == 0:
        raise ValueError(f"exact_linear: weight must be a contiguous [N, {x.shape[1]}], got {list(weight.shape)}")
    if (weight.dtype, weight.device) != like:
        raise ValueError(f"exact_linear: weight must be {x.dtype} on {x.device}, got {weight.dtype} on {weight.device}")
    if bias is not None and (
        bias.shape != weight.shape[:1] or not bias.is_contiguous() or (bias.dtype, bias.device) != like
    ):
        raise ValueError(
            f"exact_linear: bias must be a contiguous [{weight.shape[0]}] of {x.dtype} on {x.device}, got "
            f"{list(bias.shape)} of {bias.dtype} on {bias.device}"
        )
