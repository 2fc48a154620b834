"""Random words from a seed and a counter: the published answers."""

import pytest
import torch

from compiled_llm.ops.sampling.philox import philox


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
    numbers = [0, 1, 151_935, 2**31 - 1, 2**32 - 1]
    for kind in (0, 1):
        words = philox(
            torch.tensor(seeds)[:, None, None],
            (torch.tensor(positions, dtype=torch.int32)[:, None], torch.tensor(numbers), kind),
        )
        expected = [
            written_out((position, number, kind, 0), (seed % 2**32, seed // 2**32 % 2**32))
            for seed in seeds
            for position in positions
            for number in numbers
        ]
        assert list(zip(*(word.flatten().tolist() for word in words), strict=True)) == expected
        assert kind == 1 or expected[0] == KNOWN_ANSWERS[0][2]
