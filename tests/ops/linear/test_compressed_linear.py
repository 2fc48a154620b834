"""Compressed weights: all bits come back, and the layer has those of the packed one."""

import threading

import pytest
import torch
from torch import Tensor

from compiled_llm.ops import native
from compiled_llm.ops.linear import compressed_linear as linear
from compiled_llm.ops.linear.compressed_linear import CompressedWeight
from compiled_llm.ops.linear.packed_linear import pack_weight, packed_linear
from compiled_llm.ops.moe.grouped_linear import pack_weights
from tests.ops.instruction_sets import by_set, skip_without

OP = "compressed_linear_cpu"
# One row group and several, with words expanded from 25 rows on, other chunks from 65 on, two blocks of rows. On tile
# registers row tiles of 16, groups of two, and blocks.
ROWS = [0, 1, 2, 3, 4, 5, 6, 7, 13, 16, 17, 24, 25, 32, 33, 64, 65, 516, 517]
# (out_features, in_features): one of each, less than a tile, whole groups, cut groups, odd K, several chunks of K
SHAPES = [(1, 1), (17, 20), (64, 64), (65, 88), (64, 172), (100, 77), (130, 300), (192, 259), (70, 1100)]


@pytest.fixture(scope="module")
def kernels() -> native.Kernels:
    """Of the op, on CPUs that have them."""
    found = native.load(OP) if native.libraries_of(OP) else None
    return skip_without(found, found.supported_isas()[0] if found is not None else "avx512_bf16")


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16)


def weight(n: int, k: int) -> Tensor:
    """Rows of other sizes each, with zeros and numbers far from the others."""
    torch.manual_seed(n * 1000 + k)
    made = torch.randn(n, k) * torch.logspace(-4, 2, n)[:, None]
    made[torch.rand(n, k) < 0.01] = 0
    for value in (-0.0, 1e-39, -3e38, 2.0**-130):  # a zero, numbers below the normal ones, the largest
        made[torch.randint(n, ()), torch.randint(k, ())] = value
    return made.bfloat16()


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_all_bits_come_back(kernels: native.Kernels, n: int, k: int) -> None:
    made = weight(n, k)
    compressed = linear.compress_weight(made)
    assert torch.equal(bits(linear.decompress(compressed, n, k)), bits(made))
    ids = torch.randint(n, (9,))
    for of_ids in (ids, ids.int()):
        assert torch.equal(bits(linear.compressed_rows(compressed, of_ids, n, k)), bits(made[ids]))


def test_any_bits_come_back(kernels: native.Kernels) -> None:
    """Of random bits nearly all upper bytes are exceptions, more than a matrix has room for at first."""
    n, k = 70, 130
    made = torch.randint(-(2**15), 2**15, (n, k), dtype=torch.int16).view(torch.bfloat16)
    compressed = linear.compress_weight(made)
    assert compressed.exceptions.shape[1] > linear.empty_compressed(n, k, torch.device("cpu")).exceptions.shape[1]
    assert torch.equal(bits(linear.decompress(compressed, n, k)), bits(made))
    assert torch.equal(bits(linear.compressed_rows(compressed, torch.arange(n), n, k)), bits(made))
    finite = torch.where(made.isfinite() & (made.abs() < 1e30), made, 0)
    x = torch.randn(9, k).bfloat16()
    for isa in kernels.supported_isas():
        for rows in (9, 40):
            assert_as_packed(kernels, isa, x.repeat(5, 1)[:rows], finite, linear.compress_weight(finite), None)


def test_weights_take_three_quarters(kernels: native.Kernels) -> None:
    n, k = 640, 1024
    torch.manual_seed(0)
    compressed = linear.compress_weight((torch.randn(n, k) * 0.02).bfloat16())
    assert sum(tensor.nbytes for tensor in compressed) < 0.76 * 2 * n * k
    used = (compressed.exceptions > 0) & (compressed.exceptions != linear.END)
    assert 0 < used.sum() < 1e-4 * n * k


def assert_as_packed(
    kernels: native.Kernels, isa: str, x: Tensor, made: Tensor, compressed: CompressedWeight, bias: Tensor | None
) -> None:
    got = kernels.run("compressed_linear", x, *compressed, bias, len(made), isa=isa)
    assert got.is_contiguous()
    assert torch.equal(bits(got), bits(packed(isa, x, made, bias)))


def packed(isa: str, x: Tensor, made: Tensor, bias: Tensor | None) -> Tensor:
    """On the same instruction set: AMX sums otherwise."""
    found = native.load("linear_cpu")
    assert found is not None
    return found.run("packed_linear", x, pack_weight(made), bias, len(made), isa=isa)


@pytest.mark.parametrize("isa", by_set(OP))
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_the_bits_of_packed_weights(n: int, k: int, with_bias: bool, isa: str) -> None:
    found = skip_without(native.load(OP) if native.libraries_of(OP) else None, isa)
    made = weight(n, k)
    compressed = linear.compress_weight(made)
    for rows in ROWS:
        x = torch.randn(rows, k + 3).bfloat16()[:, 1 : k + 1]  # rows apart
        bias = torch.randn(n).bfloat16() if with_bias else None
        assert_as_packed(found, isa, x, made, compressed, bias)


def test_large_outputs_have_the_bits_of_packed_weights(kernels: native.Kernels) -> None:
    """They are written past the caches, where the set does that."""
    n, k = 160, 96
    made = weight(n, k)
    for isa in kernels.supported_isas():
        assert_as_packed(kernels, isa, torch.randn(600, k).bfloat16(), made, linear.compress_weight(made), None)


@pytest.mark.parametrize("rows", [0, 1, 16, 17, 40])
def test_what_is_kept_twice_has_the_same_bits(kernels: native.Kernels, rows: int) -> None:
    """Few rows take the compressed weight, more the packed one: here of another matrix, so that it shows."""
    n, k = 100, 77
    made, other, bias = weight(n, k), weight(n, k + 1)[:, 1:], torch.randn(n).bfloat16()
    x, compressed = torch.randn(rows, k).bfloat16(), linear.compress_weight(made)
    isa = kernels.supported_isas()[0]
    assert torch.equal(linear.either_linear(x, pack_weight(made), compressed, bias, n), packed(isa, x, made, bias))
    shown = linear.either_linear(x, pack_weight(other), compressed, bias, n)
    is_few = rows <= 16 and torch.get_num_threads() <= 2  # a thread takes 64 outputs at a time
    assert torch.equal(shown, packed(isa, x, made if is_few else other, bias))


@pytest.mark.parametrize("rows", [1, 16, 17, 40])
def test_numbers_at_the_edges_are_rounded_as_those_of_packed_weights(kernels: native.Kernels, rows: int) -> None:
    """Results that are not numbers, denormal or zero, in outputs that are a whole line and in others."""
    n, k = 100, 32
    made = torch.ones(n, k).bfloat16()
    made[::5, 3] = torch.inf
    x = torch.zeros(rows, k).bfloat16()
    x[::3, 0] = -0.0
    bias = torch.full((n,), 1e-39).bfloat16()
    bias[1::2] = -0.0
    for isa in kernels.supported_isas():
        for each in (bias, None):
            assert_as_packed(kernels, isa, x, made, linear.compress_weight(made), each)


@pytest.mark.parametrize("isa", by_set(OP))
@pytest.mark.parametrize("by_index", [False, True])
def test_experts_have_the_bits_of_packed_ones(by_index: bool, isa: str) -> None:
    """Experts without rows, with one, with several row groups, and with more than a block of rows."""
    kernels = skip_without(native.load(OP) if native.libraries_of(OP) else None, isa)
    n, k, counts = 100, 77, [0, 1, 30, 7, 530, 0]
    made = [weight(n, k) for _ in counts]
    compressor = linear.Compressor(n, k, torch.device("cpu"), len(counts))
    for start in range(0, n, 37):  # of one expert after the other, a part of each
        for expert, each in enumerate(made):
            compressor.put(start, each[start : start + 37], expert)
    starts = torch.tensor([2, *(2 + torch.tensor(counts).cumsum(0))], dtype=torch.int32)
    rows = torch.randint(40, (int(starts[-1]) + 1,), dtype=torch.int32) if by_index else None
    x = torch.randn(40 if by_index else int(starts[-1]), k).bfloat16()
    bias = torch.randn(len(counts), n).bfloat16()
    got = kernels.run("grouped_compressed_linear", x, *compressor.finish(), bias, rows, starts, n, isa=isa)
    found = native.load("linear_cpu")
    assert found is not None
    args = x, pack_weights(made), bias, rows, starts, n
    wanted = found.run("grouped_packed_linear", *args, isa=isa)
    assert got.shape == wanted.shape
    assert torch.equal(bits(got[2 : starts[-1]]), bits(wanted[2 : starts[-1]]))
    reference = linear.grouped_compressed_linear_reference(x, *compressor.finish(), bias, rows, starts, n)
    torch.testing.assert_close(got[2 : starts[-1]], reference[2 : starts[-1]], atol=1.0, rtol=0.02)


def test_experts_of_which_one_has_many_exceptions(kernels: native.Kernels) -> None:
    n, k = 70, 130
    plain = torch.randn(2, n, k).bfloat16()
    plain[1] = torch.randint(-(2**15), 2**15, (n, k), dtype=torch.int16).view(torch.bfloat16)
    compressor = linear.Compressor(n, k, torch.device("cpu"), 2)
    for expert in range(2):
        compressor.put(0, plain[expert], expert)
    compressed = compressor.finish()
    for expert in range(2):
        assert torch.equal(bits(linear.decompress(compressed.expert(expert), n, k)), bits(plain[expert]))


def test_the_reference_is_the_same_layer(kernels: native.Kernels) -> None:
    n, k = 100, 77
    compressed = linear.compress_weight(torch.randn(n, k).bfloat16())
    x, bias = torch.randn(5, k).bfloat16(), torch.randn(n).bfloat16()
    got, wanted = (op(x, *compressed, bias, n) for op in (linear.compressed_linear, linear.compressed_linear_reference))
    torch.testing.assert_close(got, wanted, atol=0.05, rtol=0.01)
    ids = torch.tensor([0, 99, 64])
    rows = linear.compressed_rows_reference(*compressed, ids, n, k)
    assert torch.equal(rows, linear.compressed_rows(compressed, ids, n, k))


def test_rows_may_come_in_any_order_from_several_threads(kernels: native.Kernels) -> None:
    n, k = 300, 70
    made = weight(n, k)
    compressor = linear.Compressor(n, k, torch.device("cpu"))
    starts = [*range(0, n, 37)]
    threads = [
        threading.Thread(target=lambda own=own: [compressor.put(start, made[start : start + 37]) for start in own])
        for own in (starts[::-2], starts[-2::-2])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for got, wanted in zip(compressor.finish(), linear.compress_weight(made), strict=True):
        assert torch.equal(got, wanted)


def test_a_row_that_never_came_is_no_weight(kernels: native.Kernels) -> None:
    compressor = linear.Compressor(70, 8, torch.device("cpu"))
    compressor.put(0, torch.ones(69, 8).bfloat16())
    with pytest.raises(AssertionError, match="lack rows"):
        compressor.finish()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(2, 8)}, "x must be bfloat16"),
        ({"x": torch.zeros(2, 10).bfloat16()}, "take contiguous words"),
        ({"out_features": 65}, "take contiguous words"),
        ({"tables": torch.zeros(2, 2, 4, 16, dtype=torch.uint8)}, "tables must be"),
        ({"exceptions": torch.zeros(1, 0, dtype=torch.int32)}, "exceptions must be"),
        ({"bias": torch.zeros(9).bfloat16()}, "bias must be"),
    ],
)
def test_what_does_not_fit_is_refused(kernels: native.Kernels, change: dict[str, Tensor | int], message: str) -> None:
    words, tables, exceptions = linear.compress_weight(torch.ones(10, 8).bfloat16())
    x = torch.zeros(2, 8).bfloat16()
    args = {"x": x, "words": words, "tables": tables, "exceptions": exceptions, "bias": None, "out_features": 10}
    with pytest.raises(ValueError, match=message):
        linear.compressed_linear(*(args | change).values())


def test_ids_must_name_rows(kernels: native.Kernels) -> None:
    compressed = linear.compress_weight(torch.ones(10, 8).bfloat16())
    with pytest.raises(IndexError, match="ids must be from 0 to 9"):
        linear.compressed_rows(compressed, torch.tensor([3, 10]), 10, 8)


@pytest.mark.parametrize("rows", [3, 40])
def test_torch_knows_the_ops(kernels: native.Kernels, rows: int) -> None:
    compressed = linear.compress_weight(torch.randn(70, 20).bfloat16())
    x = torch.randn(rows, 20).bfloat16()
    torch.library.opcheck(torch.ops.compiled_llm.compressed_linear.default, (x, *compressed, None, 70))
    torch.library.opcheck(
        torch.ops.compiled_llm.either_linear.default,
        (x, pack_weight(torch.randn(70, 20).bfloat16()), *compressed, None, 70),
    )
    ids = torch.arange(rows)
    experts = [tensor[None] for tensor in compressed]
    starts = torch.tensor([0, rows], dtype=torch.int32)
    torch.library.opcheck(
        torch.ops.compiled_llm.grouped_compressed_linear.default, (x, *experts, None, None, starts, 70)
    )
    torch.library.opcheck(torch.ops.compiled_llm.compressed_rows.default, (*compressed, ids, 70, 20))
    assert packed_linear(x, pack_weight(linear.decompress(compressed, 70, 20)), None, 70).shape == (rows, 70)
