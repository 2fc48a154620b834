"""What Gemma 3 alone has: two rotary embeddings, named in two ways, and a pattern of windows given as a number."""

from compiled_llm.models.config_file import parse_config
from tests.families import CONFIGS

GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], **CONFIGS["gemma3"][1]}
PLAIN = {name: value for name, value in GEMMA3.items() if name not in ("rope_parameters", "layer_types")}


def test_layer_types_follow_from_the_pattern_of_older_checkpoints() -> None:
    kinds = parse_config({**PLAIN, "sliding_window_pattern": 2}).layer_types
    assert kinds == ("sliding_attention", "full_attention", "sliding_attention")
    assert parse_config(PLAIN).layer_types == ("sliding_attention",) * 3  # one in six


def test_rotary_embeddings_of_older_and_newer_checkpoints() -> None:
    full, sliding = parse_config({**PLAIN, "rope_theta": 5e5, "rope_local_base_freq": 2e4}).ropes
    assert (full.theta, sliding.theta) == (5e5, 2e4)
    assert [rope.theta for rope in parse_config(PLAIN).ropes] == [1e6, 1e4]
    scaling = GEMMA3["rope_parameters"]["full_attention"]
    full, sliding = parse_config({**PLAIN, "rope_scaling": scaling}).ropes
    assert full.scaling is not None
    assert sliding.scaling is None
    full, sliding = parse_config(GEMMA3).ropes
    assert (full.theta, sliding.theta) == (2000, 50)
