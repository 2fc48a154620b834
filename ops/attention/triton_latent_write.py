"""What latent attention has to do before it reads: a step's latents and turned parts of keys to the paged cache.

Latents are normalised, and the parts of keys and queries turned by their positions, as ``ops.rms_norm`` and
``ops.rope`` do it: to the bit.
"""

import triton
import triton.language as tl

from compiled_llm.ops.attention.triton_write import store_rows, turned_rows, write_turned_keys
from compiled_llm.ops.rowwise.triton_kernels import inverse_rms_of_row, weighted


@triton.jit
def _normed(x, norm, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """A row, ``[1, BLOCK]``, as ``norm_kernel`` gives it."""
    scale = inverse_rms_of_row(x, eps, SIZE)
    i = tl.arange(0, BLOCK)[None, :]
    y = tl.load(x + i, mask=i < SIZE, other=0.0).to(tl.float32)
    return weighted(y * scale[:, None], tl.load(norm + i, mask=i < SIZE, other=0.0), x.dtype.element_ty)


@triton.jit
def write_latent(
    k_turned, latent, cosines, norm, eps, k_cache, v_cache, k_scale, v_scale, slot,
    LATENT_DIM: tl.constexpr, TURNED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, CODE_MAX: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """A token's latent and turned part of a key to its slot."""
    write_turned_keys(
        k_turned, cosines, None, eps, k_cache, k_scale, slot, 0, 1, TURNED_DIM, BLOCK_SIZE, CODE_MAX, 1, BLOCK_H
    )  # fmt: skip
    dims = tl.arange(0, BLOCK_C)[None, :]
    slots = slot + tl.zeros([1], tl.int64)
    row = _normed(latent, norm, eps, LATENT_DIM, BLOCK_C)
    target = v_cache + slots[:, None] * LATENT_DIM + dims
    store_rows(row, dims < LATENT_DIM, target, v_scale, slots, slots >= 0, CODE_MAX)


@triton.jit
def latent_write_kernel(
    q_turned, k_turned, latent, cos_sin, norm, query_scale, q_out, k_cache, v_cache, k_scale, v_scale,
    slot_mapping, query_start_loc, row_splits, out,
    eps, num_requests, q_stride_t, q_stride_n, k_stride_t, latent_stride_t, cos_sin_stride,
    NUM_HEADS: tl.constexpr, LATENT_DIM: tl.constexpr, TURNED_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    CODE_MAX: tl.constexpr, BLOCK_HEADS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_OUT: tl.constexpr,
):  # fmt: skip
    """For each token a program that writes to the cache, and others that turn its queries.

    The first also zeroes the token's output if no request owns it, and the number of its splits.
    """
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    cosines = cos_sin + token * cos_sin_stride
    if tile == 0:
        tl.store(row_splits + token, 0)
        if token >= tl.load(query_start_loc + num_requests):
            for start in range(0, NUM_HEADS * LATENT_DIM, BLOCK_OUT):
                i = start + tl.arange(0, BLOCK_OUT)
                zeros = tl.zeros([BLOCK_OUT], out.dtype.element_ty)
                tl.store(out + token * (NUM_HEADS * LATENT_DIM) + i, zeros, mask=i < NUM_HEADS * LATENT_DIM)
        write_latent(
            k_turned + token * k_stride_t, latent + token * latent_stride_t, cosines, norm, eps,
            k_cache, v_cache, k_scale, v_scale, tl.load(slot_mapping + token).to(tl.int64),
            LATENT_DIM, TURNED_DIM, BLOCK_SIZE, CODE_MAX, BLOCK_C, BLOCK_H,
        )  # fmt: skip
    else:
        heads = (tile - 1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
        row_scale = query_scale
        if query_scale is not None:
            row_scale = query_scale + token
        turned = turned_rows(
            q_turned + token * q_stride_t, heads, heads < NUM_HEADS, cosines, row_scale, q_stride_n, TURNED_DIM, BLOCK_H
        )  # fmt: skip
        dims = tl.arange(0, BLOCK_H)
        target = q_out + (token * NUM_HEADS + heads)[:, None] * TURNED_DIM + dims[None, :]
        tl.store(target, turned, mask=(heads < NUM_HEADS)[:, None] & (dims < TURNED_DIM)[None, :])
