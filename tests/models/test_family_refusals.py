"""What each family refuses in a ``config.json`` for reasons of its own, by the field's name."""

import math
from typing import Any

import pytest

from compiled_llm.models.config_file import parse_config
from tests.families import EVERY_CONFIG

_MINISTRAL3 = EVERY_CONFIG["ministral3"][1]["rope_parameters"]
_PHI3 = EVERY_CONFIG["phi3"][1]["rope_parameters"]
_SMOLLM3 = "no_rope_layers must be 0 or 1 for each of num_hidden_layers=2 layers"
# Small config -> changes of it, and what the message says.
REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "gemma2": [
        ({"layer_types": ["full_attention"]}, "layer"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types"),
        ({"sliding_window": None}, "sliding_window must be at least 1, given None"),
        ({"sliding_window": 0}, "sliding_window must be at least 1, given 0"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a positive number, given 0"),
        ({"attn_logit_softcapping": -50.0}, "attn_logit_softcapping must be a positive number, given -50.0"),
        ({"final_logit_softcapping": 0.0}, "final_logit_softcapping must be a positive number, given 0.0"),
        ({"hidden_activation": "gelu"}, "hidden_activation='gelu' is not supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
    ],
    "gemma3": [
        ({"sliding_window_pattern": 0, "layer_types": None}, "ZeroDivisionError"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping must be null"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_parameters must be an object with full_attention and"),
        ({"rope_parameters": {"full_attention": "default"}}, "rope_parameters of full_attention must be an object"),
        ({"rope_scaling": {"rope_type": "default"}}, "rope_parameters and rope_scaling contradict each other"),
    ],
    "glm4": [({"partial_rotary_factor": x}, "partial_rotary_factor must") for x in (0, 1.5, "half", 0.2)],
    "gpt2": [
        ({"activation_function": "relu"}, "activation_function='relu' is not supported"),
        ({"add_cross_attention": True}, "add_cross_attention=True is not supported"),
        ({"n_inner": 0}, "n_inner must be an integer"),
    ],
    "gpt-neox": [
        ({"hidden_act": "relu"}, "hidden_act must be gelu"),
        ({"rotary_pct": 0.25, "num_attention_heads": 4}, "an even number of a head's elements"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
    "granite": [
        ({name: value}, f"{name} must be a positive number, at most 1e6, given {value}")
        for name in ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
        for value in (0.0, -1.0, math.inf, math.nan)
    ],
    "ministral3": [
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "rope_type 'yarn'"),
        ({"rope_parameters": {**_MINISTRAL3, "llama_4_scaling_beta": None}}, "a positive llama_4_scaling_beta"),
        (
            {"rope_parameters": {**_MINISTRAL3, "llama_4_scaling_beta": -0.1}},
            "llama_4_scaling_beta must be a positive number",
        ),
        ({"rope_parameters": {**_MINISTRAL3, "slope": 1.0}}, "slope"),
    ],
    "mistral": [({"sliding_window": x}, f"sliding_window must be at least 1, given {x}") for x in (0, -1)],
    "phi3": [
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type must be 'default' or 'longrope'"),
        ({"rope_parameters": {**_PHI3, "rope_type": ["su"]}}, "rope_type must be 'default' or 'longrope'"),
        ({"rope_parameters": {**_PHI3, "long_factor": [1.0]}}, "long_factor must have a number for each of the 6"),
        (
            {"rope_parameters": {**_PHI3, "original_max_position_embeddings": 64}},
            "original_max_position_embeddings is both 256 and 64",
        ),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor must be a number above 0, at most 1"),
        (
            {"partial_rotary_factor": 0.7},
            "short_factor must have a number for each of the 5 .*partial_rotary_factor=0.7",
        ),
    ],
    "qwen2": [
        (
            {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 2},
            "sliding_window must be at least 1, given None",
        ),
    ],
    "smollm3": [
        ({"no_rope_layers": [1, 0, 1], "num_hidden_layers": 6}, "each of num_hidden_layers=6 layers, given .1, 0, 1."),
        ({"no_rope_layers": [1, 2]}, _SMOLLM3),
        ({"no_rope_layers": []}, _SMOLLM3),
        ({"no_rope_layers": 1}, "no_rope_layers must be list.int. . None, .* given 1"),
        ({"no_rope_layers": [[1]] * 2}, "no_rope_layers must be list.int. . None"),
        ({"no_rope_layer_interval": 0}, "no_rope_layer_interval must be an integer of at least 1, given 0"),
        ({"no_rope_layer_interval": "4"}, "no_rope_layer_interval must be int, .* given '4'"),
        ({"no_rope_layer_interval": None}, "no_rope_layer_interval must be int, .* given None"),
    ],
    "starcoder2": [
        ({"hidden_act": "relu"}, "hidden_act must be gelu"),
        ({"sliding_window": 0}, "sliding_window must be at least 1"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types="),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        pytest.param(name, change, words, id=f"{name}-{change!r:.60}")
        for name, changes in REFUSED.items()
        for change, words in changes
    ],
)
def test_refused_by_name(name: str, change: dict[str, Any], words: str) -> None:
    class_name, fields = EVERY_CONFIG[name]
    with pytest.raises(ValueError, match=rf"config\.json: .*{words}"):
        parse_config({"architectures": [class_name], **fields, **change})
