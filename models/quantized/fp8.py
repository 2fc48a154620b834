"""``quant_method`` "fp8" (a scale for each block or for the whole matrix), and ModelOpt's FP8 and NVFP4."""

from collections.abc import Mapping
from typing import Any

from compiled_llm.models.quantized import fields
from compiled_llm.models.quantized.codes import EightBits, Fp4
from compiled_llm.models.quantized.compressed_tensors import read_block
from compiled_llm.models.quantized.scheme import Scheme
from compiled_llm.ops.linear.quantized_weight import WeightFormat


def read_fp8(config: Mapping[str, Any]) -> tuple[Scheme, tuple[str, ...]]:
    """The scheme, and patterns of modules that are not quantised.

    With ``weight_block_size`` scales are ``weight_scale_inv``, one where it is null; without it, ``weight_scale``, one.
    Activations stay in the model's dtype, whatever ``activation_scheme`` says.
    """
    allowed = {"quant_method", "activation_scheme", "weight_block_size", "fmt", "scale_fmt", "modules_to_not_convert",
               "ignored_layers", "dequantize", "kv_cache_scheme", "expert_dtype"}  # fmt: skip
    fields.known(config, allowed, "quant_method 'fp8'")
    fields.choice(config, "activation_scheme", ["dynamic", "static"], "dynamic")
    fields.choice(config, "fmt", ["e4m3"], "e4m3")
    fields.choice(config, "scale_fmt", ["float", None])
    fields.choice(config, "expert_dtype", ["fp8"], "fp8")
    skipped = fields.names(config, "modules_to_not_convert") + fields.names(config, "ignored_layers")
    if "weight_block_size" not in config:
        return EightBits(WeightFormat("fp8"), block=(0, 0)), skipped
    names: dict[str, Any] = {"scale": "weight_scale_inv", "input_scale": "activation_scale"}
    if config["weight_block_size"] is None:
        return EightBits(WeightFormat("fp8"), block=(0, 0), **names), skipped
    block, size = read_block(config["weight_block_size"], "weight_block_size")
    return EightBits(WeightFormat("fp8", size), block=block, **names), skipped


def read_modelopt(config: Mapping[str, Any]) -> tuple[Scheme, tuple[str, ...]]:
    """The same of ``quant_method`` "modelopt"."""
    allowed = {"quant_method", "quant_algo", "config_groups", "ignore", "exclude_modules", "kv_cache_scheme",
               "kv_cache_quant_algo", "producer", "group_size"}  # fmt: skip
    fields.known(config, allowed, "quant_method 'modelopt'")
    skipped = fields.names(config, "ignore") + fields.names(config, "exclude_modules")
    if fields.choice(config, "quant_algo", ["FP8", "NVFP4"]) == "FP8":
        return EightBits(WeightFormat("fp8"), block=(0, 0)), skipped
    fields.choice(config, "group_size", [16], 16)
    form = WeightFormat("fp4", 16)
    scheme = Fp4(form, block=(1, 16), weight="weight", whole_scale="weight_scale_2", input_scale="input_scale")
    return scheme, skipped
