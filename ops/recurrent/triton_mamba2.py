"""The scan of Mamba-2 on a GPU: which kernel computes it, and its launch."""

import torch
import triton
from torch import Tensor

from compiled_llm.ops.recurrent.triton_recurrent import OPTIONS, check_step
from compiled_llm.ops.recurrent.triton_scan_chunks import scan_chunks_kernel
from compiled_llm.ops.recurrent.triton_steps import TILE, WARPS, scan_steps_kernel
from compiled_llm.ops.triton_checks import check_contiguous, check_strided

_CHUNK_WARPS = 8
_FEW = 16  # tokens of a request, at most, for which products of matrices are not worth their while


def mamba2_scan(
    x: Tensor, dt: Tensor, B: Tensor, C: Tensor, A_log: Tensor, D: Tensor, dt_bias: Tensor, state: Tensor,
    query_start_loc: Tensor, seq_lens: Tensor, read_slot: Tensor, write_slot: Tensor, write_after: Tensor,
    dt_min: float, dt_max: float, max_query_len: int, *, exact: bool = False,
) -> Tensor:  # fmt: skip
    """The op on CUDA tensors (on CPU tensors under Triton's interpreter). Never waits for the GPU.

    By chunks (``triton_scan_chunks.py``) where that is allowed and faster.

    Raises:
        ValueError: a tensor of another shape, dtype, layout or device.
    """
    op, device = "mamba2_scan", x.device
    indices = (query_start_loc, seq_lens, read_slot, write_slot, write_after)
    requests, writes = check_step(op, x, *indices)
    tokens, heads, head_dim = x.shape
    groups, size = B.shape[1:]
    if heads % groups:
        raise ValueError(f"{op}: the number of heads must be a multiple of that of groups, got {heads} and {groups}")
    if dt_min > dt_max:
        raise ValueError(f"{op}: dt_min must be at most dt_max, got {dt_min} and {dt_max}")
    check_strided(op, "x", x, x.shape, device, x.dtype)
    check_strided(op, "dt", dt, (tokens, heads), device, x.dtype)
    for name, given in (("B", B), ("C", C)):
        check_strided(op, name, given, (tokens, groups, size), device, x.dtype)
    check_contiguous(op, "state", state, (len(state), heads, head_dim, size), device, torch.float32)
    for name, given in (("A_log", A_log), ("D", D), ("dt_bias", dt_bias)):
        check_contiguous(op, name, given, (heads,), device, torch.float32)
    out = x.new_empty(tokens, heads, head_dim)
    block_p = max(16, min(TILE, triton.next_power_of_2(head_dim)))
    if tokens and requests:
        with torch.cuda.device_of(x):
            by_chunks = not exact and max_query_len > _FEW and x.dtype != torch.float32
            options = (
                {"num_warps": _CHUNK_WARPS, "enable_fp_fusion": True} if by_chunks else {"num_warps": WARPS, **OPTIONS}
            )
            kernel = scan_chunks_kernel if by_chunks else scan_steps_kernel
            kernel[(triton.cdiv(head_dim, block_p), heads, requests)](
                x, dt, B, C, A_log, D, dt_bias, state, out, *indices, requests, tokens,
                *x.stride()[:2], dt.stride(0), *B.stride()[:2], *C.stride()[:2], dt_min, dt_max,
                HEADS=heads, GROUP=heads // groups, HEAD_DIM=head_dim, SIZE=size, WRITES=writes,
                BLOCK_P=block_p, BLOCK_N=max(16, triton.next_power_of_2(size)), **options,
            )  # fmt: skip
    return out if requests else out.zero_()
