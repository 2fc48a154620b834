"""What llama.cpp's converter makes of the tensors of a model of the hub, beside other names."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

_PERMUTED = ("llama", "granite", "granitehybrid", "mistral3", "nemotron_h", "nemotron_h_moe", "smollm3")
_WITH_ONE = ("gemma2", "gemma3", "qwen3next", "qwen35", "qwen35moe")


def cut(architecture: str, config: Any, key: str, value: Tensor, is_old: bool) -> Mapping[str, Tensor]:
    """``key`` of a state dict of transformers -> tensors by names that the hub or newer checkpoints have.

    Args:
        is_old: the file is of before latent attention had a tensor for keys and one for values.
    """
    if ".experts." in key:
        return _experts(architecture, key, value)
    if "shared_mlp.input_linear" in key:
        own = "mlp.shared_expert" if config.num_local_experts else "mlp"
        gate, up = value.chunk(2)
        return {
            key.replace("shared_mlp.input_linear", f"{own}.{x}_proj"): rows for x, rows in (("gate", gate), ("up", up))
        }
    if "shared_mlp.output_linear" in key:
        own = "mlp.shared_expert" if config.num_local_experts else "mlp"
        return {key.replace("shared_mlp.output_linear", f"{own}.down_proj"): value}
    if "kv_b_proj" in key and not is_old:
        by_head = value.unflatten(0, (config.num_attention_heads, -1))
        k, v = by_head.split([config.qk_nope_head_dim, config.v_head_dim], 1)
        return {key.replace("kv_b", "k_b"): k.transpose(1, 2).contiguous(), key.replace("kv_b", "v_b"): v.contiguous()}
    if "in_proj_qkvz" in key:
        dk, heads = config.linear_key_head_dim, config.linear_num_key_heads
        values = config.linear_value_head_dim * config.linear_num_value_heads // heads
        q, k, v, z = value.unflatten(0, (heads, -1)).split([dk, dk, values, values], 1)
        together = torch.cat([x.flatten(0, 1) for x in (q, k, v)])
        return {key.replace("qkvz", "qkv"): together, key.replace("qkvz", "z"): z.flatten(0, 1)}
    return {key: value}


def _experts(architecture: str, key: str, value: Tensor) -> Mapping[str, Tensor]:
    kind = "bias" if key.endswith("_bias") else "weight"
    key = key.removesuffix("_bias").replace("block_sparse_moe", "mlp") + f".{kind}"
    if architecture == "gpt-oss" and kind == "weight":
        value = value.transpose(1, 2).contiguous()
    if "gate_up_proj" not in key:
        return {key: value}
    halves = (value[:, ::2], value[:, 1::2]) if architecture == "gpt-oss" else value.chunk(2, 1)
    return {key.replace("gate_up", x): half.contiguous() for x, half in zip(("gate", "up"), halves, strict=True)}


def changed(architecture: str, config: Any, key: str, value: Tensor) -> Tensor:
    """The elements that a file has of ``value``, which is ``key`` of ``cut``."""
    if architecture in _PERMUTED and (which := re.search(r"\.([qk])_proj\.", key)):
        heads = config.num_attention_heads if which[1] == "q" else config.num_key_value_heads
        return value.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(value.shape)
    if architecture in _WITH_ONE and key.endswith("norm.weight") and "linear_attn" not in key:
        return value + 1
    if architecture == "gpt2" and re.search(r"c_(attn|proj|fc)\.weight", key):
        return value.t().contiguous()
    value = -value.exp() if key.endswith("A_log") else value
    if re.search(r"(mamba|mixer)\.(A_log|D)$", key):
        return value[:, None]
    if re.search(r"(mamba|mixer)\.norm\.", key):
        return value.view(2, -1)
    value = value.squeeze(1) if re.search(r"(conv\.conv|conv1d)\.weight", key) else value
    if architecture.startswith("qwen35") and "linear_attn" in key:
        return _tiled(config, key.rpartition("linear_attn.")[2], value)
    return value


def _tiled(config: Any, what: str, value: Tensor) -> Tensor:
    """Value heads in another order: the first of each key head, then the second of each."""
    keys = config.linear_num_key_heads

    def tiled(rows: Tensor, size: int) -> Tensor:
        return rows.unflatten(0, (keys, -1, size)).transpose(0, 1).flatten(0, 2)

    before, size = 2 * keys * config.linear_key_head_dim, config.linear_value_head_dim
    if what in ("in_proj_qkv.weight", "conv1d.weight"):
        return torch.cat([value[:before], tiled(value[before:], size)])
    if what == "out_proj.weight":
        return tiled(value.t(), size).t().contiguous()
    return value if what == "norm.weight" else tiled(value, size if what == "in_proj_z.weight" else 1)


def fused(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """As newer converters may write them: queries, keys and values in one tensor, and the gates and ups of experts."""
    found = dict(tensors)
    for name in tensors:
        layer, first, what = name.rpartition(".attn_q.")
        if first:
            found[f"{layer}.attn_qkv.{what}"] = torch.cat([found.pop(f"{layer}.attn_{x}.{what}") for x in "qkv"])
        layer, first, what = name.rpartition(".ffn_gate_exps.")
        if first:
            halves = [found.pop(f"{layer}.ffn_{x}_exps.{what}") for x in ("gate", "up")]
            found[f"{layer}.ffn_gate_up_exps.{what}"] = torch.cat(halves, 1)
    return found
