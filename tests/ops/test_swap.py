"""Swapping blocks against a naive loop over bytes: on the CPU, through the GPU's staging on the CPU, and on a GPU."""

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from compiled_llm.ops import native, swap

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
# The dtype of each layer.
POOLS = {**{name: [name] * 2 for name in DTYPES}, "mixed": ["bfloat16", "int8", "fp8", "float32"]}
SHAPES = [(8, 16, 128), (2, 1, 24), (1, 16, 24), (3, 1, 5), (1, 1, 1), (2, 3, 7)]  # K, S, H
Swap = Callable[[Sequence[Tensor], Tensor, Tensor, Tensor], None]
# The GPU's copies go through a buffer; nothing of that but the streams needs a GPU.
WAYS: dict[str, tuple[Swap, Swap]] = {
    "cpu": (swap.swap_out, swap.swap_in),
    "staged": (swap._staged_swap_out, swap._staged_swap_in),
}
way = pytest.mark.parametrize(("swap_out", "swap_in"), list(WAYS.values()), ids=list(WAYS))


def noise(shape: Sequence[int], dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Every bit random: NaN of all payloads, infinities and denormal numbers among them."""
    size = torch.empty(shape, dtype=dtype, device="meta").nbytes
    return torch.randint(256, (size,), dtype=torch.uint8, device=device).view(dtype).view(shape)


def make_caches(names: Sequence[str], num_blocks: int, shape: Sequence[int], device: str = "cpu") -> list[Tensor]:
    """Keys and values of a layer for each dtype's name, and scales where the codes have them."""
    caches = []
    for name in names:
        caches += [noise((num_blocks, *shape), DTYPES[name], device) for _ in range(2)]
        if name in ("int8", "fp8"):
            caches += [noise((num_blocks, *shape[:2]), torch.float32, device) for _ in range(2)]
    return caches


def rows_of(caches: Sequence[Tensor]) -> Tensor:
    """What the pool holds, ``[B, bytes per block]`` uint8 on the CPU."""
    return torch.cat([cache.view(len(cache), -1).view(torch.uint8).cpu() for cache in caches], dim=1)


def check(swaps: tuple[Swap, Swap], caches: list[Tensor], host: Tensor, device: list[int], rows: list[int]) -> None:
    """Swap out, then back into other blocks, and compare every byte of both pools with what a loop makes of them."""
    host.copy_(noise(host.shape, torch.uint8))
    expected_host, expected = host.clone(), rows_of(caches)
    for block, row in zip(device, rows, strict=True):
        expected_host[row] = expected[block]
    swaps[0](caches, host, torch.tensor(device, dtype=torch.int64), torch.tensor(rows, dtype=torch.int64))
    if caches[0].is_cuda:
        torch.cuda.synchronize()
    assert torch.equal(host, expected_host)
    assert torch.equal(rows_of(caches), expected)
    others = [(block + 1) % len(expected) for block in reversed(device)]
    for block, row in zip(others, rows, strict=True):
        expected[block] = expected_host[row]
    swaps[1](caches, host, torch.tensor(others, dtype=torch.int64), torch.tensor(rows, dtype=torch.int64))
    assert torch.equal(rows_of(caches), expected)
    assert torch.equal(host, expected_host)


@way
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pool", POOLS)
def test_round_trip(swap_out: Swap, swap_in: Swap, pool: str, shape: tuple[int, ...]) -> None:
    caches = make_caches(POOLS[pool], 9, shape)
    host = swap.host_pool(caches, 7)
    assert host.shape == (7, sum(cache.nbytes for cache in caches) // 9)
    assert not host.any()
    check((swap_out, swap_in), caches, host, [8, 0, 3, 4, 5], [2, 3, 6, 4, 0])


@way
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_random(swap_out: Swap, swap_in: Swap, data: st.DataObject) -> None:
    num_blocks, num_rows = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 12))
    names = data.draw(st.lists(st.sampled_from(list(DTYPES)), min_size=1, max_size=3))
    shape = data.draw(st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 3, 16]), st.sampled_from([1, 7, 8, 24])))
    n = data.draw(st.integers(0, min(num_blocks, num_rows)))
    device = data.draw(st.permutations(range(num_blocks)))[:n]
    rows = data.draw(st.permutations(range(num_rows)))[:n]
    caches = make_caches(names, num_blocks, shape)
    # Pieces of one block, of a few, of all: the staging's limit is in bytes.
    limit = data.draw(st.sampled_from([1, 3 * swap.bytes_per_block(caches), 1 << 30]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(swap, "_CPU_STAGING_BYTES", limit)
        patch.setattr(swap, "_CUDA_STAGING_BYTES", limit)
        check((swap_out, swap_in), caches, swap.host_pool(caches, num_rows), device, rows)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pool", POOLS)
def test_copies_within_the_pool(pool: str, shape: tuple[int, ...]) -> None:
    """Bit for bit, in any order; a block may be copied to several others, and nothing else changes."""
    caches = make_caches(POOLS[pool], 9, shape)
    expected = rows_of(caches)
    sources, targets = [8, 3, 8, 0, 5], [1, 2, 7, 6, 4]
    for source, target in zip(sources, targets, strict=True):
        expected[target] = expected[source]
    swap.copy_blocks(caches, torch.tensor(sources), torch.tensor(targets))
    assert torch.equal(rows_of(caches), expected)
    swap.copy_blocks(caches, torch.tensor([], dtype=torch.int64), torch.tensor([], dtype=torch.int64))
    assert torch.equal(rows_of(caches), expected)


@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_random_copies_within_the_pool(data: st.DataObject) -> None:
    names = data.draw(st.lists(st.sampled_from(list(DTYPES)), min_size=1, max_size=3))
    shape = data.draw(st.tuples(st.integers(1, 3), st.sampled_from([1, 2, 3, 16]), st.sampled_from([1, 7, 8, 24])))
    blocks = data.draw(st.permutations(range(data.draw(st.integers(2, 12)))))
    num_targets = data.draw(st.integers(1, len(blocks) - 1))
    targets = blocks[:num_targets]
    sources = [data.draw(st.sampled_from(blocks[num_targets:])) for _ in targets]
    caches = make_caches(names, len(blocks), shape)
    expected = rows_of(caches)
    expected[targets] = expected[sources]
    swap.copy_blocks(caches, torch.tensor(sources), torch.tensor(targets))
    assert torch.equal(rows_of(caches), expected)


@pytest.mark.parametrize(
    ("sources", "targets", "words"),
    [([1, 2], [3, 3], "two blocks are copied to one"), ([1, 2], [2, 3], "a block is copied to and from")],
)
def test_copies_that_depend_on_their_order_are_none(sources: list[int], targets: list[int], words: str) -> None:
    caches = make_caches(["float32"], 5, (1, 2, 3))
    before = rows_of(caches)
    with pytest.raises(AssertionError, match=words):
        swap.copy_blocks(caches, torch.tensor(sources), torch.tensor(targets))
    assert torch.equal(rows_of(caches), before)


@way
def test_pools_at_odd_addresses(swap_out: Swap, swap_in: Swap) -> None:
    """Slices of larger tensors, aligned to no more than their elements are."""
    for dtype in (torch.bfloat16, torch.int8):
        caches = [noise((1 + 6 * 32,), dtype)[1:].view(6, 1, 4, 8), noise((8, 1, 4, 8), dtype)[1:-1]]
        host = torch.zeros(1 + 5 * swap.bytes_per_block(caches), dtype=torch.uint8)[1:].view(5, -1)
        check((swap_out, swap_in), caches, host, [5, 1, 2], [0, 4, 3])


@way
def test_one_row_into_many_blocks(swap_out: Swap, swap_in: Swap) -> None:
    caches = make_caches(["int8"], 5, (2, 4, 8))
    host = noise((3, swap.bytes_per_block(caches)), torch.uint8)
    swap_in(caches, host, torch.tensor([4, 0, 2]), torch.tensor([1, 2, 1]))
    assert torch.equal(rows_of(caches)[[4, 0, 2]], host[[1, 2, 1]])
    swap_out(caches, host, torch.tensor([4, 4]), torch.tensor([0, 2]))  # and one block into many rows
    assert torch.equal(host[0], host[2])


@way
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device_blocks": torch.tensor([0, 5])}, r"device_blocks must be 0 to 4, given 5"),
        ({"device_blocks": torch.tensor([-1, 0])}, r"device_blocks must be 0 to 4, given -1"),
        ({"host_blocks": torch.tensor([3, 0])}, r"host_blocks must be 0 to 2, given 3"),
        ({"host_blocks": torch.tensor([0, -3])}, r"host_blocks must be 0 to 2, given -3"),
        ({"host_blocks": torch.tensor([1])}, r"must have the same length, given 2 and 1"),
        ({"device_blocks": torch.tensor([], dtype=torch.int64)}, r"must have the same length, given 0 and 2"),
        ({"device_blocks": torch.tensor([0, 1], dtype=torch.int32)}, r"device_blocks must be an int64 tensor \[n\]"),
        ({"host_blocks": torch.tensor([[0, 1]])}, r"host_blocks must be an int64 tensor \[n\] .* given .* \[1, 2\]"),
        (
            {"device_blocks": torch.tensor([1, 1]), "host_blocks": torch.tensor([2, 2])},
            r"must differ .* given \[., .\]",
        ),
        ({"host": torch.zeros(3, 191, dtype=torch.uint8)}, r"host must be a contiguous uint8 tensor \[blocks, 192\]"),
        ({"host": torch.zeros(3, 192, dtype=torch.int8)}, r"host must be .* as host_pool makes it, given torch.int8"),
        ({"host": torch.zeros(3, 384, dtype=torch.uint8)[:, ::2]}, r"host must be .* with strides \(384, 2\)"),
        ({"caches": []}, r"caches must be all tensors of the KV cache, given none"),
        (
            {"caches": [torch.zeros(5, 2, 8), torch.zeros(4, 2, 8)]},
            r"5 contiguous blocks on cpu, .* caches\[1\] with shape \[4,",
        ),
        ({"caches": [torch.zeros(5, 8, 2).mT]}, r"5 contiguous blocks .* caches\[0\] .* strides \(16, 1, 2\)"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_what_is_refused_copies_nothing(swap_out: Swap, swap_in: Swap, change: dict, message: str) -> None:
    good = {
        "caches": [torch.rand(5, 2, 8), torch.rand(5, 2, 8), torch.rand(5, 4, 4)],
        "host": noise((3, 192), torch.uint8),
        "device_blocks": torch.tensor([4, 0]),
        "host_blocks": torch.tensor([0, 2]),
    }
    arguments = {**good, **change}
    before = [tensor.clone() for tensor in (*arguments["caches"], arguments["host"])]
    for function in (swap_out, swap_in):
        with pytest.raises(ValueError, match=message):
            function(*arguments.values())
    assert all(map(torch.equal, (*arguments["caches"], arguments["host"]), before))


@pytest.mark.parametrize("pool", ["int8"])  # opcheck itself can compare neither fp8 nor NaN
@pytest.mark.parametrize("op", [torch.ops.compiled_llm.swap_out, torch.ops.compiled_llm.swap_in], ids=str)
def test_opcheck(op: torch._ops.OpOverloadPacket, pool: str) -> None:
    caches = [cache.nan_to_num(1.0, 1.0, 1.0) for cache in make_caches(POOLS[pool], 5, (2, 4, 8))]
    host = rows_of([cache.nan_to_num(1.0, 1.0, 1.0) for cache in make_caches(POOLS[pool], 4, (2, 4, 8))])
    torch.library.opcheck(op.default, (caches, host, torch.tensor([4, 0, 1]), torch.tensor([2, 3, 0])))


def gpu_caches(names: Sequence[str], num_blocks: int, shape: Sequence[int]) -> list[Tensor]:
    return make_caches(names, num_blocks, shape, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pool", POOLS)
def test_round_trip_on_a_gpu(pool: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    caches = gpu_caches(POOLS[pool], 40, shape)
    host = swap.host_pool(caches, 50)
    assert host.is_pinned()
    for rows_at_once in (3, 50):
        monkeypatch.setattr(swap, "_CUDA_STAGING_BYTES", rows_at_once * swap.bytes_per_block(caches))
        for n in (0, 1, 20, 40):
            check(WAYS["cpu"], caches, host, torch.randperm(40)[:n].tolist(), torch.randperm(50)[:n].tolist())


@pytest.mark.gpu
def test_pageable_memory_is_refused_on_a_gpu() -> None:
    caches = gpu_caches(["bfloat16"], 4, (2, 16, 64))
    host = torch.zeros(4, swap.bytes_per_block(caches), dtype=torch.uint8)
    for function in WAYS["cpu"]:
        with pytest.raises(ValueError, match="host must be pinned memory"):
            function(caches, host, torch.tensor([0]), torch.tensor([0]))


@pytest.mark.gpu
def test_blocks_past_2_to_the_32_bytes() -> None:
    caches = [torch.zeros(70_000, 8, 64, 128, dtype=torch.int8, device="cuda")]  # 4.6e9 bytes
    last = noise((2, 8, 64, 128), torch.int8, "cuda")
    caches[0][-2:] = last
    host = swap.host_pool(caches, 3)
    swap.swap_out(caches, host, torch.tensor([69_999, 69_998]), torch.tensor([0, 2]))
    caches[0][-2:] = 0
    swap.swap_in(caches, host, torch.tensor([69_998, 69_999]), torch.tensor([2, 0]))
    assert torch.equal(caches[0][-2:], last)
    assert not caches[0][:3].any()


@pytest.mark.gpu
def test_the_order_of_another_stream_is_kept_without_waiting() -> None:
    """Blocks go out, are overwritten, and come back, all queued after slow work on a stream of its own."""
    caches = gpu_caches(["bfloat16", "int8"], 64, (8, 16, 128))
    expected = rows_of(caches)
    host = swap.host_pool(caches, 64)
    blocks, rows = torch.randperm(64), torch.randperm(64)
    stream, done = torch.cuda.Stream(), torch.cuda.Event()
    for warm in (False, True):  # loading kernels and taking memory for the first time may wait for the device
        host.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000_000)  # cycles: about a second
            swap.swap_out(caches, host, blocks, rows)
            for cache in caches:
                cache.view(torch.int8).fill_(1)
            swap.swap_in(caches, host, blocks.roll(1), rows.roll(1))
            done.record()
        if warm:
            assert not done.query()  # the host is back while the stream still sleeps
            assert not host.any()  # so nothing has been copied yet
        stream.synchronize()
        assert torch.equal(host[rows], expected[blocks])
        assert torch.equal(rows_of(caches), expected)


def test_blocks_of_tensors_that_lie_together() -> None:
    """As a CPU's KV cache has them: a row has a block of each. What lies behind each row is left alone."""
    kinds = [((2, 20), torch.bfloat16), ((2, 20), torch.int8), ((3,), torch.float32), ((10,), torch.float8_e4m3fn)]
    caches = native.huge_zeros_in_rows(6, kinds)
    for cache in caches:
        cache.copy_(noise(cache.shape, cache.dtype))
    expected = [cache.clone() for cache in caches]
    host = swap.host_pool(caches, 3)
    swap.swap_out(caches, host, torch.tensor([1, 5]), torch.tensor([2, 0]))
    swap.swap_in(caches, host, torch.tensor([0, 3]), torch.tensor([2, 0]))
    swap.copy_blocks(caches, torch.tensor([2]), torch.tensor([4]))
    for cache, before in zip(caches, expected, strict=True):
        before.view(torch.uint8)[[0, 3, 4]] = before.view(torch.uint8)[[1, 5, 2]]
        assert torch.equal(cache.view(torch.uint8), before.view(torch.uint8))
