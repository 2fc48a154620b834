"""Order for speed: no row is lost, prefixes stay together, urgent rows come first, and long ones first at the end."""

import itertools
import random
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from compiled_llm.offline import order
from compiled_llm.offline.order import OrderGain, ordered_for_speed
from compiled_llm.offline.rows import Row


def row(index: int, text: str = "", **fields: Any) -> Row:
    return Row(index, f"row {index}", {"prompt": text}, **fields)


def ordered(rows: list[Row], window: int = 1000, most_tokens: int | None = 16) -> list[int]:
    return [each.index for each in ordered_for_speed(iter(rows), window, most_tokens, OrderGain())]


@given(
    st.lists(st.tuples(st.text("ab", max_size=6), st.integers(-1, 1), st.integers(1, 4)), max_size=40),
    st.integers(1, 12),
)
def test_each_row_comes_once_with_those_of_its_window(rows: list[tuple[str, int, int]], window: int) -> None:
    all_rows = [
        row(index, text, priority=priority, sampling={"max_tokens": most})
        for index, (text, priority, most) in enumerate(rows)
    ]
    found = ordered(all_rows, window)
    for start in range(0, len(rows), window):
        part = found[start : start + window]
        assert sorted(part) == list(range(start, min(start + window, len(rows))))
        priorities = [all_rows[index].priority for index in part]
        assert priorities == sorted(priorities)


def test_rows_of_one_prefix_follow_each_other() -> None:
    rng = random.Random(0)
    prefixes = ["".join(rng.choices("abc ", k=1000)) for _ in range(4)]
    rows = [row(index, f"{rng.choice(prefixes)}{rng.random()}") for index in range(300)]
    gain = OrderGain()
    found = list(ordered_for_speed(iter(rows), 1000, 16, gain))
    starts = [each.prompt["prompt"][:1000] for each in found if each.prompt is not None]
    assert len(list(itertools.groupby(starts))) == 4
    assert gain.served > 0.9 * gain.characters > 0.3 * gain.characters > gain.given
    assert "as in the one served before it" in str(gain)
    given = OrderGain()
    assert list(ordered_for_speed(iter(rows), 1, 16, given)) == rows
    assert given.given == given.served == gain.given


@pytest.mark.parametrize("kind", ["prompt_token_ids", "messages"])
def test_token_ids_and_chats_have_prefixes_too(kind: str) -> None:
    rows = []
    for index in range(20):
        common = [index % 2] * 200
        content = {"messages": [{"role": "system", "content": str(common)}, {"role": "user", "content": str(index)}]}
        values: dict[str, Any] = {"prompt": {kind: [*common, index]}} if kind == "prompt_token_ids" else content
        rows.append(Row(index, "", **values))
    found = ordered(rows)
    assert {index % 2 for index in found[:10]} in ({0}, {1})


def test_rows_of_another_salt_share_nothing() -> None:
    rows = [Row(index, "", {"prompt": "a" * 1000, "cache_salt": str(index % 2)}) for index in range(10)]
    assert sorted(ordered(rows)[:5]) in ([0, 2, 4, 6, 8], [1, 3, 5, 7, 9])


def test_at_the_end_long_rows_come_first_and_groups_stay_whole() -> None:
    lengths = [4, 64, 8, None, 2, 16]
    rows = [row(index, f"{index}", sampling={"max_tokens": most}) for index, most in enumerate(lengths)]
    rows.append(row(6, "x"))  # has the run's 32
    assert ordered(rows, most_tokens=32) == [3, 1, 6, 5, 2, 0, 4]
    assert ordered(rows, window=3, most_tokens=32) == [0, 1, 2, 5, 4, 3, 6], "the last window is one row"
    group = [row(index, "p" * 500 + str(index), sampling={"max_tokens": index + 1}) for index in range(7, 10)]
    assert ordered([*rows, *group], most_tokens=32) == [3, 1, 6, 5, 9, 8, 7, 2, 0, 4]
    same = [row(index, "a" * (index + 1)) for index in range(5)]
    assert ordered(same) == [4, 3, 2, 1, 0], "of rows with the same most, long prompts"


def test_groups_within_a_group_stay_together_at_the_end() -> None:
    rng = random.Random(0)
    documents = ["".join(rng.choices("abc ", k=1000)) for _ in range(4)]
    lengths = [8, 64, 16, 32]
    rows = [
        row(index, f"{'system ' * 60}{documents[index % 4]}{rng.random()}", sampling={"max_tokens": most})
        for index, most in enumerate(rng.choice([1, 2, lengths[index % 4]]) for index in range(200))
    ]
    found = ordered(rows)
    assert [document for document, _ in itertools.groupby(index % 4 for index in found)] == [1, 3, 2, 0]
    for document in range(4):
        most = [rows[index].sampling["max_tokens"] for index in found if index % 4 == document]
        assert most == sorted(most, reverse=True)


def test_rows_that_begin_with_each_other_end_the_search_for_groups() -> None:
    rows = [row(index, "a" * 300 * index) for index in range(40)]
    assert ordered(rows)[0] == 39
    assert sorted(ordered(rows)) == list(range(40))
    same = [row(index, "a" * 1000, sampling={"max_tokens": index + 1}) for index in range(40)]
    assert ordered(same) == list(range(39, -1, -1))


def test_a_window_begins_with_the_group_that_the_one_before_ended_with() -> None:
    rng = random.Random(0)
    prefixes = [letter * 500 for letter in "abcd"]
    rows = [row(index, f"{prefixes[index % 4]}{rng.random()}") for index in range(120)]
    found = ordered(rows, window=40)[:80]
    groups = [prefix for prefix, _ in itertools.groupby(index % 4 for index in found)]
    assert groups == [0, 1, 2, 3, 2, 1, 0]


def test_a_window_of_token_ids_holds_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "_MOST_BYTES", 1000)
    taken = iter(range(100))
    rows = (Row(index, "", {"prompt_token_ids": [1] * 10}) for index in taken)
    next(ordered_for_speed(rows, 1000, 16, OrderGain()))
    assert next(taken) == 4, "three rows of 10 ids, and the one that tells that more follow"


def test_a_window_ends_early_where_its_prompts_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "_MOST_BYTES", 60)
    taken = []

    def rows() -> Any:
        for index in range(10):
            taken.append(index)
            yield row(index, "a" * 10)

    found = ordered_for_speed(rows(), 1000, 16, OrderGain())
    next(found)
    assert taken == [0, 1, 2, 3]
    assert len(list(found)) == 9


def test_rows_that_were_served_are_not_kept() -> None:
    class Kept(Row):
        """It can have weak references."""

    made: list[weakref.ref[Row]] = []

    def rows() -> Iterator[Row]:
        for index in range(40):
            each = Kept(index, "", {"prompt": "a" * 10})
            made.append(weakref.ref(each))
            yield each

    found = ordered_for_speed(rows(), 20, 16, OrderGain())
    for _ in range(15):
        next(found)
    assert sum(each() is not None for each in made) <= 5 + 2, (
        "those to come, the next window's first, the last one read"
    )


def test_rows_that_cannot_be_read_come_through() -> None:
    assert ordered([Row(0, "", error="bad"), row(1, "a")]) == [1, 0]
