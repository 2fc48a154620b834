"""What the Triton kernels of layers with a state share: a step's requests, gates, and the check of their arguments."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.rowwise.triton_kernels import LOG2_E
from compiled_llm.ops.triton_checks import DTYPES, check_contiguous

OPTIONS = {"enable_fp_fusion": False}


@triton.jit
def request_of(query_start_loc, seq_lens, request):
    """(its first token, its tokens, whether it had tokens before); padding has no tokens."""
    first = tl.load(query_start_loc + request)
    seq_len = tl.load(seq_lens + request)
    length = tl.where(seq_len == 0, 0, tl.load(query_start_loc + request + 1) - first)
    return first, length, seq_len > length


@triton.jit
def store_state(state, read, tile, inside, write_slot, write_after, request, after, slot_size, WRITES: tl.constexpr):
    """To the slots that want the state after so many tokens. ``read``: where a tile's elements are in a slot."""
    for w in tl.static_range(WRITES):
        slot = tl.load(write_slot + request * WRITES + w)
        if (tl.load(write_after + request * WRITES + w) == after) & (slot != 0):
            tl.store(state + slot.to(tl.int64) * slot_size + read, tile, mask=inside)


@triton.jit
def clear_padding(out, query_start_loc, seq_lens, request, num_requests, num_tokens, row_size, i, inside):
    """Zeros in the output of what belongs to no request; ``i`` are places in an output row.

    A request's own tokens if it is padding, and after the last request's the rest.
    """
    end = tl.load(query_start_loc + request + 1)
    start = tl.where(tl.load(seq_lens + request) == 0, tl.load(query_start_loc + request), end)
    stop = tl.where(request == num_requests - 1, num_tokens, end)
    for token in range(start, stop):
        tl.store(
            out + (tl.zeros([], tl.int64) + token) * row_size + i, tl.zeros(i.shape, out.dtype.element_ty), mask=inside
        )


@triton.jit
def sigmoid(x):
    """From the exponential of a number that is not positive."""
    e = tl.exp2(-tl.abs(x) * LOG2_E)
    return tl.where(x > 0, 1.0, e) / (1.0 + e)


@triton.jit
def softplus(x):
    """``log(1 + exp(x))``: ``log(1 + e)`` for ``e = exp(-|x|)`` is ``2 * atanh(e / (2 + e))``, by its series."""
    e = tl.exp2(-tl.abs(x) * LOG2_E)
    z = e / (2.0 + e)
    square = z * z
    p = square * (1.0 / 17) + (1.0 / 15)
    p = p * square + (1.0 / 13)
    p = p * square + (1.0 / 11)
    p = p * square + (1.0 / 9)
    p = p * square + (1.0 / 7)
    p = p * square + (1.0 / 5)
    p = p * square + (1.0 / 3)
    p = p * square + 1.0
    return tl.where(x > 0, x, tl.where(x == x, 0.0, x)) + 2.0 * z * p


def check_step(
    op: str, x: Tensor, query_start_loc: Tensor, seq_lens: Tensor, read_slot: Tensor, write_slot: Tensor,
    write_after: Tensor,
) -> tuple[int, int]:  # fmt: skip
    """Requests and writes of the step.

    Raises:
        ValueError: a tensor of another shape, dtype, layout or device.
    """
    if x.dtype not in DTYPES:
        raise ValueError(f"{op}: dtype must be float32, bfloat16 or float16, got {x.dtype}")
    if seq_lens.dim() != 1 or write_slot.dim() != 2:
        raise ValueError(
            f"{op}: seq_lens must be [R] and write_slot [R, W], got {list(seq_lens.shape)} and {list(write_slot.shape)}"
        )
    requests, writes = len(seq_lens), write_slot.shape[1]
    for name, tensor, shape in (
        ("query_start_loc", query_start_loc, (requests + 1,)),
        ("seq_lens", seq_lens, (requests,)),
        ("read_slot", read_slot, (requests,)),
        ("write_slot", write_slot, (requests, writes)),
        ("write_after", write_after, (requests, writes)),
    ):
        check_contiguous(op, name, tensor, shape, x.device, torch.int32)
    return requests, writes
