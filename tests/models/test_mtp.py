"""Layers that guess the token after the next: against transformers' layers, and what checkpoints may hold of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm.checkpoint import loader
from compiled_llm.models.config_file import read_config
from compiled_llm.models.draft_heads.family import head_family, prefix_of, with_shared
from compiled_llm.models.draft_heads.mtp import mtp_config
from compiled_llm.models.layers.attention import for_queries
from compiled_llm.models.registry import family_of, layers_of
from tests.families import checkpoint, transformers_model
from tests.models.steps import empty_cache, step_input
from tests.mtp_checkpoints import FAMILIES, mtp_checkpoint, mtp_tensors, reference, write_checkpoint

CPU = torch.device("cpu")


def loaded(directory: Path) -> tuple[Any, Any, Any]:
    """The model's weights, the config of its layer that guesses, and the layer's weights."""
    config = read_config(directory)
    own = mtp_config(config)
    weights = loader.load_weights(directory, config, torch.float32, CPU, others=prefix_of(own))
    return weights, own, with_shared(loader.load_weights(directory, own, torch.float32, CPU), weights)


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_are_those_of_transformers_layers_through_several_passes(name: str) -> None:
    weights, config, own = loaded(mtp_checkpoint(name))
    family, model = head_family(config), transformers_model(name)
    assert own.embedding is weights.embedding
    assert own.head is weights.head
    prompt = torch.randint(3, config.vocab_size, (12,), generator=torch.Generator().manual_seed(2)).tolist()
    with torch.no_grad():
        given = model.model(torch.tensor([prompt[:-1]])).last_hidden_state[0]
    cache, specs, tokens = empty_cache(config), layers_of(config), prompt[1:]

    def run(tokens: list[int], features: Tensor, start: int) -> Tensor:
        step = step_input([(tokens, start)], [[3, 1, 4, 2, 5]])._replace(features=features)
        with torch.no_grad():
            return family.forward(own, step, cache, config, for_queries(specs, len(tokens)))

    # Rows of the prompt in two pieces, whose features are the model's; then rows that take what the last one gave.
    rows = [run(tokens[:7], given[:7], 0), run(tokens[7:], given[7:], 7)]
    for start in range(11, 15):
        with torch.no_grad():
            tokens.append(int(family.head(own, rows[-1][-1:], config).argmax()))
        given = torch.cat([given, family.feed_back(own, rows[-1][-1:], config)])
        rows.append(run(tokens[-1:], given[-1:], start))
    with torch.no_grad():
        wanted = reference(name, model.get_input_embeddings()(torch.tensor(tokens)), given)
        torch.testing.assert_close(torch.cat(rows), wanted, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(family.head(own, wanted, config), model.lm_head(wanted), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3.5"])
def test_features_are_what_the_models_head_multiplies(name: str) -> None:
    weights, config, own = loaded(mtp_checkpoint(name))
    hidden, model = torch.randn(3, config.hidden_size), read_config(checkpoint(name))
    features = head_family(config).features(own, hidden, config)
    logits = family_of(model).head(weights, hidden, model)
    torch.testing.assert_close(head_family(config).head(own, features, config), logits, atol=1e-4, rtol=1e-4)


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
