"""The short convolution on a GPU: kernels and launch. ``short_convolution.py`` says what it computes.

A channel's sum is computed by one thread, from the oldest input on and without fused operations, so a token has the
same bits in whatever launch. In a step of few tokens a program has some channels of a request, and leaves its states
when its outputs are done. With more tokens a launch computes outputs, a program for some channels of a token, and
another one leaves the states: only then has every program read them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from compiled_llm.ops.recurrent.short_convolution import MAX_WIDTH
from compiled_llm.ops.recurrent.triton_recurrent import (
    OPTIONS,
    check_step,
    clear_padding,
    request_of,
)
from compiled_llm.ops.rowwise.triton_kernels import activated, cast, rounded
from compiled_llm.ops.triton_checks import check_contiguous, check_strided

_BLOCK = 512  # channels of a program
_FEW = 8  # tokens of a request, on average, that one program computes one after the other


@triton.jit
def _input(
    x, gate, state, x_row, gate_row, first, index, slot, has_state, i,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """The request's input ``index`` in floats; those before its first token are in its state."""
    index = tl.zeros([], tl.int32) + index
    token = (first + index).to(tl.int64)
    is_new = i < tl.where(index >= 0, CHANNELS, 0)
    new = tl.load(x + token * x_row + i, mask=is_new, other=0.0).to(tl.float32)
    if gate is not None:
        factor = tl.load(gate + token * gate_row + i, mask=is_new, other=0.0).to(tl.float32)
        new = rounded(new * factor, x.dtype.element_ty)
    place = (slot * (WIDTH - 1) + index + (WIDTH - 1)) * CHANNELS
    is_kept = i < tl.where((index < 0) & has_state, CHANNELS, 0)
    return tl.where(is_new, new, tl.load(state + place + i, mask=is_kept, other=0.0).to(tl.float32))


@triton.jit
def _output(
    x, weight, bias, state, before, after, out, x_row, before_row, after_row, first, index, slot, has_state, i, inside,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    y = tl.zeros(i.shape, tl.float32)
    if bias is not None:
        y = tl.load(bias + i, mask=inside, other=0.0).to(tl.float32)
    for j in tl.static_range(WIDTH):
        tap = _input(
            x, before, state, x_row, before_row, first, index - (WIDTH - 1) + j, slot, has_state, i,
            CHANNELS, WIDTH,
        )  # fmt: skip
        y += tl.load(weight + i * WIDTH + j, mask=inside, other=0.0).to(tl.float32) * tap
    if SILU:
        y = activated(y, "silu")
    token = (first + index).to(tl.int64)
    if after is not None:
        y = y * tl.load(after + token * after_row + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + token * CHANNELS + i, cast(y, out.dtype.element_ty), mask=inside)


@triton.jit
def _leave_states(
    x, state, before, x_row, before_row, write_slot, write_after, request, first, slot, has_state, i, inside,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, WRITES: tl.constexpr,
):  # fmt: skip
    """To the slot that was read last, since the other states may have inputs from it; there the oldest comes first."""
    for turn in tl.static_range(2):
        for w in tl.static_range(WRITES):
            to = tl.load(write_slot + request * WRITES + w).to(tl.int64)
            tokens = tl.load(write_after + request * WRITES + w)
            if (tokens > 0) & (to != 0) & ((to == slot) == (turn == 1)):
                for j in tl.static_range(WIDTH - 1):
                    y = _input(
                        x, before, state, x_row, before_row, first, tokens - (WIDTH - 1) + j, slot, has_state, i,
                        CHANNELS, WIDTH,
                    )  # fmt: skip
                    place = (to * (WIDTH - 1) + j) * CHANNELS
                    tl.store(state + place + i, cast(y, state.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_requests", "num_tokens"])
def convolution_kernel(
    x, weight, bias, state, before, after, out, query_start_loc, seq_lens, read_slot, write_slot, write_after,
    num_requests, num_tokens, x_row, before_row, after_row, OUTPUTS: tl.constexpr,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, SILU: tl.constexpr, WRITES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (channels, request): its states, and with ``OUTPUTS`` first its outputs."""
    request = tl.program_id(1)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < CHANNELS
    first, length, has_state = request_of(query_start_loc, seq_lens, request)
    slot = tl.load(read_slot + request).to(tl.int64)
    if OUTPUTS:
        clear_padding(out, query_start_loc, seq_lens, request, num_requests, num_tokens, CHANNELS, i, inside)
        for index in range(length):
            _output(
                x, weight, bias, state, before, after, out, x_row, before_row, after_row, first, index, slot,
                has_state, i, inside, CHANNELS, WIDTH, SILU,
            )  # fmt: skip
    if length > 0:
        _leave_states(
            x, state, before, x_row, before_row, write_slot, write_after, request, first, slot, has_state, i, inside,
            CHANNELS, WIDTH, WRITES,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_requests"])
def convolution_outputs_kernel(
    x, weight, bias, state, before, after, out, query_start_loc, seq_lens, read_slot, num_requests,
    x_row, before_row, after_row,
    CHANNELS: tl.constexpr, WIDTH: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """Program (channels, token): its output, zero for padding."""
    token = tl.program_id(1)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = i < CHANNELS
    r = tl.arange(0, BLOCK_R)
    ends = tl.load(query_start_loc + 1 + r, mask=r < num_requests, other=2147483647)
    request = tl.sum((ends <= token).to(tl.int32), 0)
    is_request = request < num_requests
    request = tl.minimum(request, num_requests - 1)
    first, length, has_state = request_of(query_start_loc, seq_lens, request)
    if is_request & (length > 0):
        slot = tl.load(read_slot + request).to(tl.int64)
        _output(
            x, weight, bias, state, before, after, out, x_row, before_row, after_row, first, token - first, slot,
            has_state, i, inside, CHANNELS, WIDTH, SILU,
        )  # fmt: skip
    else:
        zeros = tl.zeros([BLOCK], out.dtype.element_ty)
        tl.store(out + token.to(tl.int64) * CHANNELS + i, zeros, mask=inside)


def short_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, query_start_loc: Tensor, seq_lens: Tensor,
    read_slot: Tensor, write_slot: Tensor, write_after: Tensor, gate_before: Tensor | None, gate_after: Tensor | None,
    silu: bool,
) -> Tensor:  # fmt: skip
    """The op on CUDA tensors (on CPU tensors under Triton's interpreter). Never waits for the GPU.

    Raises:
        ValueError: a tensor of another shape, dtype, layout or device.
    """
    op, device = "short_convolution", x.device
    indices = (query_start_loc, seq_lens, read_slot, write_slot, write_after)
    requests, writes = check_step(op, x, *indices)
    tokens, channels = x.shape
    width = weight.shape[1]
    if not 2 <= width <= MAX_WIDTH:
        raise ValueError(f"{op}: width must be from 2 to {MAX_WIDTH}, got {width}")
    for name, rows in (("x", x), ("gate_before", gate_before), ("gate_after", gate_after)):
        check_strided(op, name, rows, (tokens, channels), device, x.dtype)
    check_contiguous(op, "weight", weight, (channels, width), device, x.dtype)
    check_contiguous(op, "state", state, (len(state), width - 1, channels), device, x.dtype)
    check_contiguous(op, "bias", bias, (channels,), device, x.dtype)
    out = x.new_empty(tokens, channels)
    if not (tokens and requests):
        return out.zero_()
    strides = [0 if rows is None else rows.stride(0) for rows in (x, gate_before, gate_after)]
    tensors = (x, weight, bias, state, gate_before, gate_after, out)
    block = min(_BLOCK, triton.next_power_of_2(channels))
    blocks, options = triton.cdiv(channels, block), {"num_warps": max(1, block // 128), **OPTIONS}
    sizes = {"CHANNELS": channels, "WIDTH": width, "SILU": silu, "BLOCK": block}
    few = tokens <= _FEW * requests
    with torch.cuda.device_of(x):
        if not few:
            convolution_outputs_kernel[(blocks, tokens)](
                *tensors, *indices[:3], requests, *strides, **sizes, BLOCK_R=triton.next_power_of_2(requests), **options
            )
        convolution_kernel[(blocks, requests)](
            *tensors, *indices, requests, tokens, *strides, OUTPUTS=few, **sizes, WRITES=writes, **options
        )
    return out
