"""A product of two tiles in a Triton kernel, whose sums have one order in the interpreter too."""

import triton
import triton.language as tl

INTERPRET = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def multiply_add(a, b, acc):
    """``acc`` and the products of rows ``a`` ``[M, K]`` and columns ``b`` ``[K, N]``."""
    if INTERPRET:  # whose tl.dot has no order, and computes garbage in bfloat16
        products = a.to(tl.float32)[:, :, None] * b.to(tl.float32)[None, :, :]
        is_first = tl.arange(0, a.shape[1])[None, :, None] == 0
        return tl.sum(products + tl.where(is_first, acc[:, None, :], 0.0), 1)  # one after the other, from acc on
    else:
        return tl.dot(a, b, acc, input_precision="ieee")
