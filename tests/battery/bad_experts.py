"""Hostile directories of models with a mixture of experts, plain and in MXFP4: their configs and tensors.

Each case is a name, which begins with the kind of directory that it spoils, and what spoils it.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests import mxfp4

Tensors = dict[str, torch.Tensor]

_SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    **_SIZES, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "intermediate_size": 48,
    "num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [], "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "dtype": "float32", "eos_token_id": 2,
}  # fmt: skip
MXFP4: dict[str, Any] = {**mxfp4.CONFIG, **_SIZES, "intermediate_size": 32, "num_local_experts": 3}
CONFIGS = {"experts": EXPERTS, "mxfp4": MXFP4}

GATE, ROUTER = "model.layers.1.mlp.experts.3.gate_proj.weight", "model.layers.0.mlp.gate.weight"
_DOWN = "model.layers.1.mlp.experts.down_proj"
BLOCKS, SCALES = f"{_DOWN}_blocks", f"{_DOWN}_scales"
_VALUES: dict[str, Any] = {
    "null": None, "true": True, "minus one": -1, "zero": 0, "five": 5, "10^7": 10**7, "2^63": 2**63,
    "10^300": 10**300, "a half": 0.5, "NaN": float("nan"), "a word": "many", "a list": [1, 2],
    "an object": {"a": 1},
}  # fmt: skip
_FIELDS = {
    "experts": (
        "num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step",
        "mlp_only_layers",
    ),
    "mxfp4": (
        "num_local_experts", "num_experts_per_tok", "intermediate_size", "swiglu_limit", "sliding_window",
        "layer_types", "quantization_config",
    ),
}  # fmt: skip
_QUANTIZATION: dict[str, Any] = {
    "of another method": {"quant_method": "gptq", "bits": 4},
    "of no method": {"modules_to_not_convert": []},
    "of a method that is a list": {"quant_method": ["mxfp4"]},
    "with a field more": {"quant_method": "mxfp4", "block": 16},
    "of all modules": {"quant_method": "mxfp4", "modules_to_not_convert": ["*"]},
    "with a regex": {"quant_method": "mxfp4", "modules_to_not_convert": ["(.*)*x"]},
    "with 100 stars": {"quant_method": "mxfp4", "modules_to_not_convert": ["*a" * 100]},
    "with 40,000 patterns": {"quant_method": "mxfp4", "modules_to_not_convert": ["x"] * 40_000},
    "with patterns that are numbers": {"quant_method": "mxfp4", "modules_to_not_convert": [1]},
    "with an empty pattern": {"quant_method": "mxfp4", "modules_to_not_convert": [""]},
}
# Name -> what it does to the tensors, and what the error has to name; nothing: it serves, or says why not.
_TENSORS: dict[str, tuple[Callable[[Tensors], Any], tuple[str, ...]]] = {
    "experts tensors: without an expert's gate": (lambda t: t.pop(GATE), (GATE,)),
    "experts tensors: without a router": (lambda t: t.pop(ROUTER), (ROUTER,)),
    "experts tensors: an expert transposed": (lambda t: t.update({GATE: t[GATE].T.contiguous()}), (GATE,)),
    "experts tensors: a router for five": (lambda t: t.update({ROUTER: torch.zeros(5, 32)}), (ROUTER,)),
    "experts tensors: a fifth expert": (
        lambda t: t.update({GATE.replace("3", "4"): t[GATE].clone()}),
        (GATE.replace("3", "4"),),
    ),
    "experts tensors: an expert in bytes": (lambda t: t.update({GATE: t[GATE].to(torch.uint8)}), (GATE,)),
    "experts tensors: NaN in an expert": (lambda t: t[GATE].view(-1)[5:7].fill_(torch.nan), (GATE,)),
    "experts tensors: infinity in a router": (lambda t: t[ROUTER].view(-1)[5:7].fill_(torch.inf), (ROUTER,)),
    "experts tensors: a router of zeros": (lambda t: t[ROUTER].zero_(), ()),
    "mxfp4 tensors: without blocks": (lambda t: t.pop(BLOCKS), (BLOCKS,)),
    "mxfp4 tensors: without scales": (lambda t: t.pop(SCALES), (SCALES,)),
    "mxfp4 tensors: scales of another shape": (lambda t: t.update({SCALES: t[SCALES].repeat(1, 1, 2)}), (SCALES,)),
    "mxfp4 tensors: blocks of another shape": (lambda t: t.update({BLOCKS: t[BLOCKS].flatten(2)}), (BLOCKS,)),
    "mxfp4 tensors: blocks of nothing": (lambda t: t.update({BLOCKS: t[BLOCKS][:, :, :0]}), (BLOCKS,)),
    "mxfp4 tensors: scales in float32": (lambda t: t.update({SCALES: t[SCALES].float()}), (SCALES,)),
    "mxfp4 tensors: scales in e8m0": (
        lambda t: t.update({SCALES: t[SCALES].view(torch.float8_e8m0fnu)}),
        (SCALES, "F8_E8M0"),
    ),
    "mxfp4 tensors: blocks of signed bytes": (lambda t: t.update({BLOCKS: t[BLOCKS].view(torch.int8)}), (BLOCKS,)),
    "mxfp4 tensors: blocks and scales changed over": (
        lambda t: t.update({BLOCKS: t[SCALES], SCALES: t[BLOCKS]}),
        (BLOCKS, SCALES),
    ),
    "mxfp4 tensors: plain weights besides": (lambda t: t.update({_DOWN: torch.zeros(3, 32, 32)}), (f"{_DOWN} (",)),
    "mxfp4 tensors: one scale NaN": (lambda t: t[SCALES].view(-1)[7:8].fill_(255), (_DOWN, "scales must be")),
    "mxfp4 tensors: all scales the largest": (lambda t: t[SCALES].fill_(254), (_DOWN, "scales must be")),
    "mxfp4 tensors: all scales the smallest": (lambda t: t[SCALES].zero_(), ()),
    "mxfp4 tensors: a norm in bytes": (
        lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.uint8)}),
        ("model.norm.weight",),
    ),
}


def cases() -> dict[str, Callable[[Path], None]]:
    """Name -> what spoils a good directory of the kind with which the name begins."""
    found: dict[str, Callable[[Path], None]] = {
        f"{kind} config {field} is {name}": functools.partial(_set_config, {field: value})
        for kind, fields in _FIELDS.items()
        for field in fields
        for name, value in _VALUES.items()
    }
    for name, value in _QUANTIZATION.items():
        found[f"mxfp4 quantization {name}"] = functools.partial(_set_config, {"quantization_config": value})
    found["mxfp4 hidden_size no multiple of 32"] = functools.partial(_set_config, {"hidden_size": 48})
    found["experts quantised"] = functools.partial(_set_config, {"quantization_config": mxfp4.QUANTIZATION})
    return found | {name: functools.partial(edit_tensors, edit) for name, (edit, _) in _TENSORS.items()}


def must_name(case: str) -> tuple[str, ...]:
    """What the error of a case has to name besides a file."""
    return _TENSORS[case][1] if case in _TENSORS else ()


def _set_config(change: dict[str, Any], directory: Path) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


def edit_tensors(edit: Callable[[Tensors], Any], directory: Path) -> None:
    """Changed tensors stay in their files, new ones go to the last."""
    index = directory / "model.safetensors.index.json"
    paths = sorted(directory.glob("*.safetensors"))
    held = {path: load_file(path) for path in paths}
    tensors = {name: tensor for part in held.values() for name, tensor in part.items()}
    place = {name: path for path, part in held.items() for name in part}
    edit(tensors)
    for path in paths:
        kept = {name: t.contiguous() for name, t in tensors.items() if place.get(name, paths[-1]) == path}
        save_file(kept, path)
    if index.exists():
        placed = {name: place.get(name, paths[-1]).name for name in tensors}
        index.write_text(json.dumps({"weight_map": placed}))
