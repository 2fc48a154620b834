"""Models through transformers' modelling code against transformers: every position of a prompt longer than windows."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from compiled_llm.checkpoint import loader
from compiled_llm.models.config_file import read_config
from compiled_llm.models.fallback.config import TransformersConfig
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.packed import Packed
from compiled_llm.models.registry import ARCHITECTURES
from compiled_llm.models.weights import tensors
from tests.drawn import marked
from tests.families import strengthened
from tests.models.fallback.architectures import CONFIGS
from tests.models.steps import check_every_position, empty_cache, step_input, step_logits

NUM_TOKENS = 300
CPU = torch.device("cpu")
# The ordinary run has one with experts and padded values, one with windows and soft caps, and a tied one with biases.
ORDINARY = ("vaultgemma",)  # others are compared with our own files, and those with transformers


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def save(model_type: str, directory: Path, **how: Any) -> transformers.PreTrainedModel:
    """A model with random weights, saved with its config as transformers writes it; ``how`` is for its function."""
    fields: dict[str, Any] = dict(CONFIGS[model_type])
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[fields.pop("model_type")](**fields)
    model = strengthened(transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval())
    model.save_pretrained(directory, **how)
    return model


@pytest.mark.parametrize("model_type", marked(CONFIGS, ORDINARY))
def test_every_position_of_300_tokens(model_type: str, tmp_path: Path) -> None:
    theirs = save(model_type, tmp_path)
    prompt = torch.randint(3, theirs.config.vocab_size, (1, NUM_TOKENS))
    with torch.no_grad():
        expected = theirs(prompt).logits[0]
    config = read_config(tmp_path, "transformers")
    assert isinstance(config, TransformersConfig)
    weights = loader.load_weights(tmp_path, config, torch.float32, CPU, Packed)
    check_every_position(config, weights, prompt[0].tolist(), expected, (7, 130, 131), shared=200)


@pytest.mark.battery  # the ordinary run has tests/checkpoint/test_stored_layout.py
@pytest.mark.parametrize("model_type", CONFIGS)
def test_both_layouts_of_transformers_are_the_same_model(model_type: str, tmp_path: Path) -> None:
    """Parameters under the names of published checkpoints, and as transformers' modules have them."""
    found = []
    for is_published in (True, False):
        save(model_type, tmp_path / str(is_published), save_original_format=is_published)
        config = read_config(tmp_path / str(is_published), "transformers")
        found.append(tensors(loader.load_weights(tmp_path / str(is_published), config, torch.float32, CPU, Dense)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize(
    "model_type", marked(("llama", "qwen3", "seed_oss", "starcoder2", "deepseek_v3"), ("starcoder2", "deepseek_v3"))
)
def test_it_agrees_with_our_own_files(model_type: str, tmp_path: Path) -> None:
    save(model_type, tmp_path)
    tokens = torch.randint(3, 331, (60,)).tolist()  # more than the window
    found = []
    for model_impl in ("native", "transformers"):
        config = read_config(tmp_path, model_impl)
        weights = loader.load_weights(tmp_path, config, torch.float32, CPU, Dense)
        found.append(step_logits(config, weights, step_input([(tokens, 0)], [list(range(1, 16))])))
    assert ARCHITECTURES[config.architecture]
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)


@pytest.mark.battery  # the ordinary run has float32, and bfloat16 of the families with a file here
def test_bfloat16_is_as_close_as_transformers_is(tmp_path: Path) -> None:
    """To the float32 logits of the weights that bfloat16 rounded."""
    theirs = save("vaultgemma", tmp_path).to(torch.bfloat16)
    tokens = torch.randint(3, 331, (21,))
    config = read_config(tmp_path, "auto", "bfloat16")
    assert config.dtype == "bfloat16"
    weights = loader.load_weights(tmp_path, config, torch.bfloat16, CPU, Packed)
    step = step_input([(tokens.tolist(), 0)], [list(range(1, 7))])
    own = step_logits(config, weights, step, empty_cache(config, torch.bfloat16)).float()
    with torch.no_grad():
        rounded = theirs(tokens[None]).logits[0].float()
        exact = theirs.float()(tokens[None]).logits[0]
    error, allowed = (x.sub(exact).square().mean().sqrt() for x in (own, rounded))
    assert error <= 1.2 * allowed


def test_dummy_weights_have_the_shapes_of_a_checkpoint(tmp_path: Path) -> None:
    save("gpt_bigcode", tmp_path)
    config = read_config(tmp_path)
    dummy = loader.dummy_weights(config, torch.float32, CPU, 0, Dense)
    real = loader.load_weights(tmp_path, config, torch.float32, CPU, Dense)
    assert [tensor.shape for tensor in dummy.others] == [tensor.shape for tensor in real.others]
    assert dummy.layers[1][0].weight.shape == real.layers[1][0].weight.shape
    assert json.loads(config.fields)["model_type"] == "gpt_bigcode"


def test_what_transformers_keeps_in_float32_stays_there(tmp_path: Path) -> None:
    save("deepseek_v3", tmp_path)
    config = read_config(tmp_path, "transformers", "bfloat16")
    weights = loader.load_weights(tmp_path, config, torch.bfloat16, CPU, Dense)
    kept = [tensor for tensor in weights.others if tensor.dtype == torch.float32]
    assert [tensor.shape for tensor in kept] == [(8,)]  # what is added to the scores of the experts of the second layer
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert theirs.model.layers[1].mlp.gate.e_score_correction_bias.dtype == torch.float32
