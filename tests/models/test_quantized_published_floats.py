"""As test_quantized_published.py, for fp8 with a scale for a matrix, fp4 in groups, and what is "naive-quantized".

transformers reads few of these on a CPU: of the others it gets the matrices that the codes stand for.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor

from tests.models.quantized import test_compressed_tensors as ct
from tests.models.test_quantized_published import Case, Layer, case, check_case

_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
_GROUPS = {16: {"strategy": "tensor_group", "group_size": 16}, 32: {"strategy": "group", "group_size": 32}}


def as_fp4(matrix: Tensor, size: int) -> Layer:
    """NVFP4 (groups of 16) and MXFP4 (of 32) as compressed-tensors writes them."""
    format_ = "nvfp4-pack-quantized" if size == 16 else "mxfp4-pack-quantized"
    args = QuantizationScheme(targets=["Linear"], weights={"num_bits": 4, "type": "float", **_GROUPS[size]})
    largest = matrix.view(len(matrix), -1, size).abs().amax(2)
    state = {"weight": matrix}
    if size == 16:
        of_all = 448 * 6 / matrix.abs().amax()
        state |= {"weight_scale": largest / 6 * of_all, "weight_global_scale": of_all.view(1)}
    else:
        state["weight_scale"] = torch.exp2(torch.floor(torch.log2(largest)) - 2)
    compressor = BaseCompressor.get_value_from_registry(format_)
    made = compressor.compress(state, args)
    return made | {"dequantised": _fp4_matrix(made, size)}


def _fp4_matrix(made: Layer, size: int) -> Tensor:
    """By the layouts' documentation: the library gives bfloat16."""
    held = made["weight_packed"]
    values = _VALUES[torch.stack([held & 15, held >> 4], 2).flatten(1).long()]
    scales = made["weight_scale"].float()
    scales = scales / made["weight_global_scale"] if size == 16 else torch.exp2(scales - 127)
    return values * scales.repeat_interleave(size, 1)


def as_modelopt_nvfp4(matrix: Tensor) -> Layer:
    made = as_fp4(matrix, 16)
    return {
        "weight": made["weight_packed"],
        "weight_scale": made["weight_scale"],
        "weight_scale_2": 1 / made["weight_global_scale"].view(()),
        "input_scale": torch.tensor(0.01),
        "dequantised": made["dequantised"],
    }


def as_fp8_matrix(matrix: Tensor, scale: str, inputs: str = "") -> Layer:
    """One scale of the whole matrix, and one of activations, by which we do not round."""
    of_all = matrix.abs().amax() / 448
    codes = (matrix / of_all).to(torch.float8_e4m3fn)
    besides = {inputs: torch.tensor(0.01)} if inputs else {}
    return {"weight": codes, scale: of_all, **besides, "dequantised": codes.float() * of_all}


def _compressed_fp4(size: int) -> Case:
    fields = ct.config(
        "nvfp4-pack-quantized" if size == 16 else "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "symmetric": True, **_GROUPS[size]},
    )["quantization_config"]
    fields["quantization_status"] = "compressed"
    fields["ignore"] += ["re:.*gate$"]
    return Case(functools.partial(as_fp4, size=size), fields, "matrices")


def _fp8(fields: dict[str, Any], **names: str) -> Case:
    return Case(functools.partial(as_fp8_matrix, **names), fields, "matrices")


_FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_MODELOPT: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
CASES = {
    # transformers takes int8 without activations for packed.
    "naive-quantized": case("naive-quantized", ct.W8)._replace(transformers="matrices"),
    "naive-quantized, groups": case("naive-quantized", {**ct.W8, "strategy": "group", "group_size": 64})._replace(
        transformers="matrices"
    ),
    "naive-quantized, fp8": case("naive-quantized", ct.FP8),
    "nvfp4-pack-quantized": _compressed_fp4(16),
    "mxfp4-pack-quantized": _compressed_fp4(32),
    "fp8, a scale": _fp8(_FP8, scale="weight_scale"),
    "fp8, a scale, static": _fp8({**_FP8, "activation_scheme": "static"}, scale="weight_scale", inputs="input_scale"),
    "fp8, an inverse scale": _fp8(
        {**_FP8, "activation_scheme": "static", "weight_block_size": None},
        scale="weight_scale_inv",
        inputs="activation_scale",
    ),
    "modelopt FP8": _fp8(_MODELOPT, scale="weight_scale", inputs="input_scale"),
    "modelopt NVFP4": Case(as_modelopt_nvfp4, {**_MODELOPT, "quant_algo": "NVFP4"}, "matrices"),
}
_BY_DEFAULT = {("qwen3", name) for name in CASES} | {("mixtral", "nvfp4-pack-quantized"), ("mixtral", "fp8, a scale")}


@pytest.mark.parametrize(
    ("model", "name"),
    [
        pytest.param(model, name, marks=() if (model, name) in _BY_DEFAULT else pytest.mark.battery)
        for model in ("qwen3", "llama", "mixtral", "qwen3_moe")
        for name in CASES
    ],
)
def test_logits_are_those_of_transformers(tmp_path: Path, model: str, name: str) -> None:
    check_case(tmp_path, model, CASES[name])


def test_rounding_is_no_detail() -> None:
    """Codes stand for other matrices than those that were rounded: else the tests above would show nothing."""
    matrix = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    for name, each in CASES.items():
        error = (each.make(matrix)["dequantised"] - matrix).norm() / matrix.norm()
        assert (0.05 if "fp4" in name.lower() else 0.001) < error < 0.2
