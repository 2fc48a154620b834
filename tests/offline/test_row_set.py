"""A set of row numbers is a set."""

import sys

from hypothesis import given
from hypothesis import strategies as st

from compiled_llm.offline.row_set import RowSet


@given(st.lists(st.integers(0, 5000)))
def test_it_is_a_set(indices: list[int]) -> None:
    rows, expected = RowSet(), set()
    for index in indices:
        assert rows.add(index) == (index not in expected)
        expected.add(index)
        assert len(rows) == len(expected)
    assert {index for index in range(5100) if index in rows} == expected


def test_ten_million_rows_take_little_memory() -> None:
    rows = RowSet()
    for index in range(0, 10_000_000, 1000):
        rows.add(index)
    assert sys.getsizeof(rows._bits) < 1_500_000
