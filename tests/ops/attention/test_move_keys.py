"""Keys, values and scales that go to other slots: the op and its reference beside plain loops."""

import pytest
import torch
from torch import Tensor

from compiled_llm.ops.attention.move_keys import move_keys, move_keys_reference
from tests.ops.attention.cpu_kernel import reordered

SHAPE = BLOCKS, HEADS, SIZE, DIM = 3, 2, 16, 8
MOVES = [(17, 18), (18, 17), (40, 3), (5, 40)]  # two change places, and one slot is read and written
KINDS = {
    "float32": (torch.float32, False, False),
    "bfloat16": (torch.bfloat16, False, False),
    "bfloat16-latent": (torch.bfloat16, False, True),
    "int8": (torch.int8, True, False),
    "float8": (torch.float8_e4m3fn, True, False),
    "int8-latent": (torch.int8, True, True),
}


def caches_of(dtype: torch.dtype, scaled: bool, latent: bool) -> list[Tensor | None]:
    """Keys, values, and scales of both; of latents the values have another size."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randint(-100, 100, shape, generator=generator, dtype=torch.int8)

    pair = [drawn(BLOCKS, HEADS, SIZE, size) for size in (DIM, 4 if latent else DIM)]
    codes = [one.view(dtype) if dtype.itemsize == 1 else one.to(dtype) for one in pair]
    return [*codes, *(drawn(BLOCKS, HEADS, SIZE).float() if scaled else None for _ in range(2))]


def by_loops(cache: Tensor) -> Tensor:
    wanted = cache.clone()
    for source, target in MOVES:
        wanted[target // SIZE, :, target % SIZE] = cache[source // SIZE, :, source % SIZE]
    return wanted


@pytest.mark.parametrize("apart", [False, True], ids=["", "apart"])
@pytest.mark.parametrize("is_op", [True, False], ids=["op", "reference"])
@pytest.mark.parametrize("kind", KINDS)
def test_slots_go_where_they_are_said_to(kind: str, is_op: bool, apart: bool) -> None:
    """``apart``: blocks lie further apart than they are long, as where those of all layers lie together."""
    dtype, scaled, latent = KINDS[kind]
    caches = caches_of(dtype, scaled, latent)
    if is_op:
        pair = [reordered(cache, latent or n == 0, True) for n, cache in enumerate(caches[:2]) if cache is not None]
        given = [*pair, *(None if cache is None else cache.clone() for cache in caches[2:])]
    else:
        given = [None if cache is None else cache.clone() for cache in caches]
    if apart:
        given = [None if cache is None else torch.cat((cache, cache), 1)[:, :HEADS] for cache in given]
    (move_keys if is_op else move_keys_reference)(*given, torch.tensor(MOVES), latent=latent)
    for n, (before, after) in enumerate(zip(caches, given, strict=True)):
        if before is not None:
            found = reordered(after.contiguous(), latent or n == 0, False) if is_op and n < 2 else after
            assert torch.equal(found.view(torch.uint8), by_loops(before).view(torch.uint8)), f"cache {n}"


def test_the_op_refuses_what_it_would_read_or_write_beyond_its_memory() -> None:
    keys, values, *_ = caches_of(torch.bfloat16, False, False)
    for moves in ([[0, BLOCKS * SIZE]], [[-1, 0]]):
        with pytest.raises(IndexError, match="moves"):
            move_keys(keys, values, None, None, torch.tensor(moves), latent=False)
    with pytest.raises(ValueError, match="int64"):
        move_keys(keys, values, None, None, torch.tensor([[0, 1]], dtype=torch.int32), latent=False)
    with pytest.raises(ValueError, match="v_cache"):
        move_keys(keys, values.transpose(2, 3), None, None, torch.tensor([[0, 1]]), latent=False)
    with pytest.raises(ValueError, match="k_scale"):
        move_keys(keys, values, torch.ones(BLOCKS, HEADS), None, torch.tensor([[0, 1]]), latent=False)
