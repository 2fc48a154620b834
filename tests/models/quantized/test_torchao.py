"""torchao's weights, quantised by the library and taken apart as transformers saves them."""

import json
from typing import Any

import pytest
import torch
import torchao.quantization as ao
from torchao.core.config import config_to_dict

from compiled_llm.models.quantized.plan import read_quantization
from compiled_llm.models.quantized.scheme import Scheme
from tests.models.quantized.layers import decoded

N, K = 48, 256


def fields_of(quant_type: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "torchao", "quant_type": {"default": config_to_dict(quant_type)}}}


def scheme_of(fields: dict[str, Any]) -> Scheme:
    plan = read_quantization(fields)
    assert plan is not None
    assert plan.scheme("lm_head") is None
    found = plan.scheme("model.layers.0.mlp.up_proj")
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("made", "activations"),
    [
        (ao.Int8WeightOnlyConfig(version=2), "model"),
        (ao.Int8WeightOnlyConfig(granularity=ao.PerGroup(32), version=2), "model"),
        (ao.Int8DynamicActivationInt8WeightConfig(version=2), "int8"),
        (ao.Float8WeightOnlyConfig(), "model"),
        (ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=ao.PerGroup(32)), "model"),
        (ao.IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=ao.PerAxis(0)), "model"),
        (
            ao.IntxWeightOnlyConfig(
                weight_dtype=torch.int4, granularity=ao.PerGroup(64), mapping_type=ao.MappingType.ASYMMETRIC
            ),
            "model",
        ),
        (
            ao.Int8DynamicActivationIntxWeightConfig(weight_dtype=torch.int4, weight_granularity=ao.PerGroup(32)),
            "model",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_the_library_makes(made: Any, activations: str) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(K, N, bias=False)
    ao.quantize_(linear, made)
    weight = linear.weight
    names = [*weight.tensor_data_names, *getattr(weight, "optional_tensor_data_names", [])]
    tensors = {f"_weight_{x}": getattr(weight, x) for x in names if getattr(weight, x, None) is not None}
    scheme = scheme_of(json.loads(json.dumps(fields_of(made))))
    assert scheme.activations == activations
    torch.testing.assert_close(decoded(scheme, tensors, (N, K)), weight.dequantize().float(), rtol=1e-6, atol=1e-7)


def test_int4() -> None:
    """Its own library packs it on GPUs alone: by its documentation."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(-8, 8, (N, K), generator=generator)
    scales, zeros = (torch.randn(K // 64, N, generator=generator).bfloat16() * 0.01 for _ in range(2))
    tensors = {
        "_weight_qdata": ((codes[:, ::2] & 15) | (codes[:, 1::2] << 4)).to(torch.int8),
        "_weight_scale": scales,
        "_weight_zero_point": zeros,
    }

    def spread(of_groups: torch.Tensor) -> torch.Tensor:
        return of_groups.float().t().repeat_interleave(64, 1)

    found = decoded(scheme_of(fields_of(ao.Int4WeightOnlyConfig(group_size=64))), tensors, (N, K))
    torch.testing.assert_close(found, codes * spread(scales) + spread(zeros), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("edit", "word"),
    [
        ({"quant_type": "int4_weight_only"}, "quant_type"),
        ({"quant_type": {"default": {"_type": "FqnToConfig", "_data": {}}}}, "quant_type"),
        ({"quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_data": {}, "_version": 1}}}, "_version"),
        ({"include_input_output_embeddings": True}, "include_input_output_embeddings"),
        ({"quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 0}}}}, "group_size"),
    ],
)
def test_refused(edit: dict[str, Any], word: str) -> None:
    fields = fields_of(ao.Int8WeightOnlyConfig(version=2))
    fields["quantization_config"] |= edit
    with pytest.raises(ValueError, match=rf"config\.json: .*{word}"):
        read_quantization(fields)


def test_other_packings_are_refused() -> None:
    fields = fields_of(ao.Int4WeightOnlyConfig(group_size=64, int4_packing_format="tile_packed_to_4d"))
    with pytest.raises(ValueError, match="int4_packing_format"):
        read_quantization(fields)
