"""Linear layers quantised as they are loaded."""

import pytest
import torch

from compiled_llm.checkpoint.loader import RandomReader
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.protocol import StoredLinear
from compiled_llm.models.linears.quantized import Joined, Quantized, QuantizedExperts
from compiled_llm.models.linears.quantizing import SCHEMES, Quantizing, check_skip
from compiled_llm.models.weights import Source
from compiled_llm.ops.linear.quantized_linear_a8 import quantize_activations_by_groups
from compiled_llm.ops.linear.quantized_weight import dequantize
from compiled_llm.ops.linear.searched_scales import quantize_searched

CPU = torch.device("cpu")
PARTS = [
    StoredLinear("model.embed_tokens", 8, 32, role="head", also="lm_head"),
    StoredLinear("model.layers.1.self_attn.q_proj", 8, 32),
    StoredLinear("model.layers.1.mlp.experts.0.up_proj", 8, 32),
]


def source(kind, dtype=torch.float32):
    return Source(RandomReader(dtype, CPU, 0), kind)


def quantizing(name="int4", **options):
    return Quantizing(Dense, torch.float32, SCHEMES[name], **options)


def as_given(x, scheme):
    """What a layer multiplies."""
    if scheme.activations == "model":
        return x
    size = scheme.form.group_size
    codes, scales = quantize_activations_by_groups(x, size)
    return codes * scales.repeat_interleave(size, 1)[:, : x.shape[1]]


@pytest.mark.parametrize("name", SCHEMES)
def test_a_layer_multiplies_with_its_rounded_weights(name):
    parts = [StoredLinear("a", 24, 96, bias=True), StoredLinear("b", 10, 96, bias=True)]
    plain, layer = source(Dense).linear(*parts), source(quantizing(name)).linear(*parts)
    scheme = SCHEMES[name]
    rounded = dequantize(quantize_searched(plain.weight, scheme.form), scheme.form)
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(1))
    given = as_given(x, scheme)
    torch.testing.assert_close(layer.apply(x), given @ rounded.T + plain.bias, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(layer.rows(torch.tensor([3, 33])), rounded[[3, 33]])
    assert layer.nbytes == scheme.form.nbytes(34, 96) + 34 * 4
    assert (layer.out_features, layer.in_features) == (34, 96)


def test_what_stays_in_the_model_s_dtype():
    kind = quantizing(skip=("model.layers.1", "down_proj", "*.o_proj"))

    def is_quantized(name, role="layer"):
        return kind.scheme(StoredLinear(name, 8, 32, role=role)) is not None

    assert is_quantized("model.layers.0.mlp.up_proj")
    assert not is_quantized("model.layers.1.mlp.up_proj")
    assert is_quantized("model.layers.11.mlp.up_proj")
    assert not is_quantized("model.layers.0.mlp.down_proj")
    assert not is_quantized("model.layers.0.self_attn.o_proj")
    assert not is_quantized("model.layers.0.mlp.gate"), "a router"
    assert not is_quantized("lm_head", "head")
    assert not is_quantized("model.embed_tokens", "embedding")


def test_inputs_with_large_outliers_have_smaller_groups():
    kind = quantizing("int8_w8a8", head=SCHEMES["int8_w8a8"])
    sizes = {
        name: kind.scheme(StoredLinear(name, 8, 256, role=role)).form.group_size
        for name, role in [("l.q_proj", "layer"), ("l.c_attn", "layer"), ("l.down_proj", "layer"), ("lm_head", "head")]
    }
    assert sizes == {"l.q_proj": 32, "l.c_attn": 32, "l.down_proj": 128, "lm_head": 32}
    assert quantizing("int8").scheme(StoredLinear("l.q_proj", 8, 256)) == SCHEMES["int8"]


@pytest.mark.parametrize("pattern", ["layers.1", "q_proj", "lm_head", "embed_tokens", "*.mlp", "experts.0", "*"])
def test_patterns_that_name_a_layer(pattern):
    check_skip([pattern], PARTS)


@pytest.mark.parametrize("pattern", ["layers.12", "qkv_proj", "proj", "lm", "q_proj.weight", "*.norm", "LAYERS.1"])
def test_patterns_that_name_none_are_refused(pattern):
    with pytest.raises(ValueError, match="quantization_skip must name layers") as error:
        check_skip(["layers.1", pattern], PARTS)
    for words in (f"given {pattern!r}", "model.layers.*.mlp.experts.*.up_proj", "embed_tokens, lm_head"):
        assert words in str(error.value)


def test_a_tied_head_has_both_names():
    for skip in ("embed_tokens", "lm_head"):
        kind = quantizing(head=SCHEMES["int8"], skip=(skip,))
        both, _ = source(kind).embedding_and_head("model.embed_tokens", "lm_head", 40, 32, tied=True)
        assert isinstance(both, Dense)


def test_layers_in_another_dtype_than_the_model_s_stay_in_it():
    assert isinstance(source(quantizing()).linear(StoredLinear("a", 8, 32), dtype=torch.bfloat16), Dense)


def test_parts_kept_differently_are_layers_of_their_own():
    parts = [StoredLinear("q_proj", 8, 32), StoredLinear("k_proj", 4, 32)]
    layer = source(quantizing(skip=("k_proj",))).linear(*parts)
    assert isinstance(layer, Joined)
    assert [type(part) for part in layer.layers] == [Quantized, Dense]
    x = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))
    assert torch.equal(layer.apply(x), torch.cat([part.apply(x) for part in layer.layers], 1))


def test_head_and_embedding_are_chosen_apart():
    kind = quantizing(head=SCHEMES["int8"], embedding=SCHEMES["fp8"])
    table, head = source(kind).embedding_and_head("e", "h", 40, 32, tied=False)
    assert (table.scheme, head.scheme) == (SCHEMES["fp8"], SCHEMES["int8"])
    both, head = source(kind).embedding_and_head("e", "h", 40, 32, tied=True)
    assert both is head
    assert head.scheme == SCHEMES["int8"]
    table, head = source(quantizing()).embedding_and_head("e", "h", 40, 32, tied=False)
    assert type(table) is type(head) is Dense


@pytest.mark.parametrize("name", SCHEMES)
def test_experts(name):
    parts = [[StoredLinear(f"{e}.gate", 8, 64), StoredLinear(f"{e}.up", 8, 64)] for e in range(3)]
    parts = [[part._replace(name=part.name + "_proj") for part in one] for one in parts]
    plain, layer = source(Dense).experts(parts, 2), source(quantizing(name)).experts(parts, 2)
    assert isinstance(layer, QuantizedExperts)
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    rows = torch.tensor([0, 3, 1, 2, 2], dtype=torch.int32)
    starts = torch.tensor([0, 2, 2, 5], dtype=torch.int32)
    form = SCHEMES[name].form
    rounded = torch.stack([dequantize(quantize_searched(own, form), form) for own in plain.weight])
    given = as_given(x, SCHEMES[name])
    expected = Dense.take_experts(_Of(rounded), parts, 2).apply_to(given, rows, starts)
    torch.testing.assert_close(layer.apply_to(x, rows, starts), expected, atol=1e-4, rtol=1e-4)
    assert layer.nbytes == 3 * form.nbytes(16, 64)


class _Of:
    """A ``Take`` of the matrices of experts, stacked."""

    dtype, device = torch.float32, CPU

    def __init__(self, stacked):
        self.stacked = stacked

    def rows(self, shapes, put):
        put(0, self.stacked.flatten(0, 1))


def test_experts_of_a_layer_are_skipped_together():
    parts = [[StoredLinear("0.up_proj", 8, 32)], [StoredLinear("1.up_proj", 8, 32)]]
    with pytest.raises(ValueError, match="quantization_skip must name all experts"):
        source(quantizing(skip=("0.up_proj",))).experts(parts, 1)
