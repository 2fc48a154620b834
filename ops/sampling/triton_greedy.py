"""The most likely tokens on the GPU: two launches, over parts of all rows and then over the rows.

A kernel that finds the largest of a row by itself would leave most of a GPU idle where rows are few.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.sampling import reference

PART = 2048  # tokens of a program
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NO_TOKEN = tl.constexpr(reference.NO_TOKEN)


@triton.jit
def part_kernel(logits, largest, tokens, stride, vocabulary, num_parts, BLOCK: tl.constexpr):
    """The largest logit of ``BLOCK`` of a row, and the first token that has it. NaN counts as infinite: no token."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = part * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + i, mask=i < vocabulary, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("inf"))
    peak = tl.max(x, 0)
    tl.store(largest + row * num_parts + part, peak)
    tl.store(tokens + row * num_parts + part, tl.min(tl.where(x == peak, i, vocabulary), 0))


@triton.jit
def row_kernel(largest, tokens, out, num_parts, BLOCK: tl.constexpr):
    """Of a row's parts the first with the largest logit; no token where that is infinite."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    peaks = tl.load(largest + row * num_parts + i, mask=i < num_parts, other=float("-inf"))
    of_parts = tl.load(tokens + row * num_parts + i, mask=i < num_parts, other=2**31 - 1)
    peak = tl.max(peaks, 0)
    token = tl.min(tl.where(peaks == peak, of_parts, 2**31 - 1), 0)
    tl.store(out + row, tl.where(tl.abs(peak) < float("inf"), token, NO_TOKEN).to(tl.int64))


def keep_greedy_tokens(logits: Tensor, last_tokens: Tensor) -> None:
    """The op on CUDA tensors (on CPU tensors under Triton's interpreter). Never waits for the GPU.

    Raises:
        ValueError: a tensor of another shape, dtype, layout or device.
    """
    if logits.dim() != 2 or logits.shape[1] == 0 or (logits.stride(1) != 1 and logits.shape[1] != 1):
        raise ValueError(
            "greedy_tokens: logits must be [R, V] with V > 0 and the last stride 1, got "
            f"{list(logits.shape)} with strides {list(logits.stride())}"
        )
    if logits.dtype not in _DTYPES:
        raise ValueError(f"greedy_tokens: logits must be float32, bfloat16 or float16, got {logits.dtype}")
    rows, vocabulary = logits.shape
    known = last_tokens.dim() == 1 and last_tokens.dtype == torch.int64 and last_tokens.is_contiguous()
    if not known or len(last_tokens) < rows or last_tokens.device != logits.device:
        raise ValueError(
            f"greedy_tokens: last_tokens must be a contiguous [{rows}] or longer of int64 on {logits.device}, got "
            f"{list(last_tokens.shape)} of {last_tokens.dtype} on {last_tokens.device}"
        )
    if rows == 0:
        return
    num_parts = triton.cdiv(vocabulary, PART)
    largest = torch.empty((rows, num_parts), dtype=torch.float32, device=logits.device)
    tokens = torch.empty((rows, num_parts), dtype=torch.int32, device=logits.device)
    with torch.cuda.device_of(logits):
        part_kernel[(rows, num_parts)](
            logits,
            largest,
            tokens,
            logits.stride(0),
            vocabulary,
            num_parts,
            BLOCK=PART,
            num_warps=8,
            enable_fp_fusion=False,
        )
        row_kernel[(rows,)](
            largest,
            tokens,
            last_tokens,
            num_parts,
            BLOCK=triton.next_power_of_2(num_parts),
            num_warps=4,
            enable_fp_fusion=False,
        )


def greedy_tokens(logits: Tensor) -> Tensor:
    """The op, into a tensor of its own."""
    tokens = torch.empty(logits.shape[:1], dtype=torch.int64, device=logits.device)
    keep_greedy_tokens(logits, tokens)
    return tokens
