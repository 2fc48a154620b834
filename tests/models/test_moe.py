"""Families with a mixture of experts: which layers have experts, and the ranges of their configs' fields."""

from typing import Any

import pytest

from compiled_llm.models import glm4_moe, gpt_oss
from compiled_llm.models.config_file import parse_config
from compiled_llm.models.glm4_moe import Glm4MoeConfig
from compiled_llm.models.layers.mlp import MlpWeights
from compiled_llm.models.layers.moe import MoeWeights
from compiled_llm.models.qwen3_moe import FAMILY as QWEN3_MOE
from compiled_llm.models.qwen3_moe import Qwen3MoeConfig
from tests.models.published_configs import MOE
from tests.models.scaled_down import scaled_down

SMALL = {name: scaled_down(config) for name, (config, _) in MOE.items()}
QWEN3, MIXTRAL, GLM, OSS = (
    SMALL[name] for name in ("Qwen3-30B-A3B", "Mixtral-8x7B-v0.1", "GLM-4.5", "gpt-oss-20b_in_bfloat16")
)
_SIZE = [(value, f"given {value}") for value in (0, -1, 10**9)]
_WRONG: list[Any] = [None, "many", 0.5, [1], {"a": 1}]
# Field -> values that are out of its range, and what the message says of each besides the field.
RANGES: list[tuple[dict[str, Any], str, list[tuple[Any, str]]]] = [
    (QWEN3, "num_experts", [*_SIZE, (7, "num_experts_per_tok must be from 1 to num_experts=7")]),
    (QWEN3, "num_experts_per_tok", [*_SIZE, (25, "from 1 to num_experts=24")]),
    (QWEN3, "moe_intermediate_size", _SIZE),
    (QWEN3, "decoder_sparse_step", _SIZE),
    (QWEN3, "hidden_act", [("gelu", "'silu'")]),
    (MIXTRAL, "num_local_experts", [*_SIZE, (1, "num_experts_per_tok must be from 1 to num_local_experts=1")]),
    (MIXTRAL, "num_experts_per_tok", [*_SIZE, (25, "from 1 to num_local_experts=24")]),
    (MIXTRAL, "sliding_window", [(0, "at least 1"), (-5, "at least 1"), (2**31, "at most 2147483647")]),
    (GLM, "n_routed_experts", [*_SIZE, (7, "num_experts_per_tok must be from 1 to n_routed_experts=7")]),
    (GLM, "num_experts_per_tok", [*_SIZE, (25, "from 1 to n_routed_experts=24")]),
    (GLM, "n_shared_experts", _SIZE),
    (GLM, "moe_intermediate_size", _SIZE),
    (GLM, "n_group", [*_SIZE, (5, "must divide n_routed_experts=24")]),
    (GLM, "topk_group", [(0, "given 1 and 0"), (2, "given 1 and 2"), (-1, "given 1 and -1")]),
    (GLM, "routed_scaling_factor", [(x, "positive number") for x in (0.0, -2.5, float("nan"), float("inf"))]),
    (GLM, "norm_topk_prob", [(False, "True")]),
    (OSS, "num_local_experts", [*_SIZE, (3, "num_experts_per_tok must be from 1 to num_local_experts=3")]),
    (OSS, "num_experts_per_tok", [*_SIZE, (25, "from 1 to num_local_experts=24")]),
    (OSS, "swiglu_limit", [(x, "positive number") for x in (0.0, -7.0, float("nan"), float("inf"))]),
    (OSS, "sliding_window", [(0, "at least 1"), (None, "at least 1"), (2**63, "at most 2147483647")]),
    (OSS, "layer_types", [(["full_attention"], "num_hidden_layers"), (["chunked_attention"] * 6, "6 layers")]),
]
CASES = [(config, name, value, words) for config, name, values in RANGES for value, words in values]
CASES += [
    (config, name, value, "")
    for config, name, _ in RANGES
    for value in _WRONG
    if (name, value) not in (("sliding_window", None), ("routed_scaling_factor", 0.5), ("swiglu_limit", 0.5))
    and name not in ("layer_types", "hidden_act")
]


@pytest.mark.parametrize(
    ("config", "name", "value", "words"), CASES, ids=[f"{c['model_type']}-{n}-{v!r:.20}" for c, n, v, _ in CASES]
)
def test_out_of_range_is_refused_by_name(config: dict[str, Any], name: str, value: Any, words: str) -> None:
    with pytest.raises(ValueError, match=r"config\.json") as error:
        parse_config({**config, name: value})
    assert name in str(error.value)
    assert words in str(error.value)


def test_groups_hold_the_experts_of_a_token() -> None:
    """Of 12 groups of 2, three hold six experts, and a token uses eight."""
    with pytest.raises(ValueError, match=r"n_group must divide .* num_experts_per_tok=8 .* given 12 and 3"):
        parse_config({**GLM, "n_group": 12, "topk_group": 3})
    config = parse_config({**GLM, "n_group": 12, "topk_group": 4})
    assert isinstance(config, Glm4MoeConfig)
    assert (config.router.groups, config.router.top_groups) == (12, 4)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, [True] * 6),
        ({"decoder_sparse_step": 2}, [False, True] * 3),
        ({"mlp_only_layers": [0, 5]}, [False, True, True, True, True, False]),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, [False] * 5 + [True]),
    ],
)
def test_layers_of_qwen3_with_experts(change: dict[str, Any], expected: list[bool]) -> None:
    config = parse_config({**QWEN3, **change})
    assert isinstance(config, Qwen3MoeConfig)
    assert [isinstance(layer.mlp, MoeWeights) for layer in QWEN3_MOE.describe(config).weights.layers] == expected


@pytest.mark.parametrize("count", [0, 1, 3, 7])
def test_first_layers_of_glm_are_dense(count: int) -> None:
    config = parse_config({**GLM, "first_k_dense_replace": count})
    assert isinstance(config, Glm4MoeConfig)
    kinds = [type(layer.mlp) for layer in glm4_moe.FAMILY.describe(config).weights.layers]
    assert kinds == [MlpWeights if i < count else MoeWeights for i in range(6)]


def test_windows_of_gpt_oss_alternate() -> None:
    config = parse_config(OSS)
    assert isinstance(config, gpt_oss.GptOssConfig)
    assert [spec.window for spec in gpt_oss.layers(config)] == [40, 0] * 3


@pytest.mark.parametrize(("name", "dtype"), [("gpt-oss-20b", "bfloat16"), ("Mixtral-8x7B-v0.1", "bfloat16")])
def test_dtype(name: str, dtype: str) -> None:
    """gpt-oss names none: MXFP4's values are exact in bfloat16."""
    assert parse_config(MOE[name][0]).dtype == dtype
