"""The kinds of quantisation that a checkpoint is written in, and how compressed-tensors describes each."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.api.config import QUANTIZATIONS
from compiled_llm.ops.linear.quantized_weight import WeightFormat

_GROUPED = ("int4", "int4_w4a8")
_DEFAULT_GROUP_SIZE = 128


class Scheme(NamedTuple):
    """How linear layers are quantised.

    Attributes:
        kind: one of ``QUANTIZATIONS``.
        form: of the weights.
        layout: the ``format`` of compressed-tensors.
    """

    kind: str
    form: WeightFormat
    layout: str

    @property
    def quantizes_inputs(self) -> bool:
        """Whether inputs are quantised too, to int8, each row by itself."""
        return self.kind.endswith("a8")

    def description(self, targets: list[str], ignore: list[str]) -> dict[str, Any]:
        """``quantization_config`` of ``config.json``."""
        form = self.form
        weights: dict[str, Any] = {
            "num_bits": form.bits,
            "type": "float" if form.element.startswith("fp") else "int",
            "symmetric": not form.zeros,
            "strategy": "group" if form.group_size else "channel",
            "group_size": form.group_size or None,
            "dynamic": False,
        }
        if form.element == "fp4":
            weights["scale_dtype"] = "torch.uint8"
        inputs = {
            "num_bits": 8,
            "type": "int",
            "symmetric": True,
            "strategy": "token",
            "group_size": None,
            "dynamic": True,
        }
        group = {
            "targets": targets,
            "weights": weights,
            "input_activations": inputs if self.quantizes_inputs else None,
            "output_activations": None,
            "format": self.layout,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": self.layout,
            "quantization_status": "compressed",
            "global_compression_ratio": None,
            "kv_cache_scheme": None,
            "config_groups": {"group_0": group},
            "ignore": ignore,
        }


def make_scheme(kind: str, group_size: int | None, zeros: bool, dtype: torch.dtype) -> Scheme:
    """The scheme of a kind for a checkpoint of ``dtype``.

    Args:
        group_size: inputs that share a scale, of int4 alone; None: 128.
        zeros: whether groups have zero points, with int4 alone.

    Raises:
        ValueError: the kind has no such groups or no zero points.
    """
    if kind not in QUANTIZATIONS:
        raise ValueError(f"kind must be one of {', '.join(QUANTIZATIONS)}, given {kind!r}")
    if kind not in _GROUPED and (group_size is not None or zeros):
        given = "zeros" if zeros else f"group_size {group_size}"
        raise ValueError(
            f"kind {kind} has scales of its own, given {given}: leave it, or choose kind int4 or int4_w4a8"
        )
    size = _DEFAULT_GROUP_SIZE if group_size is None else group_size
    if size < 16 or size % 16 or (size > 128 and size % 128):
        raise ValueError(f"group_size must be a multiple of 16 up to 128, or of 128, given {size}")
    if zeros and kind != "int4":
        raise ValueError(f"zeros must be left with kind {kind}: its kernels have no zero points")
    scale_dtype = str(dtype).removeprefix("torch.")
    if kind == "int8":
        return Scheme(kind, WeightFormat("int8", 0, False, scale_dtype), "pack-quantized")
    if kind == "int8_w8a8":
        return Scheme(kind, WeightFormat("int8"), "int-quantized")
    if kind == "fp8":
        return Scheme(kind, WeightFormat("fp8"), "float-quantized")
    if kind == "mxfp4":
        return Scheme(kind, WeightFormat("fp4", 32), "mxfp4-pack-quantized")
    form = WeightFormat("int4", size, zeros, scale_dtype)
    return Scheme(kind, form, "pack-quantized" if kind == "int4" else "int-quantized")


def quantize_inputs(x: Tensor) -> Tensor:
    """``x`` ``[..., K]`` rounded to int8, symmetric, each row by itself: what a W8A8 layer multiplies."""
    scale = x.abs().amax(-1, keepdim=True) / 127
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return torch.round(x / scale).clamp(-127, 127) * scale
