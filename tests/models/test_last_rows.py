"""Behind the last attention some rows alone: in every family they have the bits that they have among all."""

import pytest
import torch

from compiled_llm.checkpoint import loader
from compiled_llm.models.config_file import read_config
from compiled_llm.models.last_rows import with_last_rows
from compiled_llm.models.layers.attention import for_queries
from compiled_llm.models.linears.adapted import Adapted
from compiled_llm.models.linears.packed import Packed
from compiled_llm.models.registry import family_of
from tests.families import EVERY_CONFIG, checkpoint
from tests.models.steps import empty_cache, step_input

# Experts read the whole step; some layers have more behind their MLP, and some no MLP.
WHOLE = {
    *("mixtral", "glm4-moe", "gpt-oss", "qwen3-moe", "gemma4", "gemma4-moe", "deepseek-v3", "deepseek-v3-halves"),
    *("deepseek-v2", "mistral4", "qwen3-next", "qwen3.5-moe", "lfm2-moe", "granite-hybrid-moe"),
    *("nemotron-h", "nemotron-h-moe"),
}


@pytest.mark.parametrize("name", EVERY_CONFIG)
def test_kept_rows_have_the_bits_that_they_have_among_all(name: str) -> None:
    config, dtype = read_config(checkpoint(name)), torch.bfloat16
    model = family_of(config)
    weights = loader.load_weights(checkpoint(name), config, dtype, torch.device("cpu"), Packed)
    chunks = [(torch.arange(3, 3 + count).tolist(), 0) for count in (13, 1, 6)]
    step = step_input(chunks, [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]])
    layers = for_queries(model.layers(config), 13)
    rows = torch.tensor([12, 13, 19, 4, 4], dtype=torch.int32)
    of_rows = with_last_rows(weights, rows, None)
    assert (of_rows is None) == (name in WHOLE)
    if of_rows is None:
        return
    caches = empty_cache(config, dtype), empty_cache(config, dtype)
    after = step_input([([7], 13)], [[1, 2, 3, 4]])
    with torch.no_grad():
        whole = model.forward(weights, step, caches[0], config, layers)
        kept = model.forward(of_rows, step, caches[1], config, layers)
        assert kept.shape == (5, config.hidden_size)
        assert torch.equal(kept, whole[rows.long()])
        # Keys of the last layer are those of all tokens: a decode sees them.
        behind = [model.forward(weights, after, cache, config, layers) for cache in caches]
        assert not behind[0].isnan().any()
        assert torch.equal(*behind)


def test_layers_know_the_adapters_of_the_rows_that_they_get() -> None:
    config = read_config(checkpoint("qwen3"))
    weights = loader.load_weights(checkpoint("qwen3"), config, torch.float32, torch.device("cpu"), Packed)
    last = weights.layers[-1]
    adapted = last._replace(
        attention=last.attention._replace(o=Adapted(last.attention.o, None)),
        mlp=last.mlp._replace(down=Adapted(last.mlp.down, None)),
    )
    weights = weights._replace(layers=(*weights.layers[:-1], adapted))
    slots = torch.tensor([2, 1], dtype=torch.int32)
    found = with_last_rows(weights, torch.tensor([5, 0], dtype=torch.int32), slots)
    assert found.layers[-1].attention.o.linear.slots is found.layers[-1].mlp.down.slots is slots
    assert found.layers[:-1] == weights.layers[:-1]
