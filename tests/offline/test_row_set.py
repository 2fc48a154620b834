"""A set of row numbers is a set."""

import sys

from hypothesis import given
from hypothesis import strategies as st

from compiled_llm.offline.row_set import RowSet


@given(st.lists(st.integers(0, 5000) | st.integers(65_530, 65_545)))
def test_it_is_a_set(indices: list[int]) -> None:
    rows, expected = RowSet(), set()
    for index in indices:
        assert rows.add(index) == (index not in expected)
        expected.add(index)
        assert len(rows) == len(expected)
    assert {index for index in range(66_000) if index in rows} == expected


def num_bytes(rows: RowSet) -> int:
    return sys.getsizeof(rows._chunks) + sum(map(sys.getsizeof, rows._chunks.values()))


def test_ten_million_rows_take_little_memory() -> None:
    rows = RowSet()
    for index in range(0, 10_000_000, 1000):
        rows.add(index)
    assert num_bytes(rows) < 1_350_000


def test_large_numbers_take_no_more_memory_than_small_ones() -> None:
    rows = RowSet()
    for index in (0, 10**12, 10**17):
        assert rows.add(index)
    assert 10**12 in rows
    assert 10**12 + 1 not in rows
    assert num_bytes(rows) < 30_000


def test_the_highest_number() -> None:
    for numbers in ([], [0], [7, 3], [65_535], [65_536, 5], [10**18, 12]):
        rows = RowSet()
        for number in numbers:
            rows.add(number)
        assert rows.highest == max(numbers, default=None)
