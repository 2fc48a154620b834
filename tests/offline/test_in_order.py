"""Lines in the order of the input, whatever order they come in."""

from hypothesis import given
from hypothesis import strategies as st

from compiled_llm.offline.in_order import InOrder


@given(order=st.permutations(range(12)), done=st.sets(st.integers(0, 11)))
def test_lines_are_written_in_order_and_none_is_held_at_the_end(order: list[int], done: set[int]) -> None:
    written: list[tuple[int, bytes, bool]] = []
    lines = InOrder(lambda index, line, failed: written.append((index, line, failed)), done)
    for index in order:
        if index not in done:
            lines.add(index, b"%d" % index, index % 2 == 0)
            assert [index for index, _, _ in written] == sorted(index for index, _, _ in written)
    assert written == [(index, b"%d" % index, index % 2 == 0) for index in range(12) if index not in done]
