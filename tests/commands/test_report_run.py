"""``compiled-llm report run`` is a batch with a report, into a directory of that name unless another is given."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from compiled_llm.__main__ import main
from compiled_llm.commands import batch


@pytest.mark.parametrize(("words", "directory"), [([], "report"), (["--report", "other"], "other")])
def test_the_flags_are_those_of_batch(words: list[str], directory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def parsed(program: str, arguments: Sequence[str]) -> int:
        args = batch.parser(program).parse_args(arguments)
        assert (args.report, args.quiet, args.bucket_sizes) == (Path(directory), True, (1, 8))
        return 7

    monkeypatch.setattr(batch, "main", parsed)
    assert main(["report", "run", "--bucket-sizes", "1,8", *words]) == 7
