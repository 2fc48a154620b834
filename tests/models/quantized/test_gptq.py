"""GPTQ and AWQ: packed here by their documentation, decoded to the same matrix."""

from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm.models.quantized.plan import read_quantization
from compiled_llm.models.quantized.scheme import Scheme
from tests.models.quantized.layers import decoded

N, K = 48, 256
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}


def scheme_of(fields: dict[str, Any]) -> Scheme:
    plan = read_quantization({"quantization_config": fields})
    assert plan is not None
    found = plan.scheme("model.layers.0.mlp.up_proj")
    assert found is not None
    return found


def packed_down(values: Tensor, bits: int) -> Tensor:
    """``[R, C]`` -> ``[R * bits / 32, C]`` int32: row ``r`` from bit ``bits * (r mod 32 / bits)`` on."""
    per_word = 32 // bits
    words = torch.zeros(len(values) // per_word, values.shape[1], dtype=torch.int64)
    for i in range(per_word):
        words |= values[i::per_word].long() << bits * i
    return words.to(torch.int32)


def packed_awq(values: Tensor) -> Tensor:
    """``[R, C]`` -> ``[R, C / 8]`` int32: place i of a word has output (0, 2, 4, 6, 1, 3, 5, 7)[i] of its eight."""
    words = torch.zeros(len(values), values.shape[1] // 8, dtype=torch.int64)
    for i, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
        words |= values[:, output::8].long() << 4 * i
    return words.to(torch.int32)


def gptq_layer(
    bits: int, size: int, *, sym: bool, ordered: bool = False, v2: bool = False
) -> tuple[dict[str, Tensor], Tensor]:
    """A layer's tensors and the matrix ``(q - z) * s`` that they stand for."""
    generator = torch.Generator().manual_seed(bits + size)
    groups = -(-K // size) if size > 0 else 1
    codes = torch.randint(0, 1 << bits, (K, N), generator=generator)
    low = 0 if v2 else 1
    zeros = torch.randint(low, (1 << bits) + low, (groups, N), generator=generator)
    if sym:
        zeros.fill_(1 << bits - 1)
    scales = (torch.rand(groups, N, generator=generator) * 0.01 + 0.001).half()
    g_idx = (torch.arange(K) // (size if size > 0 else K)).int()
    if ordered:
        g_idx = g_idx[torch.randperm(K, generator=generator)]
    matrix = ((codes - zeros[g_idx.long()]) * scales.float()[g_idx.long()]).t()
    tensors = {
        "qweight": packed_down(codes, bits),
        "qzeros": packed_down((zeros - (0 if v2 else 1)).t(), bits).t().contiguous(),
        "scales": scales,
        "g_idx": g_idx,
    }
    return tensors, matrix


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("size", [64, 128, 256, -1])
@pytest.mark.parametrize("sym", [True, False])
def test_gptq(bits: int, size: int, sym: bool) -> None:
    for ordered in (False, True):
        for v2 in (False, True):
            tensors, matrix = gptq_layer(bits, size, sym=sym, ordered=ordered, v2=v2)
            layout = {"checkpoint_format": "gptq_v2"} if v2 else {}
            scheme = scheme_of({**GPTQ, "bits": bits, "group_size": size, "sym": sym, "desc_act": ordered, **layout})
            assert scheme.form.zeros != sym
            torch.testing.assert_close(decoded(scheme, tensors, (N, K)), matrix, rtol=1e-5, atol=1e-6)
            assert (scheme.order(tensors) is not None) == (ordered and size in (64, 128))


def test_gptq_without_groups_of_inputs() -> None:
    tensors, matrix = gptq_layer(4, 64, sym=True)
    del tensors["g_idx"]
    torch.testing.assert_close(decoded(scheme_of(GPTQ), tensors, (N, K)), matrix)


@pytest.mark.parametrize("size", [64, 128, -1])
def test_awq(size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    groups = K // size if size > 0 else 1
    codes = torch.randint(0, 16, (K, N), generator=generator)
    zeros = torch.randint(0, 16, (groups, N), generator=generator)
    scales = (torch.rand(groups, N, generator=generator) * 0.01 + 0.001).half()
    tensors = {"qweight": packed_awq(codes), "qzeros": packed_awq(zeros), "scales": scales}

    def spread(of_groups: Tensor) -> Tensor:
        return of_groups.repeat_interleave(K // groups, 0)

    matrix = ((codes - spread(zeros)) * spread(scales.float())).t()
    found = decoded(scheme_of({**AWQ, "group_size": size}), tensors, (N, K))
    torch.testing.assert_close(found, matrix, rtol=1e-5, atol=1e-6)


def test_modules() -> None:
    def kept(fields: dict[str, Any], module: str) -> bool:
        plan = read_quantization({"quantization_config": fields})
        assert plan is not None
        return plan.scheme(module) is not None

    for fields in (GPTQ, AWQ):
        assert kept(fields, "model.layers.3.mlp.gate_proj")
        for module in ("lm_head", "model.embed_tokens", "model.layers.3.mlp.gate"):
            assert not kept(fields, module)
    dynamic = {**GPTQ, "dynamic": {r"-:.*\.self_attn\..*": {}}}
    assert not kept(dynamic, "model.layers.3.self_attn.q_proj")
    assert kept(dynamic, "model.layers.3.mlp.up_proj")
    only = {**GPTQ, "modules_in_block_to_quantize": [["self_attn.q_proj", "self_attn.k_proj"], ["mlp.up_proj"]]}
    assert kept(only, "model.layers.3.self_attn.q_proj")
    assert not kept(only, "model.layers.3.mlp.down_proj")
    assert kept({**GPTQ, "modules_in_block_to_quantize": ["self_attn"]}, "model.layers.3.self_attn.k_proj")


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({**GPTQ, "bits": 3}, "bits"),
        ({**GPTQ, "bits": None}, "bits"),
        ({**GPTQ, "group_size": 0}, "group_size"),
        ({**GPTQ, "group_size": 1.5}, "group_size"),
        ({**GPTQ, "sym": "true"}, "sym"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format"),
        ({**GPTQ, "lm_head": True}, "lm_head"),
        ({**GPTQ, "dynamic": {"+:.*": {"bits": 8}}}, "dynamic"),
        ({**GPTQ, "modules_in_block_to_quantize": 3}, "modules_in_block_to_quantize"),
        ({**GPTQ, "adapter": {"lora": 1}}, "adapter"),
        ({**AWQ, "version": "gemv"}, "version"),
        ({**AWQ, "bits": 8}, "bits"),
        ({**AWQ, "modules_to_not_convert": "lm_head"}, "modules_to_not_convert"),
    ],
)
def test_refused(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=rf"config\.json: .*{word}"):
        read_quantization({"quantization_config": fields})


def test_values_refused() -> None:
    tensors, _ = gptq_layer(4, 64, sym=False)
    with pytest.raises(ValueError, match="qzeros must be 7 everywhere"):
        decoded(scheme_of(GPTQ), tensors, (N, K))
    tensors["g_idx"].fill_(0)
    with pytest.raises(ValueError, match="g_idx must place 64 inputs"):
        decoded(scheme_of({**GPTQ, "sym": False, "desc_act": True}), tensors, (N, K))
    with pytest.raises(ValueError, match="sizes of a layer must be multiples of 8"):
        scheme_of(GPTQ).stored(N, 36)
