"""The linear kernel of ``probe_linear.py``: one accumulator over all inputs, in their order, in many tilings."""

import functools
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from compiled_llm.ops.linear.surroundings import Surroundings
from compiled_llm.ops.linear.triton_linear import INTERPRET, multiply_add
from compiled_llm.ops.linear.triton_surroundings import columns_of, inverse_rms_of_rows, normed, store_outputs

NOTHING = Surroundings()


class Variant(NamedTuple):
    """How a launch is cut up.

    Attributes:
        outputs, rows, k: of a tile. first: "w" where outputs are the first side of the product, "x" where rows are.
        ahead: blocks of weights that the L2 cache is asked for before anything else; a power of two, or 0.
        keep_ahead: the main loop goes on asking for those that are so far ahead.
        persistent: programs an SM that go from tile to tile; 0 for a program a tile.
        evict: weights leave the L2 cache first.
    """

    outputs: int
    rows: int
    k: int
    warps: int
    stages: int
    first: str = "w"
    ahead: int = 0
    keep_ahead: bool = False
    persistent: int = 0
    evict: bool = False

    @property
    def name(self) -> str:
        extra = f" a{self.ahead}{'+' if self.keep_ahead else ''}" if self.ahead else ""
        extra += f" p{self.persistent}" if self.persistent else ""
        return f"{self.first}{self.outputs}x{self.rows} k{self.k} w{self.warps} s{self.stages}{extra}" + (
            " e" if self.evict else ""
        )


@triton.jit
def ask_for(w_rows, first, IN: tl.constexpr, LINES: tl.constexpr):
    """The L2 cache is asked for ``LINES`` lines of each row of weights from element ``first`` on."""
    if not INTERPRET:
        places = first + tl.arange(0, LINES) * 64
        lines = w_rows[:, None] + places[None, :]
        inside = tl.broadcast_to((places < IN)[None, :], lines.shape).to(tl.int32)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }", "=r,l,r",
            [lines, inside], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def tile_of_outputs(
    x, weight, norm, residual, out, index, num_rows, x_stride, eps,
    OUT: tl.constexpr, IN: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, X_FIRST: tl.constexpr,
    AHEAD: tl.constexpr, KEEP_AHEAD: tl.constexpr, EVICT: tl.constexpr, PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    EVICTION: tl.constexpr = "evict_first" if EVICT else ""
    LINES: tl.constexpr = BLOCK_K // 64
    num_m = tl.cdiv(num_rows, BLOCK_M)
    rows = (index % num_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    tile = index // num_m
    columns = columns_of(tile, OUT, GATED, BLOCK_N)
    w_rows = weight + tl.minimum(columns, (2 * OUT if GATED else OUT) - 1).to(tl.int64) * IN
    if AHEAD > 0:
        ask_for(w_rows, 0, IN, LINES * AHEAD)
    if PROGRAMMATIC:
        gdc_wait()
        gdc_launch_dependents()
    inner = tl.arange(0, BLOCK_K)
    inside_rows = rows < num_rows
    x_rows = x + rows * x_stride
    inverse = None
    if norm is not None:
        inverse = inverse_rms_of_rows(x_rows, inside_rows, eps, IN, BLOCK_M)
    x_tile = x_rows[:, None] + inner[None, :]
    w_tile = w_rows[:, None] + inner[None, :]
    acc = tl.zeros([BLOCK_M, BLOCK_N] if X_FIRST else [BLOCK_N, BLOCK_M], tl.float32)
    for k in range(0, IN, BLOCK_K):
        a = tl.load(x_tile + k, mask=inside_rows[:, None], other=0.0)
        b = tl.load(w_tile + k, eviction_policy=EVICTION)
        if KEEP_AHEAD:
            ask_for(w_rows, k + AHEAD * BLOCK_K, IN, LINES)
        a = normed(a, inverse, norm, k + inner, IN)
        if not X_FIRST:
            a, b = b, a
        acc = multiply_add(a, tl.trans(b), acc)
    if X_FIRST:
        acc = tl.trans(acc)
    store_outputs(
        acc, None, None, residual, out, tile, columns, rows, inside_rows, OUT, OUT, OUT, ACTIVATION, GATED, 1.0,
        BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def probe_kernel(
    x, weight, norm, residual, out, num_rows, x_stride, eps, num_outputs,
    IN: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr, PERSISTENT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, X_FIRST: tl.constexpr,
    AHEAD: tl.constexpr, KEEP_AHEAD: tl.constexpr, EVICT: tl.constexpr, PROGRAMMATIC: tl.constexpr,
):  # fmt: skip
    if PERSISTENT:
        num_tiles = tl.cdiv(2 * num_outputs if GATED else num_outputs, BLOCK_N) * tl.cdiv(num_rows, BLOCK_M)
        for index in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
            tile_of_outputs(
                x, weight, norm, residual, out, index, num_rows, x_stride, eps, num_outputs, IN, ACTIVATION, GATED,
                BLOCK_M, BLOCK_N, BLOCK_K, X_FIRST, AHEAD, KEEP_AHEAD, EVICT, PROGRAMMATIC,
            )  # fmt: skip
    else:
        tile_of_outputs(
            x, weight, norm, residual, out, tl.program_id(0), num_rows, x_stride, eps, num_outputs, IN, ACTIVATION,
            GATED, BLOCK_M, BLOCK_N, BLOCK_K, X_FIRST, AHEAD, KEEP_AHEAD, EVICT, PROGRAMMATIC,
        )  # fmt: skip


@triton.jit
def read_kernel(weight, out, size, BLOCK: tl.constexpr):
    """Reads as many elements as a program has, and writes one."""
    start = tl.program_id(0).to(tl.int64) * size
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.range(0, size, BLOCK, num_stages=5):
        total += tl.load(weight + start + place + tl.arange(0, BLOCK)).to(tl.float32)
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


def launch(
    variant: Variant, x: Tensor, weight: Tensor, out: Tensor, around: Surroundings = NOTHING,
    programs: int = 132, programmatic: bool = False, warm_up: bool = False,
) -> None:  # fmt: skip
    """``out = x @ weight.T`` with what is ``around`` it. ``warm_up``: only compiled.

    ``programs``: SMs of the GPU.
    """
    outputs, inputs = around.outputs(len(weight)), x.shape[1]
    tiles = triton.cdiv(len(weight), variant.outputs)
    assert inputs % variant.k == 0
    assert x.is_contiguous()
    count = tiles * triton.cdiv(len(x), variant.rows)
    grid = min(count, variant.persistent * programs) if variant.persistent else count
    options = {"launch_pdl": True} if programmatic else {}
    run = functools.partial(probe_kernel.warmup, grid=(grid,)) if warm_up else probe_kernel[(grid,)]
    run(
        x, weight, around.norm, around.residual, out, len(x), inputs, around.eps, outputs,
        IN=inputs, ACTIVATION=around.activation, GATED=around.is_gated,
        PERSISTENT=variant.persistent > 0,
        BLOCK_M=variant.rows, BLOCK_N=variant.outputs, BLOCK_K=variant.k, X_FIRST=variant.first == "x",
        AHEAD=variant.ahead, KEEP_AHEAD=variant.keep_ahead, EVICT=variant.evict, PROGRAMMATIC=programmatic,
        num_warps=variant.warps, num_stages=variant.stages, enable_fp_fusion=False, **options,
    )  # fmt: skip


def read(weight: Tensor, out: Tensor, programs: int, warm_up: bool = False) -> None:
    """A kernel that reads the same bytes as those of ``weight``."""
    size = weight.numel() // programs
    run = functools.partial(read_kernel.warmup, grid=(programs,)) if warm_up else read_kernel[(programs,)]
    run(weight, out, size, BLOCK=2048, num_warps=4)
