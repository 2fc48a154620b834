"""What cannot run through transformers' modelling code is refused by name, before a weight is read."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from compiled_llm.checkpoint import loader
from compiled_llm.checkpoint.stored_tensors import CheckpointError
from compiled_llm.models.config_file import read_config
from tests.models.fallback.architectures import CONFIGS
from tests.models.fallback.test_architectures import save

SMALL = {name: value for name, value in CONFIGS["olmo"].items() if name not in ("model_type", "clip_qkv")}


def read(directory: Path, architecture: str, model_type: str, model_impl: str = "auto", **changes: Any) -> Any:
    content = {**SMALL, **changes, "architectures": [architecture], "model_type": model_type}
    (directory / "config.json").write_text(json.dumps(content))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return read_config(directory, model_impl)


@pytest.mark.parametrize(
    ("architecture", "model_type", "changes", "reason"),
    [
        ("BloomForCausalLM", "bloom", {}, "attention of its own, which is not registered with AttentionInterface"),
        ("MptForCausalLM", "mpt", {}, "attention of its own, which is not registered with AttentionInterface"),
        ("FalconForCausalLM", "falcon", {}, "attention of its own, which is not registered with AttentionInterface"),
        ("GPTJForCausalLM", "gptj", {}, "attention of its own, which is not registered with AttentionInterface"),
        pytest.param(
            *("NemotronForCausalLM", "nemotron", {}),
            r"NemotronAttention, which does not hand on .*modeling_nemotron\.py",
            marks=pytest.mark.battery,
        ),
        (
            "DiffLlamaForCausalLM",
            "diffllama",
            {},
            r"attention that runs twice in layer 0 \(modeling_diffllama\.py, line",
        ),
        pytest.param(
            *("DogeForCausalLM", "doge", {}, r"code that computes with its mask \(dtype\) \(modeling_doge\.py"),
            marks=pytest.mark.battery,
        ),
        ("MambaForCausalLM", "mamba", {}, r"layer_types=\['linear_attention'\] are not supported"),
        ("Llama4ForCausalLM", "llama4_text", {}, r"layer_types=\[.*chunked_attention.*\] are not supported"),
        ("GptOssForCausalLM", "gpt_oss", {"model_impl": "transformers"}, "experts of another kind than gated MLPs"),
        ("BertLMHeadModel", "bert", {"is_decoder": True}, "a tied head with a bias"),
        (
            "ArceeForCausalLM",
            "arcee",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}},
            "rope_type='dynamic' is not supported through transformers' modelling code",
        ),
        ("OlmoForCausalLM", "olmo", {"quantization_config": {"quant_method": "gptq"}}, "quantization_config="),
        ("OlmoForCausalLM", "olmo", {"is_causal": False}, "is_causal=False is not supported"),
        (
            "OlmoForCausalLM",
            "phi",
            {},
            "neither this engine nor the installed transformers has a causal language model",
        ),
        ("OlmoModel", "olmo", {}, "neither this engine nor the installed transformers has a causal language model"),
        (
            "OlmoForCausalLM",
            "olmo",
            {"num_hidden_layers": 10**9},
            "num_hidden_layers must be an integer from 1 to 1024",
        ),
        ("OlmoForCausalLM", "olmo", {"vocab_size": -1}, "vocab_size must be an integer from 1"),
        ("OlmoForCausalLM", "olmo", {"num_attention_heads": None}, "num_attention_heads must be int, .* given None"),
        ("OlmoForCausalLM", "olmo", {"rope_theta": float("nan")}, "rope_theta must be a positive number"),
        ("OlmoForCausalLM", "olmo", {"rope_scaling": [1]}, "rope_scaling must be an object"),
        ("OlmoForCausalLM", "olmo", {"dtype": []}, "dtype must be one of"),
        (
            "OlmoForCausalLM",
            "olmo",
            {"hidden_act": "no-such"},
            "OlmoForCausalLM cannot run through .*KeyError.*hidden_act='no-such'",
        ),
    ],
)
def test_a_config_is_refused_by_name(
    architecture: str, model_type: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=reason):
        read(tmp_path, architecture, model_type, **changes)


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "modeling_mine.py").write_text("raise SystemExit('this ran')\n")
    own = {"auto_map": {"AutoModelForCausalLM": "modeling_mine.MyModel", "AutoConfig": "modeling_mine.MyConfig"}}
    with pytest.raises(ValueError, match="and the code that auto_map names is never run"):
        read(tmp_path, "MyModel", "mine", **own)
    config = {**SMALL, **own, "architectures": ["OlmoForCausalLM"], "model_type": "olmo"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.warns(
        UserWarning, match="OlmoForCausalLM runs through .*; the code that its auto_map names is not run"
    ):
        read_config(tmp_path)


def test_model_type_and_torchs_name_of_a_dtype_are_enough(tmp_path: Path) -> None:
    content = {**CONFIGS["olmo"], "torch_dtype": "torch.bfloat16", "rope_theta": "5e5"}
    (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.warns(UserWarning, match="OlmoForCausalLM runs through transformers' modelling code"):
        config = read_config(tmp_path)
    assert (config.architecture, config.dtype) == ("OlmoForCausalLM", "bfloat16")


def test_native_takes_models_with_a_file_alone(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="architecture 'OlmoForCausalLM' is not supported"):
        read(tmp_path, "OlmoForCausalLM", "olmo", "native")


def test_tensors_are_accounted_for(tmp_path: Path) -> None:
    """As those of a family with a file."""
    from safetensors.torch import load_file, save_file

    save("olmo", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = read_config(tmp_path)

    def refused(changed: dict[str, torch.Tensor], reason: str) -> None:
        save_file(changed, path)
        with pytest.raises(CheckpointError, match=reason):
            loader.load_weights(tmp_path, config, torch.float32, torch.device("cpu"))

    name = "model.layers.1.self_attn.q_proj.weight"
    refused({key: value for key, value in tensors.items() if key != name}, f"missing: {name}")
    refused({**tensors, name: tensors[name][:-1].contiguous()}, f"mismatched: {name} .* is .*, config.json implies")
    refused({**tensors, "model.more": tensors[name].clone()}, r"not part of OlmoForCausalLM: model\.more")
    refused({**tensors, name: tensors[name].mul(torch.nan)}, f"{name} holds NaN or infinite values")
    old = {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(old, path)
    loader.load_weights(tmp_path, config, torch.float32, torch.device("cpu"))
