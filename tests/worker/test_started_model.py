"""A model on its device: whether a drafter may compute the model's last layer later."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compiled_llm.api.config import EngineConfig
from compiled_llm.checkpoint import loader
from compiled_llm.models.config_file import read_config
from compiled_llm.models.last_layer import LastLayer
from compiled_llm.worker.started_model import StartedModel
from tests.families import checkpoint


def found(config: EngineConfig, **fields: Any) -> LastLayer | None:
    own = read_config(checkpoint("qwen3"))
    weights = loader.load_weights(checkpoint("qwen3"), own, torch.float32, torch.device("cpu"))
    plain = {"num_ranks": 1, "shard": None, "adapters": None, "_offloaded": None, "read_ahead": None}
    model = SimpleNamespace(**plain | {"_own_config": own, "pool_sizes": SimpleNamespace(windows=())} | fields)
    return StartedModel._last_layer(model, config, weights)  # type: ignore[arg-type]


def test_the_last_layer_waits_in_a_process_by_itself() -> None:
    own = found(EngineConfig())
    assert own is not None
    assert own.number == read_config(checkpoint("qwen3")).num_layers - 1


@pytest.mark.parametrize(
    ("fields", "config"),
    [
        ({"num_ranks": 2}, {}),
        ({"shard": object()}, {}),
        ({"adapters": object()}, {}),
        ({"_offloaded": object()}, {}),
        ({"read_ahead": object()}, {}),
        ({}, {"kv_transfer_address": "127.0.0.1:0", "kv_host_bytes": 2**20}),
    ],
)
def test_it_does_not_beside_others_who_keep_something_else(fields: dict[str, Any], config: dict[str, Any]) -> None:
    assert found(EngineConfig(**config), **fields) is None
