"""Stages of a model one after the other against the model in one piece, through the KV cache: the same bits."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.inputs import StepInput
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.packed import Packed
from compiled_llm.models.linears.protocol import LinearKind
from compiled_llm.models.linears.quantizing import SCHEMES, Quantizing
from compiled_llm.models.linears.sharded import Sharding
from compiled_llm.models.registry import family_of, layers_of
from compiled_llm.models.sharding import Shard
from compiled_llm.models.stages import OwnLayers, balanced, check_stages, may_be_stage, own_weights
from compiled_llm.models.weights import linear_layers, tensors
from compiled_llm.ops.parallel.rank_group import RankGroup
from compiled_llm.step.kv_cache import allocate, short_windows
from compiled_llm.step.step import Feedback, step_function
from tests.drawn import marked
from tests.families import EVERY_CONFIG
from tests.models.ranks import CPU, config_of, random_weights
from tests.models.steps import BLOCK_SIZE, BLOCKS, SLOTS
from tests.models.test_sharding import steps_of

FLOAT, HALF = torch.float32, torch.bfloat16
STAGED = [name for name in EVERY_CONFIG if name != "gemma4"]  # which has embeddings that go into each layer
# A scaled embedding with norms behind blocks and windows, learned positions, experts, latents, states.
SAMPLE = ["llama", "gemma2", "gpt2", "mixtral", "deepseek-v3", "nemotron-h"]


def stage_of(config: ModelConfig, first: int, end: int) -> ModelConfig:
    return dataclasses.replace(config, own_layers=(first, end))


def weights_of(config: ModelConfig, kind: LinearKind, dtype: torch.dtype) -> Any:
    kind = kind if config.own_layers is None else OwnLayers.of(config, kind)
    return own_weights(random_weights(config, kind, dtype), config)


def logits_of(configs: list[ModelConfig], kind: LinearKind, dtype: torch.dtype, steps: list[StepInput]) -> list[Tensor]:
    """The logits of ``steps`` from stages that have these configs."""
    whole = configs[0].whole
    stages = []
    for config in configs:
        dtypes = [dtype] * len(layers_of(config))
        cache = allocate(config, dtypes, BLOCKS, BLOCK_SIZE, CPU, None, SLOTS)
        stages.append((step_function(config, 1 << 30), weights_of(config, kind, dtype), cache))
    found = []
    for step in steps:
        hidden = torch.zeros(32, whole.hidden_size, dtype=dtype)
        last_tokens, source = torch.zeros(8, dtype=torch.int64), torch.full_like(step.input_ids, -1)
        with torch.no_grad():
            for run, weights, cache in stages:
                result = run(weights, step, cache, Feedback(source, last_tokens, hidden))
                if weights.head is None:
                    hidden = torch.zeros_like(hidden)
                    hidden[: len(result)] = result
        found.append(result)
    return found


def check(config: ModelConfig, kind: LinearKind, dtype: torch.dtype) -> None:
    steps = steps_of(config)
    whole = logits_of([config], kind, dtype, steps)
    assert whole[0].std() > 0.2
    count = len(layers_of(config))
    for cut in range(1, count):
        stages = [stage_of(config, 0, cut), stage_of(config, cut, count)]
        for ours, theirs in zip(logits_of(stages, kind, dtype, steps), whole, strict=True):
            assert torch.equal(ours, theirs), f"cut before layer {cut}"


@pytest.mark.parametrize("name", marked(STAGED, SAMPLE))
def test_logits_have_the_bits_of_one_process(name: str) -> None:
    """With prompts, a chunk beside a decode, decodes; for each place of the cut."""
    check(config_of(name), Packed, FLOAT)


@pytest.mark.parametrize("name", marked(STAGED, ["gemma3"]))
def test_logits_have_the_bits_of_one_process_in_bfloat16(name: str) -> None:
    check(config_of(name), Packed, HALF)


@pytest.mark.parametrize("scheme", marked(SCHEMES, ["int8"]))
def test_quantised_layers(scheme: str) -> None:
    own = SCHEMES[scheme]
    changes = (("hidden_size", 256), ("intermediate_size", 512), ("head_dim", 64))
    check(config_of("llama", *changes), Quantizing(Packed, HALF, own, own, own), HALF)


def test_a_stage_reads_its_own_layers_alone() -> None:
    """Of all kinds: experts, latents, tables; the embedding with the first stage, the head with the last."""
    for name in ("deepseek-v3", "gpt-oss", "qwen3", "nemotron-h"):
        config = config_of(name)
        count = len(layers_of(config))
        stages = [stage_of(config, first, first + 1) for first in range(count)]
        whole, *own = (weights_of(each, Packed, FLOAT) for each in (config, *stages))
        assert [weights.embedding is None for weights in own] == [False, *[True] * (count - 1)]
        assert [weights.head is None for weights in own] == [*[True] * (count - 1), False]
        for weights, layer in zip(own, whole.layers, strict=True):
            sizes = [[(type(one), one.nbytes) for one in linear_layers(each)] for each in (weights.layers, layer)]
            assert sizes[0] == sizes[1]
        assert not any(tensor.is_meta for weights in own for tensor in tensors(weights))


def test_a_checkpoint_is_checked_as_a_whole() -> None:
    config = config_of("llama")
    kind = OwnLayers.of(stage_of(config, 0, 1), Dense)
    family = family_of(config)
    assert family.describe(config, linears=kind).stored == family.describe(config, linears=Dense).stored


def test_ranks_of_a_stage() -> None:
    config = config_of("mixtral")
    stage = stage_of(config, 1, 2)
    kind = Sharding(OwnLayers.of(stage, Packed), Shard(1, 2), RankGroup.alone())
    weights = own_weights(random_weights(config, kind), stage)
    assert not any(tensor.is_meta for tensor in tensors(weights))
    whole = weights_of(stage, Packed, FLOAT)
    assert sum(each.nbytes for each in linear_layers(weights)) < 0.6 * sum(e.nbytes for e in linear_layers(whole))


def test_stages_are_balanced_by_costs() -> None:
    config = dataclasses.replace(config_of("llama"), num_layers=8)
    assert balanced(config, [1.0] * 7 + [3.5], 2) == [(0, 5), (5, 8)]
    assert balanced(config, [3.0] + [1.0] * 7, 3) == [(0, 1), (1, 4), (4, 8)]
    assert balanced(config, [1.0] * 8, 9) is None


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    check_stages(config_of("llama"), 2)
    with pytest.raises(ValueError, match="pipeline_parallel_size must be at most 2 for LlamaForCausalLM with 2 layers"):
        check_stages(config_of("llama"), 3)
    with pytest.raises(
        ValueError, match="must be 1 for Gemma4ForCausalLM, which has embeddings that go into each layer"
    ):
        check_stages(config_of("gemma4"), 2)
    with pytest.raises(ValueError, match="at most 1 for Lfm2ForCausalLM"):  # which has attention in one layer
        check_stages(config_of("lfm2"), 2)


def test_layers_that_read_keys_of_another_stay_with_it() -> None:
    """Those of one stage count from its first."""
    config = dataclasses.replace(config_of("gemma4"), hidden_size_per_layer_input=0)
    specs = layers_of(config)
    source = next(spec.shares_cache_of for spec in specs if spec.shares_cache_of is not None)
    assert not may_be_stage(specs, source + 1, len(specs))
    own = layers_of(stage_of(config, source, len(specs)))
    assert next(spec.shares_cache_of for spec in own if spec.shares_cache_of is not None) == 0


def test_windows_are_those_of_the_whole_model() -> None:
    config = config_of("gemma2")
    windows = short_windows(config, 256)
    assert windows
    for first in range(len(layers_of(config))):
        assert short_windows(stage_of(config, first, first + 1), 256) == windows
