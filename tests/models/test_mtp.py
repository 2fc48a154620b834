"""Layers that guess the token after the next: against transformers' layers, and what checkpoints may hold of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm.checkpoint import loader, quantization
from compiled_llm.checkpoint.mtp import as_stored
from compiled_llm.models.config_file import read_config
from compiled_llm.models.draft_heads.family import head_family, prefix_of
from compiled_llm.models.draft_heads.mtp import mtp_config
from compiled_llm.models.inputs import KVCache
from compiled_llm.models.layers.attention import for_queries
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.packed import Packed
from compiled_llm.models.linears.protocol import LinearKind
from compiled_llm.models.linears.quantized import Quantized
from compiled_llm.models.registry import family_of, layers_of
from tests.families import checkpoint, transformers_model
from tests.models.steps import empty_cache, step_input
from tests.mtp_checkpoints import FAMILIES, mtp_checkpoint, mtp_tensors, reference, write_checkpoint

CPU = torch.device("cpu")


def loaded(directory: Path, kind: LinearKind = Dense) -> tuple[Any, Any, Any]:
    """The model's weights, the config of its layer that guesses, and the layer's weights."""
    config = read_config(directory)
    own = mtp_config(config)
    kind = quantization.published(config, kind)
    weights = loader.load_weights(directory, config, torch.float32, CPU, kind, others=prefix_of(own))
    layer = loader.load_weights(directory, own, torch.float32, CPU, as_stored(kind, directory))
    return weights, own, head_family(own).share(layer, weights)


def rows_of(config: Any, own: Any, cache: KVCache, tokens: list[int], features: Tensor, start: int = 0) -> Tensor:
    """What the layer gives of tokens from position ``start + 1`` on and the features before them."""
    step = step_input([(tokens, start)], [[3, 1, 4, 2, 5]])._replace(features=features)
    specs = for_queries(layers_of(config), len(tokens))
    with torch.no_grad():
        return head_family(config).forward(own, step, cache, config, specs)


ORDINARY = ("deepseek-v3", "qwen3-next")


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in ORDINARY else pytest.mark.battery) for x in FAMILIES]
)
def test_rows_are_those_of_transformers_layers_through_several_passes(name: str) -> None:
    weights, config, own = loaded(mtp_checkpoint(name))
    family, model = head_family(config), transformers_model(name)
    assert own.embedding is weights.embedding
    assert own.head is weights.head
    prompt = torch.randint(3, config.vocab_size, (12,), generator=torch.Generator().manual_seed(2)).tolist()
    with torch.no_grad():
        given = model.model(torch.tensor([prompt[:-1]])).last_hidden_state[0]
    cache, tokens = empty_cache(config), prompt[1:]

    # Rows of the prompt in two pieces, whose features are the model's; then rows that take what the last one gave.
    rows = [rows_of(config, own, cache, tokens[:7], given[:7]), rows_of(config, own, cache, tokens[7:], given[7:], 7)]
    for start in range(11, 15):
        with torch.no_grad():
            tokens.append(int(family.head(own, rows[-1][-1:], config).argmax()))
        given = torch.cat([given, family.feed_back(own, rows[-1][-1:], config)])
        rows.append(rows_of(config, own, cache, tokens[-1:], given[-1:], start))
    with torch.no_grad():
        wanted = reference(name, model.get_input_embeddings()(torch.tensor(tokens)), given)
        torch.testing.assert_close(torch.cat(rows), wanted, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(family.head(own, wanted, config), model.lm_head(wanted), atol=1e-4, rtol=1e-4)
        # What the model's head multiplies is the feature.
        whole, hidden = read_config(checkpoint(name)), torch.randn(3, config.hidden_size)
        logits = family.head(own, family.features(own, hidden, config), config)
        torch.testing.assert_close(logits, family_of(whole).head(weights, hidden, whole), atol=1e-4, rtol=1e-4)


def test_a_quantised_layer_is_read_as_its_files_keep_it(tmp_path: Path) -> None:
    """FP8 in blocks, as DeepSeek publishes it: the projection and the router are plain, and nothing says so."""
    quantised = {name: value for name, value in mtp_tensors("deepseek-v3").items() if value.ndim == 2}
    plain = {}
    for name in [name for name in quantised if not name.endswith(("eh_proj.weight", ".gate.weight"))]:
        blocks = torch.nn.functional.pad(quantised[name], (0, -quantised[name].shape[1] % 128)).split(128, 1)
        blocks = [torch.nn.functional.pad(block, (0, 0, 0, -len(block) % 128)).split(128) for block in blocks]
        scales = torch.stack([torch.stack([part.abs().max() / 448 for part in column]) for column in blocks], 1)
        spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        spread = spread[: quantised[name].shape[0], : quantised[name].shape[1]]
        quantised[name] = (quantised[name] / spread).to(torch.float8_e4m3fn)
        quantised[f"{name}_scale_inv"] = scales
        plain[name] = quantised[name].float() * spread
    fields = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    fields["modules_to_not_convert"] = [f"model.layers.{number}" for number in range(2)]
    tensors = mtp_tensors("deepseek-v3")
    held = write_checkpoint("deepseek-v3", tmp_path / "fp8", tensors | quantised, quantization_config=fields)
    _, config, own = loaded(held, Packed)
    _, _, expected = loaded(write_checkpoint("deepseek-v3", tmp_path / "plain", tensors | plain))
    assert isinstance(own.layers[0].attention.o, Quantized)
    assert isinstance(own.projection, Packed)
    tokens, features = list(range(5, 17)), torch.randn(12, config.hidden_size)
    found, wanted = (rows_of(config, layer, empty_cache(config), tokens, features) for layer in (own, expected))
    torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)


def test_without_it_the_layer_is_left_with_a_warning() -> None:
    config = read_config(mtp_checkpoint("qwen3.5"))
    with pytest.warns(UserWarning, match=r"the language model has no such parts: mtp \(\d+ tensors\)"):
        loader.load_weights(mtp_checkpoint("qwen3.5"), config, torch.float32, CPU)


def test_a_head_of_its_own_and_tensors_that_are_missing_or_unknown_are_refused(tmp_path: Path) -> None:
    tensors = mtp_tensors("glm4-moe")
    other = {"model.layers.3.shared_head.head.weight": torch.ones(307, 112)}
    with pytest.raises(ValueError, match=r"layers\.3\.shared_head\.head\.weight differs from lm_head\.weight"):
        loaded(write_checkpoint("glm4-moe", tmp_path / "head", tensors | other))
    cut = {name: value for name, value in tensors.items() if "enorm" not in name and ".experts.4." not in name}
    with pytest.raises(ValueError, match=r"missing: model\.layers\.3\.enorm\.weight.*\.experts\.4\."):
        loaded(write_checkpoint("glm4-moe", tmp_path / "cut", cut))
    more = {"mtp.embed_tokens.weight": torch.ones(501, 112)}
    with pytest.raises(ValueError, match=r"not part of Qwen3_5ForCausalLM\.mtp: mtp\.embed_tokens\.weight"):
        loaded(write_checkpoint("qwen3.5", tmp_path / "more", mtp_tensors("qwen3.5") | more))
    with pytest.raises(ValueError, match=r"has no tensors mtp\.\* to draft with: load the checkpoint as its makers"):
        loaded(write_checkpoint("qwen3-next", tmp_path / "none", {}))
