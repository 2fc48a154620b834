"""The tables of arguments are what the docstrings say."""

import dataclasses
import sys

import pytest

from compiled_llm import EngineConfig, SamplingParams
from compiled_llm.api.command_line import attribute_docs
from tests.docs.markdown import ROOT


@pytest.mark.parametrize("cls", [EngineConfig, SamplingParams])
def test_every_argument_has_a_text_of_its_own(cls: type) -> None:
    docs = attribute_docs(cls)
    assert docs.keys() == {field.name for field in dataclasses.fields(cls)}
    assert len(set(docs.values())) == len(docs)
    assert all(len(text) > 10 for text in docs.values())


def test_the_tables_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    monkeypatch.delitem(sys.modules, "make_docs", raising=False)
    import make_docs

    for path, text in make_docs.pages().items():
        assert path.read_text() == text, f"{path.name} is out of date: run python scripts/make_docs.py"
