"""Like precision: every engine says what it computes in, and this engine has arguments for it."""

import importlib
from pathlib import Path

import pytest

from compiled_llm.api.config import EngineConfig

SCRIPTS = Path(__file__).parents[3] / "scripts" / "bench"


@pytest.mark.parametrize(("name", "group_size"), [("bf16", 32), ("int8", 32), ("int4", 32), ("int4", 128)])
def test_precisions(name: str, group_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    of = importlib.import_module("peer_precisions").precision(name, group_size)
    assert next(iter(of.engines)) == "engine"
    for options in of.engines.values():
        EngineConfig(**options)
    for engine in (*of.engines, "vllm", "openvino", "openvino-stateful", "llama.cpp"):
        facts = of.facts(engine)
        assert all(facts.values())
        assert ("bfloat16" in facts["weights"] or "float16" in facts["weights"]) == (name == "bf16")
    assert of.facts("openvino-stateful") == of.facts("openvino")
    assert of.facts("openvino")["kv_cache"] == of.facts("llama.cpp")["kv_cache"] == "float16"
    if name == "int4":
        assert of.openvino[of.openvino.index("--group-size") + 1] == str(group_size)
        assert str(group_size) in of.facts("vllm")["weights"]
