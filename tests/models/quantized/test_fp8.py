"""FP8 per matrix and per block, and ModelOpt's FP8 and NVFP4, by their documentation."""

from typing import Any

import pytest
import torch

from compiled_llm.models.quantized.plan import read_quantization
from compiled_llm.models.quantized.scheme import Scheme
from tests.models.quantized.layers import decoded

N, K = 200, 272
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def scheme_of(fields: dict[str, Any]) -> Scheme:
    plan = read_quantization({"quantization_config": fields})
    assert plan is not None
    found = plan.scheme("model.layers.0.mlp.up_proj")
    assert found is not None
    assert plan.scheme("lm_head") is None
    return found


def codes() -> torch.Tensor:
    return (torch.randn(N, K, generator=torch.Generator().manual_seed(0)) * 50).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("block", [[128, 128], [64, 32], [1, 128], [100, 256]])
def test_blocks(block: list[int]) -> None:
    """Also where the last ones are cut."""
    shape = (-(-N // block[0]), -(-K // block[1]))
    scales = torch.rand(shape, generator=torch.Generator().manual_seed(1)) * 0.01
    expected = codes().float() * scales.repeat_interleave(block[0], 0)[:N].repeat_interleave(block[1], 1)[:, :K]
    scheme = scheme_of({**FP8, "weight_block_size": block, "modules_to_not_convert": ["lm_head"]})
    assert scheme.form.element == "fp8"
    found = decoded(scheme, {"weight": codes(), "weight_scale_inv": scales}, (N, K))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        (FP8, "weight_scale"),
        ({**FP8, "activation_scheme": "static", "kv_cache_scheme": {}}, "weight_scale"),
        ({**FP8, "weight_block_size": None}, "weight_scale_inv"),
        ({"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}, "weight_scale"),
    ],
)
def test_one_scale(fields: dict[str, Any], name: str) -> None:
    scheme = scheme_of(fields)
    for shape in ((), (1,)):
        found = decoded(scheme, {"weight": codes(), name: torch.full(shape, 0.25)}, (N, K))
        torch.testing.assert_close(found, codes().float() * 0.25)
    assert not scheme.static_activations, "activations stay in the model's dtype"


def test_nvfp4_of_modelopt() -> None:
    generator = torch.Generator().manual_seed(0)
    bytes_ = torch.randint(0, 256, (N, K // 2), generator=generator, dtype=torch.uint8)
    scales = (torch.rand(N, K // 16, generator=generator) * 400).to(torch.float8_e4m3fn)
    values = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
    unpacked = values[torch.stack([bytes_ & 15, bytes_ >> 4], 2).flatten(1).long()]
    expected = unpacked * scales.float().repeat_interleave(16, 1) * 0.003
    tensors = {"weight": bytes_, "weight_scale": scales, "weight_scale_2": torch.tensor(0.003)}
    scheme = scheme_of({"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]})
    torch.testing.assert_close(decoded(scheme, tensors, (N, K)), expected)
    tensors["weight_scale_2"] = torch.tensor(0.0)
    with pytest.raises(ValueError, match="weight_scale_2 must be more than 0"):
        decoded(scheme, tensors, (N, K))


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({**FP8, "weight_block_size": [128]}, "weight_block_size"),
        ({**FP8, "weight_block_size": [128, 100]}, "weight_block_size"),
        ({**FP8, "activation_scheme": "other"}, "activation_scheme"),
        ({**FP8, "fmt": "e5m2"}, "fmt"),
        ({**FP8, "scale_fmt": "ue8m0"}, "scale_fmt"),
        ({**FP8, "expert_dtype": "fp4"}, "expert_dtype"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "quant_algo"),
        ({"quant_method": "hqq"}, "quant_method"),
        ({"bits": 4}, "quant_method"),
        ("fp8", "quant_method"),
    ],
)
def test_refused(fields: Any, word: str) -> None:
    with pytest.raises(ValueError, match=rf"config\.json: .*{word}"):
        read_quantization({"quantization_config": fields})
