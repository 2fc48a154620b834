"""What the ready line says of a checkpoint's quantisation."""

from typing import Any

import pytest
import torchao.quantization as ao

from compiled_llm.models.quantized.described import described
from compiled_llm.models.quantized.plan import read_quantization
from tests.models.quantized import test_bitsandbytes as bitsandbytes
from tests.models.quantized import test_compressed_tensors as ct
from tests.models.quantized import test_gptq as gptq
from tests.models.quantized.test_torchao import fields_of

_NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_KEPT = "activations stay in the model's dtype"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (ct.config("pack-quantized", ct.W4), "compressed-tensors pack-quantized"),
        (ct.config("int-quantized", ct.W8, input_activations=ct.DYNAMIC), "compressed-tensors int-quantized"),
        (
            ct.config("int-quantized", ct.W8, input_activations={**ct.DYNAMIC, "symmetric": False}),
            f"compressed-tensors int-quantized ({_KEPT})",
        ),
        (
            ct.config("float-quantized", ct.FP8, input_activations={**ct.DYNAMIC, "type": "float"}),
            f"compressed-tensors float-quantized ({_KEPT})",
        ),
        (
            ct.config("nvfp4-pack-quantized", _NVFP4),
            "compressed-tensors nvfp4-pack-quantized (kept as fp4 in groups of 16)",
        ),
        ({"quantization_config": gptq.GPTQ}, "gptq 4 bits"),
        ({"quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"}}, f"fp8 ({_KEPT})"),
        (
            {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": []}},
            f"modelopt NVFP4 (kept as fp4 in groups of 16; {_KEPT})",
        ),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4 (experts, kept as fp4 in groups of 32)"),
        ({"quantization_config": bitsandbytes.CONFIG}, "bitsandbytes nf4 (expanded to the model's dtype at load)"),
        (fields_of(ao.Int8WeightOnlyConfig(version=2)), "torchao Int8WeightOnlyConfig"),
        (
            fields_of(ao.Int8DynamicActivationInt8WeightConfig(version=2)),
            "torchao Int8DynamicActivationInt8WeightConfig",
        ),
        (
            fields_of(ao.Float8DynamicActivationFloat8WeightConfig()),
            f"torchao Float8DynamicActivationFloat8WeightConfig ({_KEPT})",
        ),
    ],
)
def test_in_words(config: dict[str, Any], expected: str) -> None:
    assert read_quantization(config) is not None
    assert described(config["quantization_config"]) == expected
