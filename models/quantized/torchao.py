"""``quant_method`` "torchao", as transformers saves it to safetensors: each attribute of a weight is a tensor.

The weight of a layer is ``_weight_qdata``, ``_weight_scale`` and ``_weight_zero_point``. Which numbers these are says
the class of ``quant_type``.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from compiled_llm.models.quantized import fields
from compiled_llm.models.quantized.codes import EightBits
from compiled_llm.models.quantized.scheme import (
    FLOATS,
    Scheme,
    StoredPart,
    checked_scales,
    kept_group,
    repeat_groups,
    signed,
    unpack_nibbles,
)
from compiled_llm.ops.linear.quantized_weight import DTYPE_NAMES, QuantizedRows, WeightFormat

_NAMES: dict[str, Any] = {"weight": "_weight_qdata", "scale": "_weight_scale", "zero": "_weight_zero_point"}
_TYPES = [
    "Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Float8WeightOnlyConfig",
    "Float8DynamicActivationFloat8WeightConfig", "Int4WeightOnlyConfig", "IntxWeightOnlyConfig",
    "Int8DynamicActivationIntxWeightConfig",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PlainInt4:
    """torchao's Int4Tensor: two signed codes in a byte, ``W = code * scale + zero``; both are ``[G, N]``."""

    form: WeightFormat
    size: int
    activations: str = "model"
    static_activations: bool = False
    ordered: bool = False
    in_pieces: str | None = "_weight_qdata"

    def stored(self, out_features: int, in_features: int) -> dict[str, StoredPart]:
        if in_features % self.size:
            raise ValueError(f"in_features must be a multiple of group_size ({self.size}), found {in_features}")
        groups = ((in_features // self.size, out_features),)
        return {
            "_weight_qdata": StoredPart(((out_features, in_features // 2),), (torch.int8, torch.uint8)),
            "_weight_scale": StoredPart(groups, FLOATS),
            "_weight_zero_point": StoredPart(groups, FLOATS),
        }

    def kept(self, dtypes: Mapping[str, torch.dtype], model: torch.dtype) -> WeightFormat:
        # Zero points are quotients here.
        return self.form._replace(scale_dtype=DTYPE_NAMES[dtypes["_weight_scale"]], zero_dtype="float32")

    def order(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        return None

    def decode(self, tensors: Mapping[str, Tensor], first: int, count: int) -> QuantizedRows:
        rows = slice(first, first + count)
        codes = signed(unpack_nibbles(tensors["_weight_qdata"]) ^ 8, 4)
        scales = checked_scales(tensors["_weight_scale"][:, rows].t(), "_weight_scale")
        offsets = checked_scales(tensors["_weight_zero_point"][:, rows].t(), "_weight_zero_point")
        zeros = torch.where(scales == 0, 0.0, -offsets / scales)
        times, groups = self.size // self.form.group_size, self.form.num_groups(codes.shape[1])
        return QuantizedRows(codes, repeat_groups(scales, times, groups), repeat_groups(zeros, times, groups))


def read_torchao(config: Mapping[str, Any]) -> tuple[Scheme, tuple[str, ...]]:
    """The scheme, and patterns of modules that are not quantised."""
    allowed = {"quant_method", "quant_type", "modules_to_not_convert", "include_input_output_embeddings",
               "untie_embedding_weights", "quant_type_kwargs"}  # fmt: skip
    fields.known(config, allowed, "quant_method 'torchao'")
    fields.choice(config, "include_input_output_embeddings", [False], False)
    fields.choice(config, "untie_embedding_weights", [False], False)
    given = config.get("quant_type")
    made = fields.table(given.get("default") if isinstance(given, dict) else given, "quant_type")
    name = fields.choice({"quant_type": made.get("_type")}, "quant_type", _TYPES)
    data = fields.table(made.get("_data"), "quant_type")
    # transformers leaves the head as it is.
    return _scheme(name, data, made.get("_version", 1)), ("lm_head", *fields.names(config, "modules_to_not_convert"))


def _scheme(name: str, data: Mapping[str, Any], version: Any) -> Scheme:
    if name == "Int4WeightOnlyConfig":
        packing = data.get("int4_packing_format", "plain")
        packing = packing.get("_data") if isinstance(packing, dict) else packing
        fields.choice({"int4_packing_format": packing}, "int4_packing_format", ["plain", "PLAIN"])
        size = fields.whole(data, "group_size", 128)
        if size < 1:
            raise ValueError(f"config.json: group_size of quantization_config must be above 0, given {size}")
        kept, _ = kept_group(size, "group_size of quantization_config")
        return PlainInt4(WeightFormat("int4", kept, zeros=True), size)
    fields.choice({"_version": version}, "_version", [2])
    if name.startswith("Float8"):
        name_of_dtype = fields.table(data.get("weight_dtype") or {"_data": "float8_e4m3fn"}, "weight_dtype").get(
            "_data"
        )
        fields.choice({"weight_dtype": name_of_dtype}, "weight_dtype", ["float8_e4m3fn"])
        block, size = _granularity(data, "granularity", ["PerRow", "PerTensor"])
        return EightBits(WeightFormat("fp8", size), block=block, **_NAMES)
    if name.startswith("Int8") and "Intx" not in name:
        block, size = _granularity(data, "granularity", ["PerRow", "PerTensor", "PerGroup"])
        dynamic = name.startswith("Int8Dynamic") and _enum(data, "act_mapping_type", "SYMMETRIC") == "SYMMETRIC"
        return EightBits(WeightFormat("int8", size), "int8" if dynamic else "model", block=block, **_NAMES)
    # Activations with zero points, as "Int8DynamicActivationIntx" has them, stay in the model's dtype.
    _choose_enum(data, "intx_packing_format", ["UNPACKED_TO_INT8"])
    dtype = fields.table(data.get("weight_dtype"), "weight_dtype").get("_data")
    fields.choice({"weight_dtype": dtype}, "weight_dtype", ["int4", "int8"])
    dynamic = name.startswith("Int8Dynamic")
    block, size = _granularity(data, "weight_granularity" if dynamic else "granularity", ["PerGroup", "PerAxis"])
    mapping = _choose_enum(
        data,
        "weight_mapping_type" if dynamic else "mapping_type",
        ["SYMMETRIC", "ASYMMETRIC", "SYMMETRIC_NO_CLIPPING_ERR"],
    )
    form = WeightFormat(str(dtype), size, zeros=mapping == "ASYMMETRIC")
    return EightBits(form, block=block, zero_dtypes=(torch.int8, *FLOATS), **_NAMES)


def _enum(data: Mapping[str, Any], name: str, default: Any = None) -> Any:
    given = data.get(name, default)
    return given.get("_data") if isinstance(given, dict) else given


def _choose_enum(data: Mapping[str, Any], name: str, allowed: list[str]) -> str:
    return fields.choice({name: _enum(data, name)}, name, allowed)


def _granularity(data: Mapping[str, Any], name: str, allowed: list[str]) -> tuple[tuple[int, int], int]:
    """Outputs and inputs that share a scale, and the kernels' group size."""
    given = data.get(name)
    given = given[1] if isinstance(given, list) and len(given) == 2 else given  # of activations, of weights
    made = fields.table(given, name)
    kind = fields.choice({name: made.get("_type")}, name, allowed)
    sizes = fields.table(made.get("_data") or {}, name)
    if kind == "PerTensor":
        return (0, 0), 0
    if kind in ("PerRow", "PerAxis"):
        row = kind == "PerAxis"
        fields.choice(sizes, "axis" if row else "dim", [0] if row else [-1, 1], 0 if row else -1)
        return (1, 0), 0
    size = fields.whole(sizes, "group_size")
    return (1, max(size, 0)), kept_group(size, "group_size of quantization_config")[0]
