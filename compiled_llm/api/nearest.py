"""Which known names a misspelt one may stand for, the likeliest first."""

import re
from collections.abc import Iterable, Sequence
from functools import cache

_FARTHEST = 0.45  # above it, two names have nothing to do with each other
_AS_LIKELY = 0.12  # names that are so much farther than the nearest one are offered with it
_MOST = 3
_LONGEST = 64  # characters; what is longer is no name
_SWAP = 0.5  # two letters in the other order: the most common slip, so less than a wrong letter
_WORD_LEFT_OUT = 0.5  # of a name of several words, against 1 for another word
_CUT_OFF, _CUT_LETTER, _CUT_LEAST = 0.1, 0.02, 3  # a word's beginning of at least three letters, and what it lacks


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """The names of ``known`` that ``name`` may stand for, at most three, best first; none where nothing is near.

    Names are compared word by word (``bucket_size`` is near to ``token_bucket_sizes``, too) and without their
    separators (``topk``).
    """
    name = name[:_LONGEST]
    distances = sorted((_distance(name, other), place, other) for place, other in enumerate(dict.fromkeys(known)))
    close = [(distance, other) for distance, _, other in distances if distance <= _FARTHEST]
    return [other for distance, other in close if distance <= close[0][0] + _AS_LIKELY][:_MOST]


def _distance(given: str, known: str) -> float:
    """0 for the same letters, about 1 where nothing agrees."""
    one, other = _words(given), _words(known)
    if not one or not other:
        return 1.0
    return min(_of_words(one, other) / max(len(one), len(other)), _of_letters("".join(one), "".join(other)))


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[-_.\s]+", name.lower()) if word]


def _of_words(one: Sequence[str], other: Sequence[str]) -> float:
    """Least sum of changes that make one list of words the other: a word left out, or changed in some letters."""

    @cache
    def of(left: int, right: int) -> float:
        if not left or not right:
            return _WORD_LEFT_OUT * (left + right)
        changed = of(left - 1, right - 1) + _of_letters(one[left - 1], other[right - 1])
        return min(changed, of(left - 1, right) + _WORD_LEFT_OUT, of(left, right - 1) + _WORD_LEFT_OUT)

    return of(len(one), len(other))


@cache
def _of_letters(one: str, other: str) -> float:
    """Letters that are wrong, missing or too many, and half of each swap, as a share of the longer word: 0 to 1.

    Less for a beginning of the other word, such as ``temp``.
    """
    one, other = sorted((one, other), key=len)
    if _CUT_LEAST <= len(one) < len(other) and other.startswith(one):
        return _CUT_OFF + _CUT_LETTER * (len(other) - len(one))
    rows = [[float(place) for place in range(len(other) + 1)]]
    for i, letter in enumerate(one, 1):
        row = [float(i)]
        for j, against in enumerate(other, 1):
            least = min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (letter != against))
            if i > 1 and j > 1 and (letter, one[i - 2]) == (other[j - 2], against):
                least = min(least, rows[-2][j - 2] + _SWAP)
            row.append(least)
        rows.append(row)
    return rows[-1][-1] / max(len(one), len(other))
