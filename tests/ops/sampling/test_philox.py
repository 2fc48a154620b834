"""Random numbers from (seed, position) alone: the published answers, the op's bits, and an even distribution."""

from collections.abc import Callable

import pytest
import torch

from compiled_llm.ops import uniform
from compiled_llm.ops.sampling import philox as philox_module
from compiled_llm.ops.sampling.philox import philox, uniform_reference
from tests.ops.sampling.sampling_cases import chi_square_is_likely

NUM_SAMPLES = 100_000
INT64, INT32 = torch.int64, torch.int32
MAKERS = pytest.mark.parametrize("make", [uniform, uniform_reference])


def written_out(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Philox4x32-10 in Python's own integers, as section 3.3 of Salmon et al., 2011, describes it."""
    (a, b, c, d), (key0, key1) = counter, key
    for _ in range(10):
        high0, low0 = divmod(a * 0xD2511F53, 2**32)
        high1, low1 = divmod(c * 0xCD9E8D57, 2**32)
        a, b, c, d = high1 ^ b ^ key0, low1, high0 ^ d ^ key1, low0
        key0, key1 = (key0 + 0x9E3779B9) % 2**32, (key1 + 0xBB67AE85) % 2**32
    return a, b, c, d


# The known answers that the authors publish with their library, Random123: counter, key, result.
KNOWN_ANSWERS = [
    ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "words"), KNOWN_ANSWERS)
def test_the_written_out_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    assert written_out(counter, key) == words


def test_all_words_of_philox_are_those_of_the_written_out_one() -> None:
    seeds = [0, 1, -1, 7, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -(2**63), -(2**31), 0x299F31D0A4093822]
    positions = [0, 1, 2, 255, 65_536, 0x243F6A88, 2**31 - 1]
    pairs = [(seed, position) for seed in seeds for position in positions]
    words = philox(torch.tensor([s for s, _ in pairs]), torch.tensor([p for _, p in pairs], dtype=INT32))
    expected = [written_out((p, 0, 0, 0), (s % 2**32, s // 2**32 % 2**32)) for s, p in pairs]
    assert list(zip(*(word.tolist() for word in words), strict=True)) == expected
    assert expected[0] == KNOWN_ANSWERS[0][2]


@MAKERS
def test_uniform_has_53_bits_of_the_first_two_words(make: Callable) -> None:
    positions = torch.arange(500, dtype=INT32)
    found = make(torch.full((500,), -3), positions)
    assert found.dtype == torch.float64
    key = (2**32 - 3, 2**32 - 1)
    words = [written_out((position, 0, 0, 0), key) for position in range(500)]
    assert found.tolist() == [((word[0] << 32 | word[1]) >> 11) / 2**53 for word in words]


@pytest.mark.parametrize(("word", "number"), [(0, 0.0), (0xFFFFFFFF, 1 - 2.0**-53)])
def test_uniform_is_never_1(word: int, number: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(philox_module, "philox", lambda seed, position: (torch.full_like(seed, word),) * 4)
    assert uniform_reference(torch.zeros(1, dtype=INT64), torch.zeros(1, dtype=INT32)).item() == number < 1


def test_uniform_depends_on_seed_and_position_alone() -> None:
    seeds = torch.tensor([5, 5, -9, 5 + 2**32, 0])
    positions = torch.tensor([0, 1, 0, 0, 5], dtype=INT32)
    together = uniform(seeds, positions)
    alone = torch.cat([uniform(seeds[i : i + 1], positions[i : i + 1]) for i in range(5)])
    assert torch.equal(together, alone)
    assert torch.equal(together.flip(0), uniform(seeds.flip(0), positions.flip(0)))
    assert len(set(together.tolist())) == 5


@pytest.mark.parametrize("varies", ["position", "seed"])
def test_uniform_covers_the_interval_evenly_and_in_pairs(varies: str) -> None:
    numbers = torch.arange(NUM_SAMPLES)
    fixed = torch.full_like(numbers, 3)
    found = uniform(*((fixed, numbers.int()) if varies == "position" else (numbers, fixed.int())))
    assert 0 <= found.min() < 1e-4
    assert 1 - 1e-4 < found.max() < 1
    bins = (found * 50).long()
    assert chi_square_is_likely(torch.bincount(bins, minlength=50), torch.full((50,), 1 / 50))
    pairs = (found[::2] * 20).long() * 20 + (found[1::2] * 20).long()
    assert chi_square_is_likely(torch.bincount(pairs, minlength=400), torch.full((400,), 1 / 400))


def test_the_op_has_the_bits_of_the_reference() -> None:
    extremes = torch.tensor([0, 1, -1, 7, 2**31, 2**32 - 1, 2**32, 2**63 - 1, -(2**63), -(2**31)])
    seeds = torch.cat(
        [extremes, torch.randint(-(2**63), 2**63 - 1, (1000,), generator=torch.Generator().manual_seed(0))]
    )
    for position in (0, 1, 0x243F6A88, 2**31 - 1):
        positions = torch.full(seeds.shape, position, dtype=INT32)
        assert torch.equal(uniform(seeds, positions), uniform_reference(seeds, positions))
    torch.library.opcheck(torch.ops.compiled_llm.uniform.default, (seeds, positions))
    with pytest.raises(ValueError, match=r"position must be a contiguous \[1010\] of int32"):
        uniform(seeds, seeds)
