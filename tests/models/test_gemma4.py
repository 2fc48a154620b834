"""What Gemma 4 alone has: two kinds of heads, caches that later layers share, embeddings of layers, its checkpoints."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from compiled_llm.checkpoint.loader import load_weights
from compiled_llm.models import gemma4
from compiled_llm.models.config_file import parse_config, read_config
from compiled_llm.models.weights import tensors
from compiled_llm.step.kv_cache import allocate, bytes_per_layer
from tests.families import CONFIGS, checkpoint, logits_of, strengthened
from tests.models.published_configs import GEMMA4
from tests.models.steps import step_input, step_logits

SHARED = {"architectures": ["Gemma4ForCausalLM"], **CONFIGS["gemma4"][1]}
MOE = {"architectures": ["Gemma4ForCausalLM"], **CONFIGS["gemma4-moe"][1]}
CPU = torch.device("cpu")


def config_of(content: dict[str, Any]) -> gemma4.Gemma4Config:
    found = parse_config(content)
    assert isinstance(found, gemma4.Gemma4Config)
    return found


@pytest.mark.parametrize("name", GEMMA4)
def test_layers_are_those_of_transformers(name: str) -> None:
    """Heads, windows and whose cache is read, of each layer of the published configs."""
    text = GEMMA4[name]["text_config"]
    theirs = transformers.AutoConfig.for_model(**copy.deepcopy(text))
    specs = gemma4.layers(config_of(GEMMA4[name]))
    assert len(specs) == theirs.num_hidden_layers
    modes = theirs.kv_sharing_modes
    stores = {theirs.layer_types[i]: i for i, mode in enumerate(modes) if mode == "store"}
    for i, spec in enumerate(specs):
        layer, kind = theirs.per_layer_config[i], theirs.layer_types[i]
        assert (spec.head_dim, spec.num_kv_heads) == (layer.head_dim, layer.num_key_value_heads)
        assert spec.num_heads == theirs.num_attention_heads
        assert spec.window == (theirs.sliding_window if kind == "sliding_attention" else 0)
        assert spec.shares_cache_of == (stores[kind] if modes[i] == "reuse" else None)


def test_layers_that_share_a_cache_take_no_memory_of_it() -> None:
    config = config_of(GEMMA4["gemma-4-E2B-it"])
    held = bytes_per_layer(config, [torch.bfloat16] * config.num_layers)
    assert held == ([2 * 256 * 2] * 4 + [2 * 512 * 2]) * 3 + [0] * 20
    codes = bytes_per_layer(config, [torch.int8] * config.num_layers)
    assert codes == ([2 * (256 + 4)] * 4 + [2 * (512 + 4)]) * 3 + [0] * 20

    small = config_of(SHARED)
    caches = allocate(small, [torch.float32] * small.num_layers, 3, 16, CPU)
    assert [cache.k.shape for cache in caches] == [(3, 2, 16, 24), (3, 2, 16, 48)] * 2
    assert caches[2].k is caches[0].k
    assert caches[3].v is caches[1].v


def test_the_last_layer_of_a_kind_is_the_one_that_is_shared() -> None:
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "full_attention", "sliding_attention"]
    config = config_of({**SHARED, "layer_types": [*kinds, "full_attention"], "num_hidden_layers": 6})
    assert [spec.shares_cache_of for spec in gemma4.layers(config)] == [None] * 4 + [1, 3]


def test_heads_of_layers_are_read_by_layer_too() -> None:
    """As transformers writes them today."""
    old = {name: value for name, value in MOE.items() if not name.startswith(("global_", "num_global_"))}
    new = {**old, "per_layer_config": {"1": {"head_dim": 48, "num_key_value_heads": 2}}}
    assert config_of(new) == config_of(MOE)
    with pytest.raises(ValueError, match="per_layer_config must give head_dim and num_key_value_heads alone"):
        parse_config({**old, "per_layer_config": {"1": {"head_dim": 48, "sliding_window": 3}}})
    more = {**old, "layer_types": ["full_attention"] * 2}
    with pytest.raises(ValueError, match="not homogeneous"):
        parse_config({**more, "per_layer_config": {"1": {"head_dim": 48}}})


def test_keys_and_values_of_layers_without_a_cache_may_be_stored(tmp_path: Path) -> None:
    stored = load_file(checkpoint("gemma4") / "model.safetensors")
    unused = {f"model.layers.{i}.self_attn.{x}.weight": torch.ones(3) for i in (2, 3) for x in ("k_proj", "k_norm")}
    assert not unused.keys() & stored.keys()
    save_file(stored | unused, tmp_path / "model.safetensors")
    config = config_of(SHARED)
    with pytest.warns(UserWarning, match=r"left.*keys and values of layers that share those of others \(4 tensors\)"):
        found = load_weights(tmp_path, config, torch.float32, CPU)
    alone = load_weights(checkpoint("gemma4"), config, torch.float32, CPU)
    assert all(torch.equal(a, b) for a, b in zip(tensors(found), tensors(alone), strict=True))

    save_file(stored | {"model.layers.1.self_attn.v_norm.weight": torch.ones(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"not part of Gemma4ForCausalLM: model.layers.1.self_attn.v_norm"):
        load_weights(tmp_path, config, torch.float32, CPU)


def test_the_table_of_layers_is_read_by_rows() -> None:
    config = config_of(GEMMA4["gemma-4-E2B-it"])
    weights = gemma4.FAMILY.describe(config, torch.bfloat16).weights
    assert weights.per_layer_embedding.nbytes == 262144 * 35 * 256 * 2  # as much as all else


VISION = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
AUDIO = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "subsampling_conv_channels": [8, 4]}


@pytest.mark.parametrize(
    ("name", "whole", "others"),
    [
        ("gemma4", "Gemma4", {"vision_config": VISION, "audio_config": AUDIO}),
        (
            "gemma4-moe",
            "Gemma4Unified",
            {"vision_config": {"mm_embed_dim": 112, "mm_posemb_size": 16}, "audio_config": {"audio_embed_dim": 16}},
        ),
    ],
)
def test_a_whole_model_as_transformers_saves_it(name: str, whole: str, others: dict[str, Any], tmp_path: Path) -> None:
    """With its encoders, whose tensors are left; Unified has no experts, whatever the config says."""
    text = copy.deepcopy(CONFIGS[name][1])
    config = getattr(transformers, f"{whole}Config")(text_config=text, tie_word_embeddings=False, **others)
    torch.manual_seed(0)
    model = strengthened(getattr(transformers, f"{whole}ForConditionalGeneration")(config).eval())
    model.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="the language model alone|fields that transformers ignores"):
        found = read_config(tmp_path)
    with pytest.warns(UserWarning, match=r"left.*: .*embed_audio \(1 tensors\), embed_vision"):
        weights = load_weights(tmp_path, found, torch.float32, CPU)
    ids = torch.arange(5, 26)
    own = step_logits(found, weights, step_input([(ids.tolist(), 0)], [list(range(1, 7))]))
    torch.testing.assert_close(own, logits_of(model, ids[None])[0], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({**SHARED, "global_head_dim": 47}, "global_head_dim must be even"),
        ({**SHARED, "global_head_dim": "48"}, "global_head_dim='48'"),
        ({**SHARED, "global_head_dim": 0}, "global_head_dim must be from 1"),
        ({**MOE, "num_global_key_value_heads": 3}, "num_attention_heads a multiple of num_global_key_value_heads"),
        ({**SHARED, "num_kv_shared_layers": 3}, "num_kv_shared_layers must leave a layer of each of layer_types"),
        ({**SHARED, "num_kv_shared_layers": 4}, "num_kv_shared_layers must leave"),
        ({**SHARED, "num_kv_shared_layers": -1}, "num_kv_shared_layers must leave"),
        ({**SHARED, "vocab_size_per_layer_input": 408}, "vocab_size_per_layer_input from vocab_size=409"),
        ({**SHARED, "hidden_size_per_layer_input": -1}, "hidden_size_per_layer_input must be from 0"),
        ({**SHARED, "use_bidirectional_attention": "all"}, "use_bidirectional_attention='all' is not supported"),
        ({**SHARED, "hidden_activation": "silu"}, "hidden_activation='silu' is not supported"),
        ({**SHARED, "final_logit_softcapping": 0.0}, "final_logit_softcapping must be a positive number"),
        ({**MOE, "num_experts": None}, "num_experts must be from 1"),
        ({**MOE, "top_k_experts": 8}, "top_k_experts must be from 1 to num_experts=7"),
        ({**MOE, "moe_intermediate_size": None}, "moe_intermediate_size must be from 1"),
        (
            {**MOE, "rope_parameters": {"full_attention": {"rope_type": "default"}}},
            "rope_parameters must be an object with",
        ),
        (
            {**MOE, "rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 1.5}}},
            "partial_rotary_factor must be a number above 0, at most 1",
        ),
    ],
)
def test_refused_by_name(content: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"config.json: .*{words}"):
        parse_config(content)
