"""Where a tile's keys lie in a paged cache, for the main loops of attention.

Where a tile begins with a block and has whole ones, block numbers are loaded and multiplied once for a block. Else each
key has its own, which takes an instruction for every key and thread that asks for one.
"""

import triton
import triton.language as tl


@triton.jit
def load_blocks(table_row, position, end, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr):
    """The blocks of ``BLOCK_N`` keys from ``position`` on, 0 from ``end`` on: ALIGNED of each block, else of each key.

    ALIGNED: ``position`` is a multiple of ``BLOCK_SIZE``. That counts where tiles have whole blocks.
    """
    if ALIGNED and BLOCK_N % BLOCK_SIZE == 0:
        blocks = position // BLOCK_SIZE + tl.arange(0, BLOCK_N // BLOCK_SIZE)
        return tl.load(table_row + blocks, mask=blocks * BLOCK_SIZE < end, other=0)
    else:
        positions = position + tl.arange(0, BLOCK_N)
        return tl.load(table_row + positions // BLOCK_SIZE, mask=positions < end, other=0)


@triton.jit
def rows_of(
    blocks, position, kv_head,
    NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, ALIGNED: tl.constexpr,
):  # fmt: skip
    """Rows of a cache ``[B, K, S, H]`` that have these keys of a KV head, ``[BLOCK_N]``: int64 and int32, to be added.

    Where ALIGNED the second ones do not depend on the tile, so that addresses of a block differ by constants.
    """
    first = (blocks.to(tl.int64) * NUM_KV_HEADS + kv_head) * BLOCK_SIZE
    if ALIGNED and BLOCK_N % BLOCK_SIZE == 0:
        starts = tl.broadcast_to(first[:, None], [BLOCK_N // BLOCK_SIZE, BLOCK_SIZE])
        places = tl.broadcast_to(tl.arange(0, BLOCK_SIZE)[None, :], [BLOCK_N // BLOCK_SIZE, BLOCK_SIZE])
        return tl.reshape(starts, [BLOCK_N]), tl.reshape(places, [BLOCK_N])
    else:
        return first + (position + tl.arange(0, BLOCK_N)) % BLOCK_SIZE, tl.zeros([BLOCK_N], tl.int32)
