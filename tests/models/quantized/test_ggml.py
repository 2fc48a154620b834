"""Every kind of block holds what the gguf library says that it holds."""

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from compiled_llm.models.quantized import ggml
from compiled_llm.models.quantized.ggml import BLOCKS, PLAIN, Ggml, dequantized, read_ggml
from compiled_llm.ops.linear.quantized_layouts import empty_quantized, pack_quantized_rows, unpack_quantized_rows
from compiled_llm.ops.linear.quantized_weight import QuantizedRows, WeightFormat, as_kept, dequantize

# Where a block has its float16 scales, of the kinds that the library does not write.
SCALES_AT = {"Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,)}
SCALES_AT |= {"IQ4_XS": (0,)}


def rows(kind: str) -> np.ndarray:
    """Three rows of 512 elements."""
    generator = np.random.default_rng(0)
    values = generator.standard_normal((3, 512), dtype=np.float32)
    if kind not in SCALES_AT:
        return gguf.quants.quantize(values, Kind[kind])
    block = BLOCKS[kind]
    made = generator.integers(0, 256, (3, 512 // block.size, block.nbytes), dtype=np.uint8)
    for at in SCALES_AT[kind]:
        made[..., at : at + 2] = generator.standard_normal((3, made.shape[1], 1)).astype(np.float16).view(np.uint8)
    return made.reshape(3, -1)


def test_numbers_and_sizes_are_the_librarys() -> None:
    for kind, block in BLOCKS.items():
        assert (block.number, (block.size, block.nbytes)) == (Kind[kind], gguf.GGML_QUANT_SIZES[Kind[kind]]), kind
    for kind, (number, dtype) in PLAIN.items():
        assert (number, dtype.itemsize) == (Kind[kind], gguf.GGML_QUANT_SIZES[Kind[kind]][1]), kind


@pytest.mark.parametrize("kind", BLOCKS)
def test_values_are_the_librarys(kind: str) -> None:
    held = rows(kind)
    expected = torch.from_numpy(gguf.quants.dequantize(held, Kind[kind]))
    torch.testing.assert_close(dequantized(torch.from_numpy(held), kind), expected, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("kind", BLOCKS)
def test_torch_decodes_as_the_library_in_cpp(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {"weight": torch.from_numpy(rows(kind))}
    tensors["weight"].view(3, -1, BLOCKS[kind].nbytes)[1, 0, :4] = 0  # of Q4_1 and others a group without a scale
    found = Ggml(kind).decode(tensors, 0, 3)
    monkeypatch.setattr(ggml, "decode_blocks", lambda *arguments: None)
    for ours, expected in zip(found, Ggml(kind).decode(tensors, 0, 3), strict=True):
        assert (ours is None and expected is None) or torch.equal(ours, expected)


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_1", "Q6_K", "Q8_0"])
@pytest.mark.parametrize("size", [1.0, 1e-3, 1e-5])
def test_a_model_of_16_bits_keeps_scales_in_float16(kind: str, size: float) -> None:
    """Values are as near as bfloat16's, also where scales are float16's smallest numbers."""
    held = rows(kind)
    for at in SCALES_AT.get(kind, (0,)):
        blocks = held.reshape(3, -1, BLOCKS[kind].nbytes)
        scales = np.ascontiguousarray(blocks[..., at : at + 2]).view(np.float16)
        blocks[..., at : at + 2] = (scales * size).astype(np.float16).view(np.uint8)
    scheme = Ggml(kind)
    form = scheme.kept({"weight": torch.uint8}, torch.bfloat16)
    assert scheme.kept({"weight": torch.uint8}, torch.float32) == scheme.form
    decoded = scheme.decode({"weight": torch.from_numpy(held)}, 0, 3)
    weight = empty_quantized(form, 3, 512, torch.device("cpu"))
    pack_quantized_rows(weight, 0, decoded, form)
    kept = dequantize(unpack_quantized_rows(weight, torch.arange(3), form, 512), form)
    expected = dequantize(decoded, scheme.form)
    groups = expected.view(3, -1, form.group_size).abs().amax(2, keepdim=True).expand(-1, -1, form.group_size)
    assert ((kept - expected).abs() <= groups.reshape(3, -1) * 2**-9 + 31 * 2**-25).all()


def test_codes_that_vanish_beside_their_zero_point() -> None:
    form = WeightFormat("int4", 16, zeros=True, scale_dtype="float16", zero_dtype="float16")
    codes, scales = torch.arange(-8, 8).to(torch.int8).repeat(1, 2), torch.tensor([[1e-9, 0.5]])
    kept = as_kept(QuantizedRows(codes, scales, torch.tensor([[-3e8, 7.0]])), form)
    assert torch.allclose(dequantize(kept, form)[:, :16], torch.tensor(0.3))
    assert torch.equal(kept.codes[:, 16:], codes[:, 16:])


def test_a_group_without_a_scale_is_its_least_value() -> None:
    held = gguf.quants.quantize(np.full((1, 32), 0.75, np.float32), Kind.Q4_1)
    assert dequantized(torch.from_numpy(held), "Q4_1").eq(0.75).all()


def test_a_scale_that_is_not_finite_is_refused() -> None:
    held = rows("Q8_0")
    held[1, :2] = np.array([np.inf], np.float16).view(np.uint8)
    with pytest.raises(ValueError, match="scales and least values must be numbers up to 65504"):
        dequantized(torch.from_numpy(held), "Q8_0")


def test_layers_by_their_names() -> None:
    kinds = {"Q4_K": ["model.layers.0.mlp.experts.*.up_proj"], "Q8_0": ["lm_head"]}
    scheme = read_ggml({"quant_method": "gguf", "kinds": kinds})
    assert scheme("model.layers.0.mlp.experts.17.up_proj") == Ggml("Q4_K")
    assert scheme("lm_head") == Ggml("Q8_0")
    assert scheme("model.layers.0.mlp.up_proj") is None
    with pytest.raises(ValueError, match=r"kinds must be of Q4_0, .* given 'Q9'"):
        read_ggml({"quant_method": "gguf", "kinds": {"Q9": ["lm_head"]}})
    with pytest.raises(ValueError, match="in_features must be a multiple of 256 for Q4_K, found 160"):
        Ggml("Q4_K").stored(8, 160)
