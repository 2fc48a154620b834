"""Published configs, scaled down, against transformers: every position of a prompt that is longer than windows.

The checkpoint has the ``config.json`` as it was published, but for its sizes.
"""

import json
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from compiled_llm.checkpoint import loader
from compiled_llm.checkpoint.quantization import published
from compiled_llm.models.architecture_name import language_model
from compiled_llm.models.config_file import parse_config, read_config
from compiled_llm.models.layers.state import StateSpec
from compiled_llm.models.linears.packed import Packed
from compiled_llm.models.registry import ARCHITECTURES, family, family_of
from compiled_llm.models.weights import tensors
from tests import mxfp4
from tests.drawn import marked
from tests.families import logits_of, strengthened
from tests.models.published_configs import PUBLISHED
from tests.models.scaled_down import scaled_down
from tests.models.steps import check_every_position

# Families of which fewer than three configs are published, and what there is.
FEWER = {
    "MinistralForCausalLM": 1,  # of layers with and without a window
    "SeedOssForCausalLM": 1,  # the base models have the config of Instruct
    "SmolLM3ForCausalLM": 1,  # 3B, whose base differs in nothing that is computed
    "Gemma4UnifiedForCausalLM": 1,  # 12B
    "Lfm2MoeForCausalLM": 1,  # of 24B-A2B no copy was at hand
    "GraniteMoeHybridForCausalLM": 2,  # likewise of those with experts
    "Qwen3NextForCausalLM": 2,  # Thinking has the config of Instruct
    "Qwen3_5MoeForCausalLM": 2,  # of 122B-A10B no copy was at hand
    "Mistral4ForCausalLM": 1,  # Small
}
# Billions of weights, as the models' cards say.
WEIGHTS = {
    "Qwen3-30B-A3B": 30.5,
    "Qwen3-235B-A22B": 235,
    "Qwen3-Coder-480B-A35B-Instruct": 480,
    "Mixtral-8x7B-v0.1": 46.7,
    "Mixtral-8x22B-v0.1": 140.6,
    "GLM-4.5": 353,  # without the layer that guesses tokens, 355 with it
    "GLM-4.5-Air": 107,
    "DeepSeek-V3": 671,
    "DeepSeek-V2-Lite": 15.7,
    "Mistral-Small-4": 119,
    "gpt-oss-20b": 20.9,
    "gpt-oss-120b": 116.8,
    "gemma-2-27b": 27.2,
    "Olmo-3-1125-32B": 32.2,
    "Qwen3-Next-80B-A3B-Instruct": 80,
    "Qwen3.5-397B-A17B": 397,
    "LFM2-8B-A1B": 8.34,
    "granite-4.0-h-350m": 0.34,
    "Nemotron-H-8B-Base-8K": 8.1,
    "NVIDIA-Nemotron-Nano-9B-v2": 8.89,
    "NVIDIA-Nemotron-3-Nano-30B-A3B": 31.6,
    "LFM2-1.2B": 1.17,
    "LFM2-350M": 0.354,
}
# Models whose published checkpoints have each layer's experts in one tensor, where transformers saves them one by one.
STACKED_EXPERTS = ("Qwen3_5MoeForCausalLM",)
NUM_TOKENS = 300


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """Other tests see to what is warned of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def test_three_configs_of_each_family_and_forty_in_all() -> None:
    counts = Counter(language_model(config)["architectures"][0] for config in PUBLISHED.values())
    assert counts.keys() == ARCHITECTURES.keys()
    assert {name: count for name, count in counts.items() if count < 3} == FEWER
    assert sum(counts.values()) >= 40


# One of every eighth architecture, as test_forward.py tries all of them in small; the others: battery.
ORDINARY = list({config["architectures"][0]: name for name, config in PUBLISHED.items()}.values())[::8]


# To describe many experts takes seconds: of these the battery sees to the full size.
LARGE = ("Next", "DeepSeek-V", "GLM-4.5", "-Small-4", "30B-A3B", "35B-A3B")
# The smallest of each architecture.
SMALLEST = {config["architectures"][0]: name for name, config in reversed(PUBLISHED.items())}.values()


@pytest.mark.parametrize(
    "name", marked(PUBLISHED, [name for name in SMALLEST if not any(word in name for word in LARGE)])
)
def test_dummy_weights_in_full_size(name: str) -> None:
    """They are described, without memory, in the layers that a CPU has; there are as many as a card says."""
    config = parse_config(PUBLISHED[name])
    description = family(config.architecture).describe(config, torch.bfloat16, Packed)
    assert all(tensor.is_meta for tensor in tensors(description.weights))
    if name in WEIGHTS:
        count = sum(math.prod(shape) for shape in description.taken.values())
        assert count / 1e9 == pytest.approx(WEIGHTS[name], rel=0.01)


@pytest.mark.parametrize("name", marked(PUBLISHED, ORDINARY))
def test_every_position_of_300_tokens(name: str, tmp_path: Path) -> None:
    prompt, expected = checkpoint_of(scaled_down(PUBLISHED[name]), tmp_path)
    config = read_config(tmp_path)
    weights = loader.load_weights(tmp_path, config, torch.float32, torch.device("cpu"), published(config, Packed))
    # What a recurrence gives may be near zero, where a norm follows: transformers' own float32 is as far from float64.
    recurrent = any(isinstance(spec, StateSpec) and spec.recurrent for spec in family_of(config).layers(config))
    within = 5e-4 if recurrent else 1e-4
    check_every_position(config, weights, prompt, expected, (7, 130, 131), shared=200, within=within)


def checkpoint_of(content: dict[str, Any], directory: Path) -> tuple[list[int], Tensor]:
    """Saves a model with random weights under ``content``; returns a prompt and its logits by transformers."""
    (directory / "config.json").write_text(json.dumps(content))
    torch.manual_seed(0)
    config = transformers.AutoConfig.from_pretrained(directory).get_text_config()
    if "quantization_config" in content:
        mxfp4.write_checkpoint(directory, content)
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        return prompt_and_logits(model)
    made = getattr(transformers, language_model(content)["architectures"][0])  # not all are known to AutoModel
    model = strengthened(made._from_config(config, dtype=torch.float32).eval())
    model.save_pretrained(directory, save_original_format=type(model).__name__ not in STACKED_EXPERTS)
    (directory / "config.json").write_text(json.dumps(content))
    if "text_config" in content:
        put_inside_another_model(directory / "model.safetensors", config)
    return prompt_and_logits(model)


def prompt_and_logits(model: transformers.PreTrainedModel) -> tuple[list[int], Tensor]:
    prompt = torch.randint(3, model.config.vocab_size, (1, NUM_TOKENS))
    return prompt[0].tolist(), logits_of(model, prompt)[0]


def put_inside_another_model(path: Path, config: transformers.PretrainedConfig) -> None:
    """Names the tensors as those of a model with more than text, and adds what such checkpoints hold besides."""
    tensors = {re.sub(r"^model\.", "model.language_model.", name): x for name, x in load_file(path).items()}
    for part in ("vision_tower", "vision_embedder", "audio_tower", "embed_vision", "embed_audio"):
        tensors[f"model.{part}.a_layer.weight"] = torch.ones(4, 4)
    num_shared = getattr(config, "num_kv_shared_layers", 0)
    for layer in range(config.num_hidden_layers - num_shared, config.num_hidden_layers):
        for unused in ("k_proj", "v_proj", "k_norm"):
            tensors[f"model.language_model.layers.{layer}.self_attn.{unused}.weight"] = torch.ones(4, 4)
    save_file(tensors, path)
