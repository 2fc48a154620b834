"""Nemotron-H: blocks become layers, time steps have limits, and what would be computed otherwise is refused."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from compiled_llm.checkpoint import loader
from compiled_llm.models import nemotron_h
from compiled_llm.models.config_file import parse_config, read_config
from compiled_llm.models.layers.state import StateSpec
from compiled_llm.models.linears.packed import Packed
from compiled_llm.models.nemotron_h import NemotronHConfig
from tests.families import HYBRID_CONFIGS, strengthened
from tests.models.published_configs import published
from tests.models.steps import step_input, step_logits

SMALL = {"architectures": ["NemotronHForCausalLM"], **HYBRID_CONFIGS["nemotron-h-moe"][1]}


def parsed(**changes: Any) -> NemotronHConfig:
    config = parse_config({**SMALL, **changes})
    assert isinstance(config, NemotronHConfig)
    return config


@pytest.mark.parametrize(
    ("pattern", "blocks", "states"),
    [
        ("M-M*E", ((0, 1), (2, None), (3, 4)), [True, True, False]),
        ("*", ((0, None),), [False]),
        ("*-MM", ((0, 1), (2, None), (3, None)), [False, True, True]),
    ],
)
def test_a_layer_is_what_mixes_tokens_and_the_mlp_behind_it(pattern: str, blocks: Any, states: list[bool]) -> None:
    config = parsed(layers_block_type=None, hybrid_override_pattern=pattern)
    assert config.blocks == blocks
    assert [isinstance(spec, StateSpec) for spec in nemotron_h.layers(config)] == states


@pytest.mark.parametrize("pattern", ["-M*", "EM*", "M--*", "M-E*"])
def test_an_mlp_without_what_mixes_tokens_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="layers_block_type must be 'mamba' or 'attention', each of which may"):
        parsed(layers_block_type=None, hybrid_override_pattern=pattern)


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("mlp_hidden_act", "silu", "'relu2'"),
        ("mamba_hidden_act", "gelu", "'silu'"),
        ("norm_topk_prob", False, "True"),
        ("tie_word_embeddings", True, "false"),
        ("n_shared_experts", 2, "1"),
        ("residual_in_fp32", True, "False"),
        ("n_groups", 3, "mamba_num_heads must be a multiple of n_groups (or mamba_n_groups), given 14 and 3"),
        ("conv_kernel", 1, "from 2 to"),
        ("ssm_state_size", 0, "at least 1"),
        ("time_step_limit", [0.5, 0.1], "least and the largest"),
        ("time_step_limit", [0.5], "least and the largest"),
        ("time_step_limit", [math.nan, 1.0], "least and the largest"),
        ("num_experts_per_tok", 13, "from 1 to n_routed_experts=12"),
        ("n_group", 5, "must divide n_routed_experts=12"),
        ("moe_shared_expert_intermediate_size", 0, "at least 1"),
        ("moe_latent_size", 0, "at least 1"),
    ],
)
def test_refused_by_name(name: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=r"config\.json") as error:
        parsed(**{name: value})
    assert name in str(error.value)
    assert words in str(error.value)


def test_limits_as_transformers_writes_them(tmp_path: Path) -> None:
    transformers.NemotronHConfig(**copy.deepcopy(SMALL)).save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    assert read_config(tmp_path).time_step_limit == (0.0, math.inf)


def test_a_published_config_has_its_experts() -> None:
    config = parse_config(published("NVIDIA-Nemotron-3-Nano-30B-A3B"))
    assert isinstance(config, NemotronHConfig)
    assert (config.router.top_k, config.router.scale, config.mamba.groups) == (6, 2.5, 8)


def test_time_steps_within_limits(tmp_path: Path) -> None:
    """Of prompts, to which transformers' model applies them. Some steps are below, some above."""
    fields = {**copy.deepcopy(HYBRID_CONFIGS["nemotron-h"][1]), "time_step_limit": [0.6, 0.75]}
    config = transformers.NemotronHConfig(**fields)
    torch.manual_seed(0)
    model = strengthened(transformers.NemotronHForCausalLM(config).eval())
    model.save_pretrained(tmp_path)
    prompt = torch.randint(3, 300, (1, 40))
    with torch.no_grad():
        expected = model(prompt).logits[0]

    def logits(limits: list[float]) -> torch.Tensor:
        content = json.loads((tmp_path / "config.json").read_text()) | {"time_step_limit": limits}
        (tmp_path / "config.json").write_text(json.dumps(content))
        own = read_config(tmp_path)
        weights = loader.load_weights(tmp_path, own, torch.float32, torch.device("cpu"), Packed)
        step = step_input([(prompt[0].tolist(), 0)], [list(range(1, 11))])
        return step_logits(own, weights, step)

    torch.testing.assert_close(logits([0.6, 0.75]), expected, atol=1e-4, rtol=1e-4)
    for wrong in ([0.0, 10.0],):
        assert (logits(wrong) - expected).abs().max() > 1e-2, "the limit makes no difference"
