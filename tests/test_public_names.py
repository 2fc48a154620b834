"""The package's names: all are listed, also before they are imported, and ``help`` has their docstrings."""

import importlib
import inspect
import pydoc
import rlcompleter
import subprocess
import sys
import typing

import pytest

import compiled_llm
from compiled_llm import AsyncCompiledEngine, CompiledEngine


def test_all_names_are_listed_before_anything_is_loaded() -> None:
    code = (
        "import compiled_llm, sys; names = dir(compiled_llm); assert set(compiled_llm.__all__) <= set(names); "
        "assert not {'importlib', 'Any', 'TYPE_CHECKING', '_HOMES'} & set(names), names; "
        "assert 'torch' not in sys.modules and 'compiled_llm.engine' not in sys.modules; print(*names)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "CompiledEngine" in done.stdout.split()
    assert "__version__" in done.stdout.split()


@pytest.mark.parametrize("name", compiled_llm.__all__)
def test_each_name_is_there_and_is_of_the_module_that_the_table_says(name: str) -> None:
    found = getattr(compiled_llm, name)
    if name != "__version__":
        assert found.__name__ == name
        assert found is getattr(importlib.import_module(found.__module__), name)


@pytest.mark.parametrize("cls", [CompiledEngine, AsyncCompiledEngine])
def test_what_the_methods_return_has_a_public_name(cls: type) -> None:
    """Also within lists and generators."""

    def classes(hint: object) -> list[type]:
        inner = [each for argument in typing.get_args(hint) for each in classes(argument)]
        return [*inner, hint] if isinstance(hint, type) and hint.__module__.startswith("compiled_llm") else inner

    found = set()
    for name, method in inspect.getmembers(cls, inspect.isfunction):
        if not name.startswith("_") and name != "get_tokenizer":  # whose class is transformers'
            found |= set(classes(typing.get_type_hints(method).get("return")))
    assert len(found) > 4
    assert {each.__name__ for each in found} <= set(compiled_llm.__all__)


def test_names_are_completed_and_helped_with() -> None:
    completer = rlcompleter.Completer({"compiled_llm": compiled_llm})
    found = [completer.complete("compiled_llm.Sam", 0), completer.complete("compiled_llm.Eng", 0)]
    assert [text and text.rstrip("()") for text in found] == [
        "compiled_llm.SamplingParams",
        "compiled_llm.EngineConfig",
    ]
    text = pydoc.plain(pydoc.render_doc(compiled_llm))
    for words in ("class CompiledEngine", "class SamplingParams", "Complete every prompt", "class RequestOutput"):
        assert words in text


def test_an_unknown_name_is_refused_with_its_module() -> None:
    with pytest.raises(AttributeError, match="module 'compiled_llm' has no attribute 'CompiledEngin'"):
        compiled_llm.CompiledEngin  # noqa: B018
