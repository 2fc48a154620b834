"""Every row that the documents show as input is one that ``compiled-llm batch`` takes."""

import pytest

from compiled_llm.offline.formats import row_of_text
from tests.docs.markdown import DOCUMENTS, ROOT, blocks, name_of

BLOCKS = [block for path in DOCUMENTS for block in blocks(path, "jsonl")]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{name_of(block.path)}:{block.line}")
def test_rows_are_taken(block) -> None:  # type: ignore[no-untyped-def]
    for number, line in enumerate(block.text.splitlines()):
        assert row_of_text(number, f"line {block.line + number}", line).error is None, line


def test_rows_of_both_formats_are_shown() -> None:
    shown = [block.text for block in BLOCKS if block.path == ROOT / "docs" / "offline.md"]
    assert [text for text in shown if '"body"' in text]
    assert [text for text in shown if '"body"' not in text]
