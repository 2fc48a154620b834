"""Which modules a ``quantization_config`` leaves as they are, by the rule of each method."""

from typing import Any

import pytest
from transformers.quantizers.quantizers_utils import should_convert_module

from compiled_llm.models.quantized.plan import read_quantization
from tests.models.quantized.test_compressed_tensors import FP8 as FP8_WEIGHTS
from tests.models.quantized.test_compressed_tensors import config

AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm"}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MODELOPT = {"quant_method": "modelopt", "quant_algo": "FP8"}
TORCHAO = {
    "quant_method": "torchao",
    "quant_type": {
        "default": {"_type": "Int8WeightOnlyConfig", "_version": 2, "_data": {"granularity": {"_type": "PerRow"}}}
    },
}
Q_PROJ = "model.layers.0.self_attn.q_proj"
OTHERS = ["model.layers.0.mlp.gate_proj", "model.layers.10.self_attn.q_proj", "model.layers.1.linear_attn.in_proj_qkv"]


def quantised(given: dict[str, Any], module: str) -> bool:
    plan = read_quantization(given if "quantization_config" in given else {"quantization_config": given})
    assert plan is not None
    return plan.scheme(module) is not None


# pattern -> those of Q_PROJ and OTHERS that are left, by a part of the name, and by parts that are separated by dots.
CASES = {
    "self_attn": ([Q_PROJ, OTHERS[1]], [Q_PROJ, OTHERS[1]]),
    "layers.0.": ([Q_PROJ, OTHERS[0]], [Q_PROJ, OTHERS[0]]),
    "layers.1": ([OTHERS[1], OTHERS[2]], [OTHERS[2]]),
    "mlp.gate": ([OTHERS[0]], []),
    "model.layers.0.self_attn": ([Q_PROJ], [Q_PROJ]),
    "linear_attn.in_proj_qkv": ([OTHERS[2]], [OTHERS[2]]),
    "q_proj": ([Q_PROJ, OTHERS[1]], [Q_PROJ, OTHERS[1]]),
    "model.layers.*.self_attn": ([Q_PROJ, OTHERS[1]], [Q_PROJ, OTHERS[1]]),
    r"model\.layers\.\d+\.self_attn": ([Q_PROJ, OTHERS[1]], [Q_PROJ, OTHERS[1]]),
    "model.language_model.layers.0.mlp.gate_proj": ([OTHERS[0]], [OTHERS[0]]),
    "language_model.model.layers.0": ([Q_PROJ, OTHERS[0]], [Q_PROJ, OTHERS[0]]),
    "lm_head": ([], []),
}


@pytest.mark.parametrize("pattern", CASES)
def test_patterns_without_re(pattern: str) -> None:
    by_part, by_parts = CASES[pattern]
    every = [Q_PROJ, *OTHERS]
    methods = [(AWQ, "modules_to_not_convert"), (FP8, "modules_to_not_convert"), (FP8, "ignored_layers")]
    methods += [(MODELOPT, "exclude_modules"), (MODELOPT, "ignore"), (TORCHAO, "modules_to_not_convert")]
    for given, field in methods:
        left = [module for module in every if not quantised({**given, field: [pattern]}, module)]
        assert left == (by_part if given is AWQ else by_parts), (given, field)
    # What transformers 5 leaves is left.
    assert {module for module in every if not should_convert_module(module, [pattern])} <= set(by_parts)


def test_compressed_tensors_names_whole_modules() -> None:
    for pattern, left in {
        "self_attn": [],
        Q_PROJ: [Q_PROJ],
        "model.language_model.layers.0.self_attn.q_proj": [Q_PROJ],
        r"re:.*self_attn.*": [Q_PROJ, OTHERS[1]],
        r"re:.*language_model\.layers\.0\..*": [Q_PROJ, OTHERS[0]],
        r"re:layers": [],
    }.items():
        given = config("float-quantized", FP8_WEIGHTS)
        given["quantization_config"]["ignore"] = [pattern]
        assert [module for module in (Q_PROJ, *OTHERS) if not quantised(given, module)] == left


@pytest.mark.parametrize("pattern", ["re:(a", "(a", "a{3}", r"re:\bself_attn"])
def test_expressions_that_are_not_read_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match=r"config\.json: the pattern"):
        quantised({**FP8, "modules_to_not_convert": [pattern]}, Q_PROJ)
