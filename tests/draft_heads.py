"""Heads with random weights, for tests: an EAGLE-3 head for a small model, in either published layout."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

HEAD_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 112,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 307,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
    "rope_theta": 10000.0,
    "torch_dtype": "float32",
}


def eagle3_tensors(seed: int = 0, *, draft_vocab: int = 307, taps: int = 3, target_size: int = 112) -> dict[str, Tensor]:
    """Tensors of a head by the names of the authors' layout."""
    generator = torch.Generator().manual_seed(seed)
    c = HEAD_CONFIG
    d, heads, kv_heads, h = (c[x] for x in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"))

    def matrix(rows: int, columns: int) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * columns**-0.5 * 2

    def norm(size: int) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    tensors = {
        "fc.weight": matrix(d, taps * target_size),
        "midlayer.self_attn.q_proj.weight": matrix(heads * h, 2 * d),
        "midlayer.self_attn.k_proj.weight": matrix(kv_heads * h, 2 * d),
        "midlayer.self_attn.v_proj.weight": matrix(kv_heads * h, 2 * d),
        "midlayer.self_attn.o_proj.weight": matrix(d, heads * h),
        "midlayer.mlp.gate_proj.weight": matrix(c["intermediate_size"], d),
        "midlayer.mlp.up_proj.weight": matrix(c["intermediate_size"], d),
        "midlayer.mlp.down_proj.weight": matrix(d, c["intermediate_size"]),
        "norm.weight": norm(d),
        "lm_head.weight": 2 * matrix(draft_vocab, d),
    }
    tensors |= {f"midlayer.{x}.weight": norm(d) for x in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    if draft_vocab < c["vocab_size"]:
        ids = torch.randperm(c["vocab_size"], generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = ids - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(c["vocab_size"], dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def write_head(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return str(directory)


def write_eagle3(directory: Path, target: Path, layer_ids: tuple[int, ...] = (0, 1, 2), seed: int = 0) -> str:
    """A head of random weights for the checkpoint ``target``, whose head it takes: so it is right now and then."""
    target_tensors = load_file(target / "model.safetensors")
    tensors = eagle3_tensors(seed) | {"lm_head.weight": target_tensors["lm_head.weight"].float()}
    tensors["norm.weight"] = target_tensors["model.norm.weight"].float()
    config = {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 307, **HEAD_CONFIG}
    config["eagle_aux_hidden_state_layer_ids"] = list(layer_ids)
    return write_head(directory, config, tensors)
