"""The gated delta rule on a GPU: which kernels compute it, and their launch."""

import torch
import triton
from torch import Tensor

from compiled_llm.ops.recurrent.triton_delta_chunks import (
    CHUNK,
    FEW,
    LARGEST,
    delta_chunks_kernel,
    delta_factors_kernel,
    most_chunks,
)
from compiled_llm.ops.recurrent.triton_recurrent import OPTIONS, check_step
from compiled_llm.ops.recurrent.triton_steps import TILE, WARPS, delta_steps_kernel
from compiled_llm.ops.triton_checks import check_contiguous, check_strided

# Found by compiling for sm_80, sm_90 and sm_100: with more columns, or all elements of keys at once, registers spill.
_CHUNK_TILE = 16
_FACTOR_KEYS = 32
_FACTOR_WARPS = 8


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, state: Tensor,
    query_start_loc: Tensor, seq_lens: Tensor, read_slot: Tensor, write_slot: Tensor, write_after: Tensor, eps: float,
    max_query_len: int, *, exact: bool = False,
) -> Tensor:  # fmt: skip
    """The op on CUDA tensors (on CPU tensors under Triton's interpreter). Never waits for the GPU.

    Raises:
        ValueError: a tensor of another shape, dtype, layout or device.
    """
    op, device = "gated_delta_rule", q.device
    indices = (query_start_loc, seq_lens, read_slot, write_slot, write_after)
    requests, writes = check_step(op, q, *indices)
    tokens, key_heads, dk = q.shape
    heads, dv = v.shape[1:]
    if heads % key_heads:
        raise ValueError(
            f"{op}: the number of value heads must be a multiple of that of key heads, got {heads} and {key_heads}"
        )
    check_strided(op, "k", k, q.shape, device, q.dtype)
    check_strided(op, "q", q, q.shape, device, q.dtype)
    check_strided(op, "v", v, (tokens, heads, dv), device, q.dtype)
    for name, gate in (("a", a), ("b", b)):
        check_strided(op, name, gate, (tokens, heads), device, q.dtype)
    check_contiguous(op, "state", state, (len(state), heads, dk, dv), device, torch.float32)
    for name, given in (("A_log", A_log), ("dt_bias", dt_bias)):
        check_contiguous(op, name, given, (heads,), device, torch.float32)
    out = q.new_empty(tokens, heads, dv)
    if not (tokens and requests):
        return out.zero_()
    block_k = max(16, triton.next_power_of_2(dk))
    by_chunks = not exact and max_query_len > FEW and q.dtype == torch.bfloat16 and block_k <= LARGEST
    block_v = max(16, min(_CHUNK_TILE if by_chunks else TILE, triton.next_power_of_2(dv)))
    of_heads, of_gates = (*q.stride()[:2], *k.stride()[:2]), (a.stride(0), b.stride(0))
    strides = *of_heads, *v.stride()[:2], *of_gates
    sizes = {"HEADS": heads, "GROUP": heads // key_heads, "DK": dk, "DV": dv, "BLOCK_K": block_k}
    grid = (triton.cdiv(dv, block_v), heads, requests)
    steps = (q, k, v, a, b, A_log, dt_bias, state, out, *indices, requests, tokens, *strides, eps, dk**-0.5)
    with torch.cuda.device_of(q):
        if not by_chunks:
            delta_steps_kernel[grid](*steps, **sizes, WRITES=writes, BLOCK_V=block_v, num_warps=WARPS, **OPTIONS)
            return out
        inverses, scores = (q.new_empty(2, tokens, heads, CHUNK.value, dtype=torch.bfloat16) for _ in range(2))
        scalars = q.new_empty(3, heads, tokens, dtype=torch.float32)
        delta_factors_kernel[(most_chunks(tokens, requests), heads)](
            q, k, a, b, A_log, dt_bias, inverses, scores, scalars, query_start_loc, seq_lens, requests, tokens,
            *of_heads, *of_gates, eps, dk**-0.5,
            HEADS=heads, GROUP=heads // key_heads, DK=dk, BLOCK_K=min(block_k, _FACTOR_KEYS),
            BLOCK_R=triton.next_power_of_2(requests), num_warps=_FACTOR_WARPS, enable_fp_fusion=True,
        )  # fmt: skip
        delta_chunks_kernel[grid](
            *steps, inverses, scores, scalars, **sizes, WRITES=writes, BLOCK_V=block_v,
            num_warps=WARPS, num_stages=1, enable_fp_fusion=True,
        )  # fmt: skip
    return out
