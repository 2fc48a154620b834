"""A small gpt-oss directory as they are published: experts in MXFP4, in several files with an index."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from compiled_llm.checkpoint.quantization import published
from compiled_llm.models.config_file import parse_config
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.registry import family

QUANTIZATION: dict[str, Any] = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}
CONFIG: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 307, "hidden_size": 96,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_local_experts": 5, "num_experts_per_tok": 2, "max_position_embeddings": 256,
    "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"], "swiglu_limit": 7.0,
    "dtype": "bfloat16", "eos_token_id": 2, "pad_token_id": 0, "quantization_config": QUANTIZATION,
}  # fmt: skip


def tensors_of(config: Mapping[str, Any]) -> dict[str, Tensor]:
    """Seeded random tensors of a checkpoint of ``config``, those in plain form in bfloat16."""
    parsed = parse_config(dict(config))
    generator = torch.Generator().manual_seed(0)
    found: dict[str, Tensor] = {}
    linears = published(parsed, Dense)
    for name, stored in family(parsed.architecture).describe(parsed, linears=linears).stored.items():
        shape = stored.shapes[0]
        if stored.dtypes == (torch.uint8,):
            low, high = (120, 127) if name.endswith("_scales") else (0, 256)
            found[name] = torch.randint(low, high, shape, generator=generator, dtype=torch.uint8)
        else:
            found[name] = torch.randn(shape, generator=generator).mul_(0.2).bfloat16()
    return found


def write(directory: Path, tensors: Mapping[str, Tensor], shards: int = 3) -> None:
    """``tensors`` in turn in so many files, so the blocks of a matrix and their scales lie in different ones."""
    names = [f"model-{i:05}-of-{shards:05}.safetensors" for i in range(1, shards + 1)]
    placed = {name: names[i % shards] for i, name in enumerate(sorted(tensors))}
    for shard in names:
        save_file({name: tensor for name, tensor in tensors.items() if placed[name] == shard}, directory / shard)
    index = {"metadata": {"total_size": 1}, "weight_map": placed}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def write_checkpoint(directory: Path, config: Mapping[str, Any] = CONFIG) -> None:
    """The whole directory, without a tokenizer."""
    (directory / "config.json").write_text(json.dumps(config))
    write(directory, tensors_of(config))
