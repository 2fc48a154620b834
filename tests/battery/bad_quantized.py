"""Hostile directories of a quantised Llama (compressed-tensors, int8): its ``quantization_config`` and tensors.

Each case is a name, which begins with "quantised", and what spoils a good directory.
"""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.battery.bad_experts import edit_tensors

Tensors = dict[str, torch.Tensor]

_WEIGHTS = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "ignore": ["lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": _WEIGHTS}},
}
_UP = "model.layers.1.mlp.up_proj"
WEIGHT, SCALE = f"{_UP}.weight", f"{_UP}.weight_scale"


def quantised(tensors: Tensors) -> Tensors:
    """The linear layers of the blocks in codes."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        if ".layers." not in name or tensor.ndim != 2:
            found[name] = tensor
            continue
        scale = tensor.abs().amax(1, keepdim=True) / 127
        found[name] = torch.round(tensor / scale).to(torch.int8)
        found[f"{name}_scale"] = scale
    return found


def _weights(**fields: Any) -> dict[str, Any]:
    return {**QUANTIZATION, "config_groups": {"group_0": {"targets": ["Linear"], "weights": {**_WEIGHTS, **fields}}}}


_CONFIGS: dict[str, Any] = {
    "null": None,
    "a list": [1],
    "of another method": {"quant_method": "gptq", "bits": 4, "group_size": 32},
    "of a method that is a list": {"quant_method": ["gptq"]},
    "with a field more": {**QUANTIZATION, "rotation": 1},
    "without groups": {**QUANTIZATION, "config_groups": {}},
    "with groups that are a list": {**QUANTIZATION, "config_groups": [1]},
    "of three bits": _weights(num_bits=3),
    "of 10^300 bits": _weights(num_bits=10**300),
    "of four bits": _weights(num_bits=4),
    "in groups of 0": _weights(strategy="group", group_size=0),
    "in groups of 2^63": _weights(strategy="group", group_size=2**63),
    "in groups of NaN": _weights(strategy="group", group_size=float("nan")),
    "in blocks of minus one": _weights(strategy="block", block_structure=[-1, 128]),
    "in blocks of words": _weights(strategy="block", block_structure=["a", "b"]),
    "with zero points": _weights(symmetric=False),
    "ordered": _weights(actorder="group"),
    "with a pattern for ever": {**QUANTIZATION, "ignore": ["re:(.*)*(.*)*(.*)*x"]},
    "with a pattern of 100,000": {**QUANTIZATION, "ignore": ["re:" + "(a|" * 100_000]},
    "with 100,000 names": {**QUANTIZATION, "ignore": ["x"] * 100_000},
}
# Name -> what it does to the tensors, and what the error has to name.
_TENSORS: dict[str, tuple[Callable[[Tensors], Any], tuple[str, ...]]] = {
    "without a scale": (lambda t: t.pop(SCALE), (SCALE,)),
    "without codes": (lambda t: t.pop(WEIGHT), (WEIGHT,)),
    "a scale NaN": (lambda t: t[SCALE].view(-1)[3:4].fill_(torch.nan), (_UP, "weight_scale")),
    "a scale infinite": (lambda t: t[SCALE].view(-1)[3:4].fill_(torch.inf), (_UP, "weight_scale")),
    "scales of a matrix": (lambda t: t.update({SCALE: torch.ones(1)}), (SCALE,)),
    "scales of no element": (lambda t: t.update({SCALE: torch.ones(0, 1)}), (SCALE,)),
    "scales in int8": (lambda t: t.update({SCALE: t[SCALE].to(torch.int8)}), (SCALE,)),
    "codes in float32": (lambda t: t.update({WEIGHT: t[WEIGHT].float()}), (WEIGHT,)),
    "codes in uint8": (lambda t: t.update({WEIGHT: t[WEIGHT].view(torch.uint8)}), (WEIGHT,)),
    "codes flat": (lambda t: t.update({WEIGHT: t[WEIGHT].flatten()}), (WEIGHT,)),
    "zero points that are not 0": (
        lambda t: t.update({f"{WEIGHT}_zero_point": torch.ones(t[SCALE].shape, dtype=torch.int8)}),
        (_UP, "weight_zero_point"),
    ),
    "an order that config.json lacks": (lambda t: t.update({f"{WEIGHT}_g_idx": torch.zeros(32)}), ("weight_g_idx",)),
}


def cases() -> dict[str, Callable[[Path], None]]:
    """Name -> what spoils a good directory."""
    found: dict[str, Callable[[Path], None]] = {
        f"quantised config {name}": functools.partial(_set_quantization, value) for name, value in _CONFIGS.items()
    }
    return found | {
        f"quantised tensors: {name}": functools.partial(edit_tensors, edit) for name, (edit, _) in _TENSORS.items()
    }


def must_name(case: str) -> tuple[str, ...]:
    """What the error of a case has to name besides a file."""
    return (
        _TENSORS.get(case.removeprefix("quantised tensors: "), (None, ()))[1] if case.startswith("quantised t") else ()
    )


def _set_quantization(value: Any, directory: Path) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": value}))
