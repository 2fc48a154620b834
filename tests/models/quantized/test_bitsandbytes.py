"""bitsandbytes' NF4: the published code book and formula, value by value, and what is refused."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BitsAndBytesConfig

from compiled_llm.models.quantized.bitsandbytes import Nf4
from compiled_llm.models.quantized.plan import read_quantization
from compiled_llm.ops.linear.quantized_weight import dequantize, quantize

CONFIG: dict[str, Any] = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
# As bitsandbytes' functional.py has them: quantiles of the normal distribution.
VALUES = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip
STATE = "weight.quant_state.bitsandbytes__nf4"
N, K = 48, 320  # absmax has 240 blocks; the tests of whole models have more than the 256 of a nested block


def as_nf4(matrix: Tensor, nested: bool) -> dict[str, Tensor]:
    """The tensors of a layer as transformers saves them, and "dequantised"."""
    blocks = matrix.float().reshape(-1, 64)
    absmax = blocks.abs().amax(1)
    codes = (blocks[:, :, None] / absmax[:, None, None] - VALUES).abs().argmin(2)
    first, second = codes.flatten().to(torch.uint8).view(-1, 2).unbind(1)
    state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": [*matrix.shape]}
    tensors = {"weight": (first << 4 | second)[:, None], "weight.absmax": absmax, "weight.quant_map": VALUES.clone()}
    if nested:
        offset = float(absmax.mean())
        nested_map = torch.linspace(-1, 1, 256) ** 3
        places = torch.arange(len(absmax)) // 256
        largest = torch.stack([(absmax[places == i] - offset).abs().amax() for i in range(int(places[-1]) + 1)])
        held = ((absmax - offset)[:, None] / largest[places][:, None] - nested_map).abs().argmin(1)
        absmax = nested_map[held] * largest[places] + offset
        tensors |= {"weight.absmax": held.to(torch.uint8)}
        tensors |= {"weight.nested_absmax": largest, "weight.nested_quant_map": nested_map}
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
    tensors[STATE] = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return tensors | {"dequantised": (VALUES[codes] * absmax[:, None]).view(matrix.shape)}


def layer(nested: bool, rows: int = N) -> dict[str, Tensor]:
    return as_nf4(torch.randn(rows, K, generator=torch.Generator().manual_seed(0)), nested)


@pytest.mark.parametrize("nested", [False, True])
def test_every_value_is_that_of_the_formula(nested: bool) -> None:
    tensors, scheme = layer(nested), Nf4(nested)
    expected = tensors.pop("dequantised")
    for name, part in scheme.stored(N, K).items():
        assert tuple(tensors[name].shape) in part.shapes or name == STATE, name
        assert tensors[name].dtype in part.dtypes, name
    assert tensors.keys() == scheme.stored(N, K).keys()
    for first, count in ((0, N), (16, 16), (47, 1)):
        found = dequantize(scheme.decode(tensors, first, count), scheme.form)
        assert torch.equal(found, expected[first : first + count])


def test_values_are_rounded_to_the_nearest() -> None:
    matrix = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    rows, form = quantize(matrix, Nf4(False).form), Nf4(False).form
    assert torch.equal(dequantize(rows, form), as_nf4(matrix, nested=False)["dequantised"])


def test_a_config_that_transformers_writes_is_read() -> None:
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        llm_int8_skip_modules=["lm_head", "layers.1"],
    ).to_dict()
    plan = read_quantization({"quantization_config": {**config, "quant_method": "bitsandbytes"}})
    assert plan is not None
    assert plan.scheme("model.layers.0.mlp.up_proj") == Nf4(nested=True)
    for left in ("model.layers.1.mlp.up_proj", "lm_head", "model.embed_tokens", "model.layers.0.mlp.gate"):
        assert plan.scheme(left) is None


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"load_in_4bit": False, "load_in_8bit": True}, "load_in_8bit"),
        ({"load_in_4bit": None}, "load_in_4bit"),
        ({"bnb_4bit_quant_type": "fp4"}, "bnb_4bit_quant_type"),
        ({"bnb_4bit_quant_storage": "bfloat16"}, "bnb_4bit_quant_storage"),
        ({"bnb_4bit_use_double_quant": "yes"}, "bnb_4bit_use_double_quant"),
        ({"llm_int8_skip_modules": "lm_head"}, "llm_int8_skip_modules"),
    ],
)
def test_refused(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=rf"config\.json: .*{word}"):
        read_quantization({"quantization_config": {**CONFIG, **fields}})


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ("{", "must be JSON"),
        ("[" * 4000, "must be JSON"),
        (" " * 5000, "4096 bytes at most, found 5000"),
        ("[1]", "quant_type 'nf4' and blocksize 64"),
        ({"quant_type": "fp4"}, r"quant_type 'nf4' and blocksize 64, given \('fp4', 64\)"),
        ({"blocksize": 128}, "blocksize 64, given .*128"),
        ({"shape": [N * K]}, "a shape of two numbers"),
        ({"shape": [N, K + 64]}, f"the shape of the layer, given {N} x {K + 64}"),
        ({"shape": [N // 2, 2 * K]}, f"the shape of the layer, given {N // 2} x {2 * K}"),
        ({"nested_offset": None}, "nested_offset, a number"),
        ({"nested_blocksize": 128}, "nested_blocksize 256"),
    ],
)
def test_a_damaged_state_is_refused(state: str | dict[str, Any], words: str) -> None:
    tensors = layer(nested=True)
    if isinstance(state, dict):
        state = json.dumps(json.loads(bytes(tensors[STATE].tolist())) | state)
    tensors[STATE] = torch.tensor(list(state.encode()), dtype=torch.uint8)
    with pytest.raises(ValueError, match=words):
        Nf4(nested=True).decode(tensors, 0, N)


def test_other_values_are_refused() -> None:
    tensors = layer(nested=False)
    with pytest.raises(ValueError, match=r"weight\.quant_map must have the 16 values of NF4"):
        Nf4(nested=False).decode({**tensors, "weight.quant_map": VALUES.flip(0)}, 0, N)
    with pytest.raises(ValueError, match=r"weight\.absmax must hold finite numbers"):
        Nf4(nested=False).decode({**tensors, "weight.absmax": torch.full((N * K // 64,), torch.nan)}, 0, N)
    with pytest.raises(ValueError, match="a multiple of 64 where weights are nf4, found 96"):
        Nf4(nested=False).stored(N, 96)
