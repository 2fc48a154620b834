"""Tokens as the characters of a str, which Python cuts, compares and hashes faster than lists of numbers."""

from array import array
from collections.abc import Sequence

MOST_TOKENS = 0x10FFFF  # of a vocabulary: ids are code points, and the last one is kept free
LAST = chr(MOST_TOKENS)  # sorts after every token


def as_text(token_ids: Sequence[int]) -> str:
    """A character for each token, its id as code point."""
    return array("I", token_ids).tobytes().decode("utf-32", "surrogatepass")


def as_tokens(text: str) -> list[int]:
    """The ids of ``as_text``."""
    return [ord(character) for character in text]
