"""Layers of every kind are measured alone, and once: the next start finds what was measured."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from compiled_llm.api.config import EngineConfig
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.registry import layers_of
from compiled_llm.parallel import layer_costs as costs
from compiled_llm.system.progress import StartProgress
from tests.models.ranks import config_of


def measured(directory: Path, model_config: ModelConfig, num_threads: int = 1, **arguments: Any) -> list[float]:
    own = {"dtype": "float32", "max_model_len": 64, "pipeline_parallel_size": 2, **arguments}
    return costs.layer_costs(EngineConfig(**own), model_config, directory, StartProgress("off"), num_threads)


@pytest.mark.parametrize("name", ["lfm2", "qwen3-next", "gemma2"])
def test_layers_of_every_kind_are_measured(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Among them layers with a state, which have no blocks."""
    monkeypatch.setattr(costs, "_path", lambda *of_all: tmp_path / "costs" / "file.json")
    config = config_of(name)
    found = measured(tmp_path, config)
    assert len(found) == len(layers_of(config))
    assert min(found) > 0
    assert measured(tmp_path, config) == found


def test_another_start_measures_where_something_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs.native, "cache_directory", lambda: tmp_path)
    numbers = list[int]()

    def seconds(config: EngineConfig, model_config: ModelConfig, directory: Path, number: int) -> float:
        numbers.append(number)
        return 1.0 + number

    monkeypatch.setattr(costs, "_seconds", seconds)
    config = dataclasses.replace(config_of("llama"), num_layers=5)
    kinds: list[dict[str, Any]] = [
        {},
        {"num_threads": 2},
        {"dtype": "bfloat16"},
        {"kv_cache_dtype": "int8"},
        {"quantization": "int8"},
    ]
    for arguments in kinds:
        found = measured(tmp_path, config, **arguments)
        assert found == [3.0, 3.0, 3.0, 3.0, 5.0]
        assert numbers == [0, 2, 4]
        assert measured(tmp_path, config, **arguments) == found
        assert numbers == [0, 2, 4], f"{arguments}: measured again"
        numbers.clear()
    monkeypatch.setattr(costs.native, "best_isa", lambda: "another")
    measured(tmp_path, config)
    assert numbers == [0, 2, 4]
    assert len(list((tmp_path / "layer_costs").iterdir())) == len(kinds) + 1


@pytest.mark.parametrize("content", ["", "[1.0]", "7", "[[1], 2, 3, 4, 5]", '{"a": 1}', "[null, 2, 3, 4, 5]"])
def test_a_file_of_something_else_is_replaced(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file.json"
    monkeypatch.setattr(costs, "_path", lambda *of_all: path)
    monkeypatch.setattr(costs, "_seconds", lambda *of_all: 1.0)
    path.write_text(content)
    config = dataclasses.replace(config_of("llama"), num_layers=5)
    assert measured(tmp_path, config) == json.loads(path.read_text()) == [1.0] * 5
