"""Encoded matrices: every value of MXFP4 against transformers' function, and which modules are encoded."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.quantizers.quantizers_utils import should_convert_module

from compiled_llm.models.config_file import parse_config
from compiled_llm.models.encoding import Mxfp4, Quantization, Stored
from tests.mxfp4 import CONFIG, QUANTIZATION

BYTES, SCALES = 256, 256


def all_values() -> tuple[Tensor, Tensor]:
    """Row s: every byte, in blocks of 16, with scale s."""
    blocks = torch.arange(BYTES, dtype=torch.uint8).view(1, BYTES // 16, 16).expand(SCALES, -1, -1)
    return blocks, torch.arange(SCALES, dtype=torch.uint8)[:, None].expand(-1, BYTES // 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_every_code_with_every_scale_is_transformers_value(dtype: torch.dtype) -> None:
    blocks, scales = all_values()
    expected = convert_moe_packed_tensors(blocks[None], scales[None], dtype=dtype)[0].t()  # it transposes
    found = Mxfp4().decode([blocks.flatten(1), scales]).to(dtype)
    assert found.shape == (SCALES, 2 * BYTES)
    numbers = slice(0, 255)  # the last scale is NaN by the standard; transformers' function takes it for 2 ** 128
    assert torch.equal(found[numbers], expected[numbers])
    assert torch.equal(found[numbers].signbit(), expected[numbers].signbit()), "zeros have signs, too"
    assert found[255].isnan().all()


def test_threads_decode_side_by_side() -> None:
    generator, encoding = torch.Generator().manual_seed(0), Mxfp4()
    pieces = [
        [torch.randint(0, 256, (n, size), dtype=torch.uint8, generator=generator) for size in (64, 4)]
        for n in range(1, 60)
    ]
    alone = [Mxfp4().decode(piece) for piece in pieces]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda piece: encoding.decode(piece).clone(), pieces))
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one.view(torch.int16), other.view(torch.int16))


def test_what_a_checkpoint_has() -> None:
    assert Mxfp4().stored("a.gate_up_proj", (5, 12, 64)) == {
        "a.gate_up_proj_blocks": Stored((5, 12, 2, 16), torch.uint8),
        "a.gate_up_proj_scales": Stored((5, 12, 2), torch.uint8),
    }


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
    quantization = Quantization("mxfp4", tuple(patterns))
    # A regex has .* where names of checkpoints have a star between two dots.
    regexes = [pattern if ".*" in pattern else pattern.replace("*", ".*") for pattern in patterns]
    for module in (f"model.layers.{i}.mlp.experts" for i in (0, 1, 11)):
        assert (quantization.encoding(module) is not None) == should_convert_module(module, regexes)


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
        ({**QUANTIZATION, "modules_to_not_convert": ["x"] * 1001}, ["modules_to_not_convert", "1000"]),
    ],
)
def test_refused_by_name(given: Any, words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"config\.json") as error:
        parse_config({**CONFIG, "quantization_config": given})
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("name", ["hidden_size", "intermediate_size"])
def test_rows_are_groups_of_32(name: str) -> None:
    with pytest.raises(ValueError, match=rf"config\.json: {name} must be a multiple of 32 .* given 80"):
        parse_config({**CONFIG, name: 80})


def test_other_families_have_no_mxfp4() -> None:
    fields = {"architectures": ["LlamaForCausalLM"], "quantization_config": QUANTIZATION}
    with pytest.raises(ValueError, match=r"quant_method of quantization_config must be .* given .mxfp4."):
        parse_config(fields)
