"""What StarCoder 2 alone has: one field for all biases, an epsilon under a name of its own, and what it refuses."""

from compiled_llm.models.config_file import parse_config
from compiled_llm.models.registry import family
from tests.families import CONFIGS

STARCODER2 = {"architectures": ["Starcoder2ForCausalLM"], **CONFIGS["starcoder2"][1]}


def test_epsilon_window_and_head_size_are_read() -> None:
    config = parse_config(STARCODER2)
    assert (config.rms_norm_eps, config.head_dim) == (0.05, 24)
    assert {layer.window for layer in family(config.architecture).layers(config)} == {6}
    whole = parse_config({**STARCODER2, "sliding_window": None})
    assert {layer.window for layer in family(config.architecture).layers(whole)} == {0}


def test_all_biases_go_by_one_field() -> None:
    biases = []
    for use_bias in (True, False):
        config = parse_config({**STARCODER2, "use_bias": use_bias})
        taken = family(config.architecture).describe(config).taken
        biases.append(
            {name.split(".", 3)[-1] for name in taken if name.startswith("model.layers.0.") and "bias" in name}
        )
    norms = {"input_layernorm.bias", "post_attention_layernorm.bias"}
    linears = {f"self_attn.{x}_proj.bias" for x in "qkvo"} | {"mlp.c_fc.bias", "mlp.c_proj.bias"}
    assert biases == [norms | linears, norms]
