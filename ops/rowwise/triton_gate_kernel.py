"""The Triton kernel of ``sigmoid_gated``."""

import triton
import triton.language as tl

from compiled_llm.ops.rowwise.triton_kernels import LOG2_E, cast, rounded


@triton.jit
def sigmoid_gate_kernel(
    x, gate, out, x_stride, gate_stride, SIZE: tl.constexpr, GATES: tl.constexpr, BLOCK: tl.constexpr
):
    """A program for ``BLOCK`` elements of a row, which has ``SIZE`` gates or one."""
    dtype: tl.constexpr = out.dtype.element_ty
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + row * x_stride + i, mask=i < SIZE, other=0.0).to(tl.float32)
    place = i if GATES > 1 else i * 0
    gates = tl.load(gate + row * gate_stride + place, mask=i < SIZE, other=0.0).to(tl.float32)
    gates = 1.0 / (1.0 + tl.exp2(-gates * LOG2_E))
    tl.store(out + row * SIZE + i, cast(values * rounded(gates, dtype), dtype), mask=i < SIZE)
