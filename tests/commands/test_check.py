"""compiled-llm check: rows of what there is to know, and a status that says whether it can be served."""

import pytest
import torch

from compiled_llm import CompiledEngine
from compiled_llm.__main__ import main


def test_the_bundled_model_can_be_served(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 0
    out, err = capsys.readouterr()
    rows = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert rows["model"] == "the bundled model"
    assert rows["room"].startswith("max_model_len may be up to 1,024; room for")
    assert err == ""


def test_a_model_that_cannot_be_served_is_told_with_the_engines_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--max-model-len", "4000"]) == 1
    out, err = capsys.readouterr()
    assert "family" in out, "what is known so far"
    assert err.startswith("compiled-llm check: cannot be served: max_model_len must be at most the model's")
    with pytest.raises(SystemExit, match="2"):
        main(["check", "--block-size", "0"])


def test_compare(engine: CompiledEngine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--compare"]) == 0
    assert "agrees" in capsys.readouterr().out
    monkeypatch.setattr("compiled_llm.engine.check._TOLERANCES", {torch.bfloat16: 1e-6})
    assert main(["check", "--compare"]) == 1
    assert "DIFFERS" in capsys.readouterr().out
