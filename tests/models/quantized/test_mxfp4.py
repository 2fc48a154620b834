"""gpt-oss' MXFP4: every value against transformers' function, and which modules are quantised."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.quantizers.quantizers_utils import should_convert_module

from compiled_llm.checkpoint.quantization import published
from compiled_llm.models.config_file import parse_config
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.quantized.mxfp4 import StackedMxfp4, read_mxfp4
from compiled_llm.models.quantized.scheme import StoredPart
from compiled_llm.models.registry import family
from compiled_llm.ops.linear.quantized_weight import dequantize
from tests.mxfp4 import CONFIG, QUANTIZATION

BYTES, SCALES = 256, 253  # greater ones are refused


def all_values() -> tuple[Tensor, Tensor]:
    """Row s: every byte, in blocks of 16, with scale s."""
    blocks = torch.arange(BYTES, dtype=torch.uint8).view(1, BYTES // 16, 16).expand(SCALES, -1, -1)
    return blocks, torch.arange(SCALES, dtype=torch.uint8)[:, None].expand(-1, BYTES // 16)


def test_every_code_with_every_scale_is_transformers_value() -> None:
    blocks, scales = all_values()
    expected = convert_moe_packed_tensors(blocks[None], scales[None], dtype=torch.float32)[0].t()  # it transposes
    scheme = StackedMxfp4()
    rows = scheme.decode({"blocks": blocks, "scales": scales}, 0, SCALES)
    # As the kernels keep them.
    found = dequantize(rows._replace(scales=rows.scales.bfloat16().float()), scheme.form)
    assert found.shape == (SCALES, 2 * BYTES)
    assert torch.equal(found, expected)
    assert torch.equal(found.signbit(), expected.signbit()), "zeros have signs, too"


def test_rows_in_pieces() -> None:
    blocks, scales = all_values()
    whole = StackedMxfp4().decode({"blocks": blocks, "scales": scales}, 0, SCALES)
    piece = StackedMxfp4().decode({"blocks": blocks[7:20], "scales": scales}, 7, 13)
    assert torch.equal(piece.codes, whole.codes[7:20])
    assert torch.equal(piece.scales, whole.scales[7:20])


@pytest.mark.parametrize("code", [253, 254, 255])
def test_scales_that_make_weights_infinite_are_refused(code: int) -> None:
    blocks, scales = torch.zeros(4, 2, 16, dtype=torch.uint8), torch.zeros(4, 2, dtype=torch.uint8)
    scales[3, 1] = code
    StackedMxfp4().decode({"blocks": blocks, "scales": scales}, 0, 3)
    with pytest.raises(ValueError, match=rf"scales must be at most 252, found {code}: .* damaged"):
        StackedMxfp4().decode({"blocks": blocks, "scales": scales}, 2, 2)


def test_what_a_checkpoint_has() -> None:
    assert StackedMxfp4().stored(12, 64) == {
        "blocks": StoredPart(((12, 2, 16),), (torch.uint8,)),
        "scales": StoredPart(((12, 2),), (torch.uint8,)),
    }
    with pytest.raises(ValueError, match=r"in_features must be a multiple of 32 .* found 80"):
        StackedMxfp4().stored(12, 80)


@pytest.mark.parametrize(
    "patterns",
    [
        QUANTIZATION["modules_to_not_convert"],
        [],
        ["model.layers.1"],
        ["model.layers.*.mlp"],
        ["model.layers.1.mlp.exp"],
        ["experts"],
        ["layers.1.mlp.experts"],
        ["model.layers.1*.mlp.experts"],
        ["lm_head", "model.layers.11.mlp.experts"],
        ["*"],
        ["*.experts"],
    ],
)
def test_modules_that_are_not_converted_are_those_of_transformers(patterns: list[str]) -> None:
    scheme = read_mxfp4({"quant_method": "mxfp4", "modules_to_not_convert": patterns})
    # A regex has .* where names of checkpoints have a star between two dots.
    regexes = [pattern if ".*" in pattern else pattern.replace("*", ".*") for pattern in patterns]
    for module in (f"model.layers.{i}.mlp.experts" for i in (0, 1, 11)):
        assert (scheme(f"{module}.down_proj.3") is not None) == should_convert_module(module, regexes)


def test_other_layers_are_plain() -> None:
    scheme = read_mxfp4({"quant_method": "mxfp4"})
    for name in ("lm_head", "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.router"):
        assert scheme(name) is None


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"quant_method": "gptq", "bits": 4}, ["quantization_config", "gptq", "'mxfp4'"]),
        ({"bits": 4}, ["quantization_config", "'mxfp4'"]),
        ("mxfp4", ["quantization_config", "'mxfp4'"]),
        ({"quant_method": ["mxfp4"]}, ["quantization_config", "'mxfp4'"]),
        ({**QUANTIZATION, "group_size": 16}, ["'group_size' of quantization_config"]),
        ({**QUANTIZATION, "modules_to_not_convert": "lm_head"}, ["modules_to_not_convert", "'lm_head'"]),
        ({**QUANTIZATION, "modules_to_not_convert": [1]}, ["modules_to_not_convert", "[1]"]),
        ({**QUANTIZATION, "modules_to_not_convert": ["(a+)+$"]}, ["modules_to_not_convert"]),
        ({**QUANTIZATION, "modules_to_not_convert": ["x"] * 10_001}, ["modules_to_not_convert", "10000"]),
    ],
)
def test_refused_by_name(given: Any, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"config\.json") as error:
        parse_config({**CONFIG, "quantization_config": given})
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(("name", "layer"), [("hidden_size", "gate_up_proj"), ("intermediate_size", "down_proj")])
def test_rows_are_groups_of_32(name: str, layer: str) -> None:
    config = parse_config({**CONFIG, name: 80})
    with pytest.raises(ValueError, match=rf"config\.json: .*\.{layer} .* must be a multiple of 32 .* found 80"):
        family(config.architecture).describe(config, linears=published(config, Dense))


def test_other_families_have_no_mxfp4() -> None:
    fields = {"architectures": ["LlamaForCausalLM"], "quantization_config": QUANTIZATION}
    with pytest.raises(ValueError, match=r"quant_method of quantization_config must be .* given .mxfp4."):
        parse_config(fields)
