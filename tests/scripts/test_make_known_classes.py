"""models/known_classes.json is what scripts/make_known_classes.py finds."""

import json
from types import ModuleType

import pytest
import transformers

from compiled_llm.models.known_classes import TABLE
from compiled_llm.models.registry import family
from scripts.rooms import ROOT
from tests.scripts.test_gpu_validate import load


@pytest.fixture(scope="module")
def program() -> ModuleType:
    return load(ROOT / "scripts" / "make_known_classes.py")


def test_one_class(program: ModuleType) -> None:
    one = program.found(transformers.Gemma3TextConfig, sorted(family("Gemma3ForCausalLM").old_fields))
    held = json.loads(TABLE.read_text())
    attributes = sorted({*held["classes"]["Gemma3TextConfig"]["attributes"], *held["attributes"]})
    assert one == {**held["classes"]["Gemma3TextConfig"], "attributes": attributes}


@pytest.mark.battery
def test_all(program: ModuleType) -> None:
    assert json.loads(json.dumps(program.table())) == json.loads(TABLE.read_text())
