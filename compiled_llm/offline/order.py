"""The order in which rows are served: rows that begin alike one after the other, and at the end long ones first.

Rows that share a prefix share its keys and values as long as the KV pool holds them. In a file of many prefixes in
random order the pool may be full of others before one comes again. And a long row that is served last runs alone, in
steps that cost almost as much as full ones.
"""

import dataclasses
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence

from compiled_llm.offline.rows import Row

_BLOCK = 64  # characters that are compared at once: about a KV block of tokens
_GROUP_BLOCKS = 4  # rows with so many equal blocks at their start are worth keeping together
_MOST_LEVELS = 8  # of groups within groups
_MOST_BYTES = 2**28  # of the prompts of a window, about
_ID_BYTES = 40  # of a token id in memory: its number, its place in the list, its text


@dataclasses.dataclass
class OrderGain:
    """What the order brings: characters that prompts share with the start of the prompt before.

    Attributes:
        characters: of all prompts.
        given: shared with the row before it in the input.
        served: shared with the row before it as it is served.
    """

    characters: int = 0
    given: int = 0
    served: int = 0

    @property
    def is_worth_saying(self) -> bool:
        """Whether the order brought a percent or more."""
        return self.served - self.given >= 0.01 * max(1, self.characters)

    def __str__(self) -> str:
        whole = max(1, self.characters)
        given, served = self.given / whole, self.served / whole
        return f"{served:.0%} of a prompt is as in the one served before it; in the order of the input {given:.0%}"


def ordered_for_speed(rows: Iterator[Row], window: int, most_tokens: int | None, gain: OrderGain) -> Iterator[Row]:
    """The rows, window by window; more urgent ones first.

    Args:
        window: rows that are read ahead. A row is served before the next window begins, so none waits for ever.
        most_tokens: ``max_tokens`` of rows that have none of their own; None: as many as fit.
        gain: is added to.
    """
    following = next(rows, None)
    last_given = last_served = ""
    is_backwards = False
    while following is not None:
        batch, size = [following], _bytes(following)
        while len(batch) < window and size < _MOST_BYTES and (row := next(rows, None)) is not None:
            batch.append(row)
            size += _bytes(row)
        following = next(rows, None)
        texts = {row.index: _text(row) for row in batch}
        # Forwards and backwards in turns: a window begins near where the one before ended.
        ordered = sorted(batch, key=lambda row: texts[row.index], reverse=is_backwards)
        ordered.sort(key=lambda row: row.priority)
        is_backwards = not is_backwards
        if following is None:
            ordered = _longest_first(ordered, texts, most_tokens)
        gain.characters += sum(map(len, texts.values()))
        gain.given += _shared(last_given, batch, texts)
        gain.served += _shared(last_served, ordered, texts)
        last_given, last_served = texts[batch[-1].index], texts[ordered[-1].index]
        del batch, texts  # the next window takes their place in memory, and that of each row that was served
        ordered.reverse()
        while ordered:
            yield ordered.pop()


def _longest_first(
    rows: Sequence[Row], texts: Mapping[int, str], most_tokens: int | None, common: int = 0, levels: int = _MOST_LEVELS
) -> list[Row]:
    """The longest rows first, but rows that begin alike still together.

    Args:
        rows: in the order of their texts.
        common: the number of characters that all ``rows`` share at their start. Some share more: they stay together.
        levels: of groups within groups that may follow.
    """
    groups = [[rows[0]]]
    for one, other in itertools.pairwise(rows):
        is_alike = _common(texts[one.index], texts[other.index]) >= common + _GROUP_BLOCKS * _BLOCK
        if is_alike and one.priority == other.priority:
            groups[-1].append(other)
        else:
            groups.append([other])
    work = {row.index: _work(row, most_tokens) for row in rows}
    for group in groups:
        if levels > 1 and len(group) > 1:
            shared = _common(texts[group[0].index], texts[group[-1].index])
            group[:] = _longest_first(group, texts, most_tokens, shared, levels - 1)
        else:
            group.sort(key=lambda row: work[row.index])
    groups.sort(key=lambda group: (group[0].priority, min(work[row.index] for row in group)))
    return [row for group in groups for row in group]


def _shared(text: str, rows: Sequence[Row], texts: Mapping[int, str]) -> int:
    """Characters that each of ``rows`` shares with the one before it, the first with ``text``."""
    return sum(_common(one, other) for one, other in itertools.pairwise([text, *(texts[row.index] for row in rows)]))


def _text(row: Row) -> str:
    """What a row begins with; rows of other adapters, salts or templates share nothing."""
    return _own_text(row) if row.lora is None else f"{row.lora}\0{_own_text(row)}"


def _own_text(row: Row) -> str:
    if row.messages is not None:
        return json.dumps([row.chat_options, row.messages], sort_keys=True)
    prompt = row.prompt or {}
    salt = prompt.get("cache_salt", "")
    ids = prompt.get("prompt_token_ids", ())
    return f"{salt}\0{prompt['prompt']}" if "prompt" in prompt else f"{salt}\0\0{ids}"


def _size(row: Row) -> int:
    if row.messages is not None:
        return sum(len(str(message)) for message in row.messages)
    return sum(len(value) for value in (row.prompt or {}).values() if isinstance(value, str | list))


def _bytes(row: Row) -> int:
    is_ids = row.messages is None and "prompt_token_ids" in (row.prompt or {})
    return _size(row) * (_ID_BYTES if is_ids else 2)  # a text is copied


def _common(one: str, other: str) -> int:
    """Characters in blocks that are equal from the start on."""
    for start in range(0, min(len(one), len(other)), _BLOCK):
        if one[start : start + _BLOCK] != other[start : start + _BLOCK]:
            return start
    return min(len(one), len(other))


def _work(row: Row, most_tokens: int | None) -> tuple[float, int]:
    """Orders rows by how long they may run, the longest first: by ``max_tokens``, then by the prompt."""
    tokens = row.sampling.get("max_tokens", most_tokens)
    return -(float("inf") if tokens is None else tokens), -_size(row)
