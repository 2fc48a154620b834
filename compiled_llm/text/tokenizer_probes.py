"""Where two tokenizers differ, by some hundred texts on which those of published models are known to differ."""

import itertools
from collections.abc import Iterable
from typing import NamedTuple

from tokenizers import Tokenizer as Backend

# Each alone, after each other one, and beside special tokens.
_PIECES = (
    *("x", " x", "  x", "   x y", "Hello, world!", "don't I'LL", "12345", " 3.14%", "x_1", "naïve café"),
    *("\n", "\n\n", "\t", " \n ", "\r\n", "x =\n    1", "\n    return x\n", ":\n\t\tpass"),
    *(
        "你好，世界",
        "cafe\u0301 A\u030a",
        "\u1100\u1161 ﬁ Ａ １",
        "🚀👩‍💻",
        "สวัสดี",
        "नमस्ते",
        "مرحبا",
        "\u00a0\u3000\u200b",
    ),
)
_MAX_SPECIAL, _MAX_CHARACTERS = 12, 100  # special tokens that are tried
_MAX_SHOWN = 12  # tokens of an example


class Difference(NamedTuple):
    """Attributes:
    text: the shortest of the texts that differ.
    ours, theirs: its tokens.
    num_different, num_texts: how many of the texts differ, and how many there are.
    in_decoding: whether the tokens are the same, and the text that is made of them is not.
    """

    text: str
    ours: list[str]
    theirs: list[str]
    num_different: int
    num_texts: int
    in_decoding: bool


def probe_texts(special_tokens: Iterable[str]) -> list[str]:
    """Code, spaces, line breaks, scripts, signs in several parts, and ``special_tokens`` with text around them."""
    texts = [*_PIECES, *("".join(pair) for pair in itertools.product(_PIECES, repeat=2))]
    short = (token for token in special_tokens if len(token) <= _MAX_CHARACTERS)
    for token in itertools.islice(short, _MAX_SPECIAL):
        texts += [token, f"x{token}x", f" {token} x", f"x {token}\n  x", f"{token}{token}", f"{token}你好 12"]
    return texts


def difference(ours: Backend, theirs: Backend, special_tokens: Iterable[str]) -> Difference | None:
    """Compares tokens, and the text that is made of ours. None: they are the same for all texts."""
    texts = sorted(probe_texts(special_tokens), key=len)
    pairs = list(zip(ours.encode_batch(texts), theirs.encode_batch(texts), strict=True))
    encoded = [index for index, (one, other) in enumerate(pairs) if one.ids != other.ids]
    if encoded:
        first = encoded[0]
        one, other = pairs[first]
        return Difference(texts[first], _cut(one.tokens), _cut(other.tokens), len(encoded), len(texts), False)
    ids = [one.ids for one, _ in pairs]
    read, others = ours.decode_batch(ids), theirs.decode_batch(ids)
    decoded = [index for index, (one, other) in enumerate(zip(read, others, strict=True)) if one != other]
    if not decoded:
        return None
    first = decoded[0]
    return Difference(texts[first], [read[first]], [others[first]], len(decoded), len(texts), True)


def _cut(tokens: list[str]) -> list[str]:
    return tokens if len(tokens) <= _MAX_SHOWN else [*tokens[:_MAX_SHOWN], "..."]
