"""What a ``quantization_config`` is in words, and what is computed otherwise than it says."""

from collections.abc import Mapping
from typing import Any


def described(config: Mapping[str, Any], int8_activations: bool = False) -> str:
    """Such as "modelopt NVFP4 (kept as fp4 in groups of 16; activations stay in the model's dtype)".

    Args:
        config: one that ``plan.read_quantization`` reads.
        int8_activations: ``QuantizationPlan.int8_activations``.
    """
    method = config["quant_method"]
    kinds, kept = _READERS.get(method, _bits)(config)
    notes = ["kept as fp4 in groups of 16"] if any("nvfp4" in kind.lower() for kind in kinds) else []
    notes += ["experts, kept as fp4 in groups of 32"] if method == "mxfp4" else []
    notes += ["activations in int8"] if int8_activations else []
    notes += ["activations stay in the model's dtype"] if kept else []
    notes += ["expanded to the model's dtype at load"] if method == "bitsandbytes" else []
    return " ".join([method, *kinds]) + (f" ({'; '.join(notes)})" if notes else "")


def _compressed_tensors(config: Mapping[str, Any]) -> tuple[list[str], bool]:
    """Formats, and whether the activations are quantised by the checkpoint and not here."""
    groups = config["config_groups"].values()
    kinds = sorted({group.get("format") or config["format"] for group in groups})
    return kinds, any(_is_left(group) for group in groups)


def _is_left(group: Mapping[str, Any]) -> bool:
    inputs = group.get("input_activations")
    if not inputs:
        return False
    return "float" in (inputs.get("type"), group["weights"].get("type")) or inputs.get("symmetric") is False


def _fp8(config: Mapping[str, Any]) -> tuple[list[str], bool]:
    return [], True


def _modelopt(config: Mapping[str, Any]) -> tuple[list[str], bool]:
    return [config["quant_algo"]], True


def _torchao(config: Mapping[str, Any]) -> tuple[list[str], bool]:
    made = config["quant_type"]["default"]
    name = made["_type"]
    symmetric = "SYMMETRIC" in str(made.get("_data", {}).get("act_mapping_type", "SYMMETRIC")).replace("ASYMMETRIC", "")
    return [name], "Dynamic" in name and not (name == "Int8DynamicActivationInt8WeightConfig" and symmetric)


def _mxfp4(config: Mapping[str, Any]) -> tuple[list[str], bool]:
    return [], False


def _bitsandbytes(config: Mapping[str, Any]) -> tuple[list[str], bool]:
    return [config["bnb_4bit_quant_type"]], False


def _gguf(config: Mapping[str, Any]) -> tuple[list[str], bool]:
    """The kinds, that of most layers first."""
    kinds = config["kinds"]
    return [", ".join(sorted(kinds, key=lambda kind: -len(kinds[kind])))], False


def _bits(config: Mapping[str, Any]) -> tuple[list[str], bool]:
    return [f"{config.get('bits', 4)} bits"], False


_READERS = {
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "fp8": _fp8,
    "gguf": _gguf,
    "modelopt": _modelopt,
    "mxfp4": _mxfp4,
    "torchao": _torchao,
}
