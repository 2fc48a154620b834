"""Lines in the order of the input, whatever order they come in."""

import json
import random
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from compiled_llm.offline.in_order import InOrder
from compiled_llm.offline.output_file import OutputFile


@given(order=st.permutations(range(12)), done=st.sets(st.integers(0, 11)))
def test_lines_are_written_in_order_and_none_is_held_at_the_end(order: list[int], done: set[int]) -> None:
    written: list[tuple[int, bytes, bool]] = []
    lines = InOrder(lambda index, line, failed: written.append((index, line, failed)), done)
    for index in order:
        if index not in done:
            lines.add(index, b"%d" % index, index % 2 == 0)
            assert [index for index, _, _ in written] == sorted(index for index, _, _ in written)
    assert written == [(index, b"%d" % index, index % 2 == 0) for index in range(12) if index not in done]


def test_runs_that_are_killed_at_any_row_make_the_file_of_one_run(tmp_path: Path) -> None:
    """Rows end in any order within a window of eight; a run is killed when it has some that wait for others."""
    generator, num_rows, path = random.Random(0), 200, tmp_path / "out.jsonl"
    expected = [json.dumps({"index": index}) for index in range(num_rows)]
    for _ in range(100):
        file = OutputFile(path, resume=True)
        file.check_in_order()
        lines, first = InOrder(file.write, file.done), len(file.done)
        left, num_ended = list(range(first, num_rows)), generator.randrange(20)
        for _ in range(min(num_ended, len(left))):
            index = left.pop(generator.randrange(min(8, len(left))))
            lines.add(index, f"{expected[index]}\n".encode(), False)
        file.close()
        assert path.read_text().splitlines() == expected[: len(file.done)]
    assert path.read_text().splitlines() == expected
