"""What GPT-2 and GPT-NeoX alone have: names of their own in ``config.json``, and buffers in old checkpoints."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from compiled_llm.checkpoint.loader import load_weights
from compiled_llm.models.config_file import parse_config, read_config
from compiled_llm.models.registry import family
from compiled_llm.models.weights import tensors
from tests.families import CONFIGS, checkpoint

GPT2 = {"architectures": ["GPT2LMHeadModel"], **CONFIGS["gpt2"][1]}
NEOX = {"architectures": ["GPTNeoXForCausalLM"], **CONFIGS["gpt-neox"][1]}
CPU = torch.device("cpu")


def test_an_mlp_is_four_times_as_wide_where_nothing_is_said() -> None:
    assert parse_config({**GPT2, "n_inner": None}).intermediate_size == 4 * 112


def test_scales_follow_from_the_layer() -> None:
    scales = [layer.scale for layer in family("GPT2LMHeadModel").layers(parse_config(GPT2))]
    assert scales == [0.25, 0.125]
    unscaled = {**GPT2, "scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": False}
    assert {layer.scale for layer in family("GPT2LMHeadModel").layers(parse_config(unscaled))} == {1.0}


def test_base_and_share_of_a_rotary_embedding_have_names_of_their_own() -> None:
    (rope,) = parse_config(NEOX).ropes
    assert (rope.theta, rope.partial) == (100, 0.5)
    plain = {name: value for name, value in NEOX.items() if not name.startswith("rotary")}
    (rope,) = parse_config({**plain, "num_attention_heads": 14, "rope_theta": 7.0}).ropes  # which it does not look at
    assert (rope.theta, rope.partial) == (10000, 0.25)


@pytest.mark.parametrize(
    ("name", "body", "buffers"),
    [
        ("gpt2", "transformer.", ["h.0.attn.bias", "h.1.attn.masked_bias"]),
        ("gpt-neox", "gpt_neox.", ["layers.0.attention.bias", "layers.1.attention.rotary_emb.inv_freq"]),
    ],
)
def test_an_old_checkpoints_buffers_and_bare_names_are_taken(
    name: str, body: str, buffers: list[str], tmp_path: Path
) -> None:
    stored = load_file(checkpoint(name) / "model.safetensors")
    bare = {key.removeprefix(body): tensor for key, tensor in stored.items()}
    bare |= {key: torch.ones(1, 1, 4, 4, dtype=torch.uint8) for key in buffers}
    save_file(bare, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((checkpoint(name) / "config.json").read_bytes())
    config = read_config(tmp_path)
    old, new = (load_weights(directory, config, torch.float32, CPU) for directory in (tmp_path, checkpoint(name)))
    assert all(torch.equal(a, b) for a, b in zip(tensors(old), tensors(new), strict=True))
