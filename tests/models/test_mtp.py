"""Layers that guess the token after the next: against transformers' layers, and what checkpoints may hold of them."""

from pathlib import Path

import pytest
import torch

from compiled_llm.checkpoint import loader
from compiled_llm.models.config_file import read_config
from compiled_llm.models.layers.attention import for_queries
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.registry import family_of, mtp_of
from tests.families import transformers_model
from tests.models.steps import empty_cache, step_input
from tests.mtp_checkpoints import FAMILIES, mtp_checkpoint, mtp_tensors, reference, write_checkpoint

CPU = torch.device("cpu")


def loaded(directory: Path) -> tuple:
    config = read_config(directory)
    weights = loader.load_weights(directory, config, torch.float32, CPU, Dense, mtp=True)
    return config, weights, loader.load_mtp(directory, config, torch.float32, CPU, Dense, weights)


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_are_those_of_transformers_layers_through_several_passes(name: str) -> None:
    config, weights, guesses = loaded(mtp_checkpoint(name))
    mtp, model = mtp_of(config), transformers_model(name)
    prompt = torch.randint(3, config.vocab_size, (12,), generator=torch.Generator().manual_seed(2)).tolist()
    with torch.no_grad():
        features = model.model(torch.tensor([prompt[:-1]])).last_hidden_state[0]
    assert guesses.embedding is weights.embedding
    assert guesses.head is weights.head

    one = mtp.one_layer(config)
    cache, specs = empty_cache(one), family_of(one).layers(one)
    table = [[3, 1, 4, 2, 5]]

    def run(tokens: list[int], given: torch.Tensor, start: int) -> torch.Tensor:
        step = step_input([(tokens, start)], table)
        with torch.no_grad():
            return mtp.forward(guesses, step, given, cache, one, for_queries(specs, len(tokens)))

    # Rows of the prompt in two pieces, whose features are the model's; then rows that take what the last one gave.
    given, tokens = features, prompt[1:]
    rows = [run(tokens[:7], features[:7], 0), run(tokens[7:], features[7:], 7)]
    for start in range(11, 15):
        with torch.no_grad():
            token = int(mtp.head(guesses, rows[-1][-1:], one).argmax())
        given, tokens = torch.cat([given, rows[-1][-1:]]), [*tokens, token]
        rows.append(run([token], given[-1:], start))
    with torch.no_grad():
        embedded = model.get_input_embeddings()(torch.tensor(tokens))
        wanted = reference(name, embedded, given)
        torch.testing.assert_close(torch.cat(rows), wanted, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(mtp.head(guesses, wanted, one), model.lm_head(wanted), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3.5"])
def test_features_are_what_the_models_head_multiplies(name: str) -> None:
    config, weights, _ = loaded(mtp_checkpoint(name))
    hidden = torch.randn(3, config.hidden_size)
    features = mtp_of(config).features_of(weights, hidden, config)
    logits = family_of(config).head(weights, hidden, config)
    torch.testing.assert_close(features @ weights.head.weight[: config.vocab_size].T, logits, atol=1e-4, rtol=1e-4)


def test_without_it_the_layer_is_left_with_a_warning() -> None:
    config = read_config(mtp_checkpoint("qwen3.5"))
    with pytest.warns(UserWarning, match=r"the language model has no such parts: mtp \(\d+ tensors\)"):
        loader.load_weights(mtp_checkpoint("qwen3.5"), config, torch.float32, CPU, Dense)


def test_a_head_of_its_own_and_tensors_that_are_missing_or_unknown_are_refused(tmp_path: Path) -> None:
    tensors = mtp_tensors("glm4-moe")
    other = {"model.layers.3.shared_head.head.weight": torch.ones(307, 112)}
    with pytest.raises(ValueError, match=r"layers\.3\.shared_head\.head\.weight differs from lm_head\.weight"):
        loaded(write_checkpoint("glm4-moe", tmp_path / "head", tensors | other))
    cut = {name: value for name, value in tensors.items() if "enorm" not in name and ".experts.4." not in name}
    with pytest.raises(ValueError, match=r"missing: model\.layers\.3\.enorm\.weight.*\.experts\.4\."):
        loaded(write_checkpoint("glm4-moe", tmp_path / "cut", cut))
    more = {"mtp.embed_tokens.weight": torch.ones(501, 112)}
    with pytest.raises(ValueError, match=r"not part of Qwen3_5ForCausalLM: mtp\.embed_tokens\.weight"):
        loaded(write_checkpoint("qwen3.5", tmp_path / "more", mtp_tensors("qwen3.5") | more))
    with pytest.raises(ValueError, match=r"method 'mtp'.* has no tensors mtp\.\*: load the checkpoint as its makers"):
        loaded(write_checkpoint("qwen3-next", tmp_path / "none", {}))
