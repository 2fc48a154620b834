"""The exact linear layer on the GPU: its Triton kernel, and the launch. ``exact_linear.py`` says what it computes.

Why a row's bits do not depend on how many rows there are. An output is a float32 accumulator that one program carries
over its inputs, in steps of 16 from the first to the last. Where outputs are few and inputs many, the inputs have two
or four parts (``num_chains``): each has an accumulator of its own, and these are added up in their order. The weight's
shape alone says so. Of few rows each part has a program, and the last one of a tile to end adds up; of many one program
has all parts. In 16 bits a step is one instruction of the tensor cores, and all tiles of a GPU use the same kind: on
Hopper ``wgmma``, elsewhere ``mma.sync``. The two kinds may add the 16 products up in different ways, so they are never
mixed. A tile's rows and columns say which outputs an instruction has, not how it adds up one of them; and its block of
inputs, how many steps are loaded at a time. In float32 a step is one fused multiply-add of each input, in turn.

A tile is ``W x.T``: outputs fill the 64 rows that ``wgmma`` wants, and its other side holds as few as 16 rows of x. So
the tile may follow the number of rows, and ``triton_surroundings.py`` brings activation and residual in.

On an H200 ``wgmma`` and ``mma.sync`` gave the same bits in all of 36 tiles, whichever side the outputs were; files of
measured products may use that, and the tests on a GPU compare the bits of all their tiles.
"""

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.linear.product_choices import (
    CHAIN_GRAIN,
    MAX_ROWS,
    LinearTile,
    Product,
    choose,
    num_chains,
    num_counters,
)
from compiled_llm.ops.linear.quantized_tiles import Tile
from compiled_llm.ops.linear.surroundings import Surroundings
from compiled_llm.ops.linear.triton_adapted import MOST_ROWS, adapters_of, expand, note_expanded, shrink
from compiled_llm.ops.linear.triton_multiply import multiply_add
from compiled_llm.ops.linear.triton_surroundings import (
    columns_of,
    load_added,
    outputs_of,
    store_outputs,
)
from compiled_llm.ops.programmatic_launch import launch_options
from compiled_llm.ops.rowwise.triton_rowwise import aligned_rows
from compiled_llm.ops.triton_checks import check_contiguous, check_rows, refuse
from compiled_llm.ops.triton_programmatic import let_next_start, prefetch_rows, wait_for_launches_before

EARLY_ROWS = tl.constexpr(16)  # of a tile: what is added to their outputs is loaded first; with 32 that costs a fourth


# The first whose rows suffice, else the last. But no fewer than 16, which would be another instruction with Triton 3.6
# and 3.7.
WGMMA = (
    LinearTile(16, 64, 128, 4, 4),
    LinearTile(32, 64, 128, 4, 4),
    LinearTile(64, 64, 64, 4, 6),
    LinearTile(128, 64, 64, 4, 4),
    LinearTile(256, 128, 64, 8, 4),
)

MMA = (LinearTile(16, 32, 64, 4, 5), LinearTile(64, 64, 64, 4, 4), LinearTile(128, 128, 64, 8, 3))
FLOAT32 = (LinearTile(16, 32, 16, 4, 4), LinearTile(64, 64, 16, 8, 2))
_SMS = 132  # of Hopper
_ALONE = 8  # stages, of a program that has an SM for itself: as many bytes on their way as two have

# For ``x W.T``, as single heads and experts have it.
WGMMA_ROWS = (Tile(64, 32, 4, 6), Tile(128, 64, 8, 4), Tile(128, 256, 8, 3))
BLOCK_K = {2: 64, 4: 16}  # inputs that these load at a time, by the bytes of one


def tiles_of(itemsize: int, capability: tuple[int, int]) -> tuple[LinearTile, ...]:
    """All tiles of a GPU for elements of ``itemsize`` bytes: their instructions are of one kind."""
    if itemsize == 4:
        return FLOAT32
    return WGMMA if capability[0] in (9, 10) else MMA


def tile_for(rows: int, outputs: int, itemsize: int, capability: tuple[int, int], parts: int = 1) -> LinearTile:
    """The default tile for so many rows and outputs, whose inputs are shared out to so many programs."""
    tiles = tiles_of(itemsize, capability)
    tile = next((tile for tile in tiles if rows <= tile.m), tiles[-1])
    if tiles is WGMMA and parts * triton.cdiv(rows, tile.m) * triton.cdiv(outputs, tile.n) <= _SMS:
        if rows <= MAX_ROWS:
            return tile._replace(stages=_ALONE)
        if tile is WGMMA[-1]:
            return WGMMA[-2]
    return tile


def row_tiles_of(itemsize: int, capability: tuple[int, int]) -> tuple[Tile, ...]:
    """As ``tiles_of``, for ``x W.T``."""
    if itemsize == 2 and capability[0] in (9, 10):
        return WGMMA_ROWS
    return tuple(Tile(tile.m, tile.n, tile.warps, tile.stages) for tile in tiles_of(itemsize, capability))


def row_tile_for(rows: int, itemsize: int, capability: tuple[int, int]) -> Tile:
    """As ``tile_for``, for ``x W.T``."""
    tiles = row_tiles_of(itemsize, capability)
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
def inside_inputs(inner, k, end, WHOLE: tl.constexpr):
    """Which of ``k + inner`` are before ``end``. WHOLE: all of them; masks take instructions and registers."""
    if WHOLE:
        return tl.full(inner.shape, True, tl.int1)
    else:
        return inner < end - k


@triton.jit
def _sums(
    x_tile, w_tile, inside_rows, begin, end, WHOLE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """``[BLOCK_N, BLOCK_M]``, over the inputs from ``begin`` to ``end``."""
    inner = tl.arange(0, BLOCK_K)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k in range(begin, end, BLOCK_K):
        inside = inside_inputs(inner, k, end, WHOLE)[None, :]
        a = tl.load(x_tile + k, mask=inside_rows[:, None] & inside, other=0.0)
        b = tl.load(w_tile + k, mask=inside, other=0.0)
        acc = multiply_add(b, tl.trans(a), acc)
    return acc


@triton.jit(do_not_specialize=["num_rows", "before"])
def exact_linear_kernel(
    x, weight, bias, beside, residual, out, partial, counters,
    num_rows, x_stride, beside_stride, residual_stride,
    slots, lora_a, lora_b, ranks, scales, starts, flags, shrunk, before,
    OUT: tl.constexpr, IN: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, MULTIPLIER: tl.constexpr,
    CHAINS: tl.constexpr, CHAIN: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    PARTS: tl.constexpr, RANK: tl.constexpr, SHRINK_M: tl.constexpr, SHRINK_K: tl.constexpr,
    PROGRAMMATIC: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """A program a tile of outputs. Those with the same outputs of other rows follow each other, and share weights.

    With ``counters`` it has one of the ``CHAINS`` parts of the inputs, of ``CHAIN`` each, and there is one tile of
    rows. ``partial`` then has room for the sums of all. With ``slots`` there are ``before`` programs that shrink,
    before the others.
    """
    num_m = tl.cdiv(num_rows, BLOCK_M)
    number, part = tl.program_id(0), 0
    if slots is not None:
        number = tl.maximum(number - before, 0)
    if counters is not None:
        part = number % CHAINS
        number = number // CHAINS
    rows = (number % num_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    tile = number // num_m
    columns = columns_of(tile, OUT, GATED, BLOCK_N)
    w_rows = weight + tl.minimum(columns, (2 * OUT if GATED else OUT) - 1).to(tl.int64) * IN
    if PROGRAMMATIC:
        ITEM: tl.constexpr = weight.dtype.element_ty.primitive_bitwidth // 8
        prefetch_rows(w_rows + part * CHAIN, (IN - (CHAINS - 1) * CHAIN) * ITEM, BLOCK_N)
        wait_for_launches_before(not LATE)
    if slots is not None and tl.program_id(0) < before:
        shrink(
            x, x_stride, num_rows, None, 0.0, slots, lora_a, lora_b, ranks, scales, starts, flags, shrunk,
            IN, PARTS, RANK, SHRINK_M, SHRINK_K, PROGRAMMATIC,
        )  # fmt: skip
        return
    inner = tl.arange(0, BLOCK_K)
    inside_rows = rows < num_rows
    x_tile = x + (rows * x_stride)[:, None] + inner[None, :]
    w_tile = w_rows[:, None] + inner[None, :]
    WHOLE: tl.constexpr = IN % BLOCK_K == 0 and CHAIN % BLOCK_K == 0
    end = tl.minimum((part + 1) * CHAIN, IN)
    loaded = None
    if residual is not None and not GATED and BLOCK_M <= EARLY_ROWS:  # it comes while weights do
        loaded = load_added(residual, residual_stride, rows, inside_rows, columns, OUT)
    acc = _sums(x_tile, w_tile, inside_rows, part * CHAIN, end, WHOLE, BLOCK_M, BLOCK_N, BLOCK_K)
    if counters is None and CHAINS > 1:
        for chain in tl.range(1, CHAINS, num_stages=1):
            end = tl.minimum((chain + 1) * CHAIN, IN)
            acc += _sums(x_tile, w_tile, inside_rows, chain * CHAIN, end, WHOLE, BLOCK_M, BLOCK_N, BLOCK_K)
    if PROGRAMMATIC and LATE:
        let_next_start()
    is_last = True
    if counters is not None:
        places = (tl.arange(0, BLOCK_N) * BLOCK_M)[:, None] + tl.arange(0, BLOCK_M)[None, :]
        parts = partial + tile * (CHAINS * BLOCK_N * BLOCK_M) + places
        tl.store(parts + part * (BLOCK_N * BLOCK_M), acc)
        # All threads have stored before one of them counts, with a release of what was stored and an acquire of what
        # others released; and all threads wait for its answer.
        tl.debug_barrier()
        is_last = tl.atomic_add(counters + tile, 1, sem="acq_rel", scope="gpu") == CHAINS - 1
        if is_last:
            tl.store(counters + tile, 0)  # for the next launch
            # From the L2 cache, which all programs write to: that of this SM may have older bytes.
            acc = tl.load(parts, cache_modifier=".cg")
            for chain in tl.static_range(1, CHAINS):
                acc += tl.load(parts + chain * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
    if is_last:
        changes = None
        if slots is not None:
            changes = expand(
                slots, lora_b, ranks, starts, flags, shrunk, before, columns, rows, inside_rows,
                2 * OUT if GATED else OUT, PARTS, RANK,
            )  # fmt: skip
        store_outputs(
            acc, bias, beside, residual, out, tile, columns, rows, inside_rows, beside_stride, residual_stride,
            OUT, ACTIVATION, GATED, MULTIPLIER, BLOCK_M, BLOCK_N, loaded=loaded, changes=changes,
        )  # fmt: skip
        if slots is not None:
            readers = tl.num_programs(0) - before
            note_expanded(flags, readers if counters is None else readers // CHAINS)


def exact_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, counters: Tensor | None = None, *following: Any,
    tile: LinearTile | None = None,
) -> Tensor:  # fmt: skip
    """The op on CUDA tensors (on CPU tensors under Triton's interpreter). Never waits for the GPU.

    ``counters``: as of the op. ``following``: as ``Surroundings.following``, the first or all of them. ``tile``
    replaces that of this GPU.

    Raises:
        ValueError: a tensor of another shape, dtype, layout or device; those of ``outputs_of``.
    """
    _check(x, weight, bias, counters)
    x, x_stride = aligned_rows(x, "exact_linear", "x")
    rows, in_features = x.shape
    around = Surroundings(None, 0.0, *following)
    out, beside, residual, *strides = outputs_of("exact_linear", x, weight.shape[0], around)
    if not out.numel():
        return out
    adapters = adapters_of("exact_linear", x, weight.shape[0], around.lora)
    chains = num_chains(*weight.shape)
    counters = counters if chains > 1 and rows <= MAX_ROWS else None
    parts = 1 if counters is None else chains
    tile = tile or _tile_of(x, weight, around, parts)
    if around.lora:
        tile = tile._replace(m=min(tile.m, MOST_ROWS))
    if rows > tile.m:
        counters, parts = None, 1
    tiles = triton.cdiv(rows, tile.m) * triton.cdiv(weight.shape[0], tile.n)
    with torch.cuda.device_of(x):
        partial = None
        if counters is not None:
            partial = torch.empty(tiles * parts * tile.n * tile.m, dtype=torch.float32, device=x.device)
        exact_linear_kernel[(adapters.before + tiles * parts,)](
            x, weight, bias, beside, residual, out, partial, counters, rows, x_stride, *strides, *adapters,
            OUT=out.shape[1], IN=in_features,
            CHAINS=chains, CHAIN=-(-in_features // (chains * CHAIN_GRAIN)) * CHAIN_GRAIN if chains > 1 else in_features,
            ACTIVATION=around.activation, GATED=around.is_gated, MULTIPLIER=around.multiplier,
            BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k,
            LATE=around.is_gated or residual is not None,  # else attention comes next, and reads keys before it waits
            **adapters.constants(rows, (tile.m + tile.n) * tile.k * x.itemsize),
            num_warps=tile.warps, num_stages=tile.stages, enable_fp_fusion=x.itemsize == 4, **launch_options(rows),
        )  # fmt: skip
    return out


def _tile_of(x: Tensor, weight: Tensor, around: Surroundings, parts: int) -> LinearTile:
    """From the file of this GPU, or a default."""
    if x.itemsize == 2:
        product = Product(weight.shape[0], weight.shape[1], "gate" if around.is_gated else "residual")
        if tile := choose(product, x.shape[0], gpu_name(x.device)).tile:
            return tile
    return tile_for(x.shape[0], weight.shape[0], x.itemsize, _capability(x.device), parts)


def _check(x: Tensor, weight: Tensor, bias: Tensor | None, counters: Tensor | None) -> None:
    op = "exact_linear"
    check_rows(op, x)
    if weight.dim() != 2 or weight.shape[1] != x.shape[1] or not weight.is_contiguous() or weight.shape[1] == 0:
        refuse(op, "weight", weight, f"a contiguous [N, {x.shape[1]}]")
    check_contiguous(op, "weight", weight, weight.shape, x.device, x.dtype)
    check_contiguous(op, "bias", bias, weight.shape[:1], x.device, x.dtype)
    if counters is not None:
        check_contiguous(op, "counters", counters, (num_counters(*weight.shape),), x.device, torch.int32)
