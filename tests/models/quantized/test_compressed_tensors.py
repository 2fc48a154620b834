"""compressed-tensors: codes as its library writes them, modules as its library matches them, and what is refused."""

from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from compressed_tensors.utils.match import match_targets
from torch import Tensor

from compiled_llm.models.quantized.plan import read_quantization
from compiled_llm.models.quantized.scheme import Scheme
from tests.models.quantized.layers import decoded

N, K = 48, 256
W4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
W8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FP8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"}
DYNAMIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
STATIC = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "pack-quantized": ("pack-quantized", W4),
    "pack-quantized, zero points": ("pack-quantized", {**W4, "symmetric": False}),
    "pack-quantized, channels": ("pack-quantized", {**W4, "strategy": "channel", "group_size": None}),
    "pack-quantized, channels, zero points": (
        "pack-quantized", {**W4, "strategy": "channel", "group_size": None, "symmetric": False}
    ),
    "pack-quantized, tensor": ("pack-quantized", {**W4, "strategy": "tensor", "group_size": None}),
    "pack-quantized, large groups": ("pack-quantized", {**W4, "group_size": 256, "symmetric": False}),
    "pack-quantized, actorder": ("pack-quantized", {**W4, "actorder": "weight"}),
    "pack-quantized, 8 bits": ("pack-quantized", {**W8, "strategy": "group", "group_size": 32}),
    "pack-quantized, 8 bits, zero points": ("pack-quantized", {**W8, "symmetric": False}),
    "int-quantized": ("int-quantized", W8),
    "int-quantized, tensor": ("int-quantized", {**W8, "strategy": "tensor"}),
    "int-quantized, zero points": ("int-quantized", {**W8, "symmetric": False}),
    "int-quantized, 4 bits": ("int-quantized", W4),
    "naive-quantized": ("naive-quantized", {**W8, "strategy": "group", "group_size": 128}),
    "float-quantized": ("float-quantized", FP8),
    "float-quantized, tensor": ("float-quantized", {**FP8, "strategy": "tensor"}),
    "float-quantized, blocks": ("float-quantized", {**FP8, "strategy": "block", "block_structure": [32, 128]}),
    "naive-quantized, float": ("naive-quantized", FP8),
}  # fmt: skip


def config(format_: str, weights: dict[str, Any], **group: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, **group}}
    fields = {"quant_method": "compressed-tensors", "format": format_, "ignore": ["lm_head"], "config_groups": groups}
    return {"quantization_config": fields}


def scheme_of(given: dict[str, Any], module: str = "model.layers.0.mlp.up_proj") -> Scheme:
    plan = read_quantization(given)
    assert plan is not None
    found = plan.scheme(module)
    assert found is not None
    return found


def published(format_: str, weights: dict[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
    """A layer's tensors as the library compresses a random matrix, and the matrix that it makes of them."""
    args = QuantizationScheme(targets=["Linear"], weights=weights)
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(N, K, generator=generator) + 0.3
    strategy, size = weights["strategy"], weights.get("group_size") or K
    down, across = weights.get("block_structure", (1, size))
    shape = (1,) if strategy == "tensor" else (-(-N // down), K // across)
    least, most = (-448.0, 448.0) if weights["type"] == "float" else (-(2.0 ** (weights["num_bits"] - 1)), 0)
    scale = torch.rand(shape, generator=generator) * 0.02 / max(most, 1) ** 0.5 + 3 / -least
    state = {"weight": matrix, "weight_scale": scale}
    zeros = torch.zeros(shape)
    if not weights["symmetric"]:
        zeros = torch.randint(int(least), -int(least), shape, generator=generator)
    dtype = torch.float8_e4m3fn if weights["type"] == "float" else torch.int8
    state["weight_zero_point"] = zeros.to(dtype)
    compressor = BaseCompressor.get_value_from_registry(format_)
    made = compressor.compress(state, args)
    return made, compressor.decompress(made, args)["weight"]


@pytest.mark.parametrize("name", CASES)
def test_what_the_library_writes(name: str) -> None:
    made, expected = published(*CASES[name])
    scheme = scheme_of(config(*CASES[name]))
    torch.testing.assert_close(decoded(scheme, made, (N, K)), expected, rtol=1e-6, atol=1e-6)
    assert scheme.activations == "model"


@pytest.mark.parametrize("size", [16, 32])
def test_fp4(size: int) -> None:
    """Against the library's own unpacking of random bytes."""
    format_ = "nvfp4-pack-quantized" if size == 16 else "mxfp4-pack-quantized"
    weights = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group" if size == 16 else "group",
        "group_size": size,
    }
    generator = torch.Generator().manual_seed(0)
    state = {"weight_packed": torch.randint(0, 256, (N, K // 2), generator=generator, dtype=torch.uint8)}
    if size == 16:
        scales = torch.rand(N, K // size, generator=generator) * 400 + 1
        state |= {"weight_scale": scales.to(torch.float8_e4m3fn), "weight_global_scale": torch.tensor([37.5])}
    else:
        state["weight_scale"] = torch.randint(118, 130, (N, K // size), generator=generator, dtype=torch.uint8)
    compressor = BaseCompressor.get_value_from_registry(format_)
    expected = compressor.decompress(state, QuantizationScheme(targets=["Linear"], weights=weights))["weight"]
    scheme = scheme_of(config(format_, weights))
    assert scheme.form.element == "fp4"
    assert scheme.form.scale_dtype == ("float32" if size == 16 else "bfloat16")
    torch.testing.assert_close(decoded(scheme, state, (N, K)), expected.float(), rtol=2**-7, atol=0)  # theirs: bfloat16


def test_order_by_activations() -> None:
    """``actorder`` "group" of checkpoints from before it was taken out of the library."""
    made, expected = published("pack-quantized", W4)
    order = torch.randperm(K, generator=torch.Generator().manual_seed(1))
    g_idx = torch.empty(K, dtype=torch.int32)
    g_idx[order] = (torch.arange(K) // 64).int()
    unpacked = torch.stack([made["weight_packed"] >> 4 * i & 15 for i in range(8)], 2).flatten(1)
    stored = torch.empty_like(unpacked)
    stored[:, order] = unpacked
    shifts = torch.arange(8) * 4
    made["weight_packed"] = (stored.view(N, -1, 8) << shifts).sum(2).to(torch.int32)
    made["weight_g_idx"] = g_idx
    wanted = torch.empty_like(expected)
    wanted[:, order] = expected
    scheme = scheme_of(config("pack-quantized", {**W4, "actorder": "group"}))
    torch.testing.assert_close(decoded(scheme, made, (N, K)), wanted)
    made["weight_g_idx"][:2] = 0
    with pytest.raises(ValueError, match="weight_g_idx must place 64 inputs in each of 4 groups"):
        decoded(scheme, made, (N, K))


def test_activations() -> None:
    for inputs, expected in [
        (None, ("model", False)),
        (DYNAMIC, ("int8", False)),
        (STATIC, ("int8", True)),
        ({**DYNAMIC, "symmetric": False}, ("model", False)),
    ]:
        scheme = scheme_of(config("int-quantized", W8, input_activations=inputs))
        assert (scheme.activations, scheme.static_activations) == expected
        assert scheme.stored(N, K)["input_scale"].required == expected[1]
    assert (
        scheme_of(config("float-quantized", FP8, input_activations={**DYNAMIC, "type": "float"})).activations == "model"
    )


def test_modules_are_those_of_the_library() -> None:
    linear = torch.nn.Linear(1, 1)
    targets = ["Linear", r"re:.*\.0\..*", "model.layers.0.mlp.up_proj", "re:.*down_proj"]
    groups = {
        f"group_{i}": {"targets": [target], "weights": {**W4, "group_size": 16 * (i + 1)}}
        for i, target in enumerate(targets)
    }
    given = config("pack-quantized", W4)
    given["quantization_config"] |= {"config_groups": groups, "ignore": ["lm_head", "re:.*k_proj$"]}
    for layer in (0, 1):
        for name in ("mlp.up_proj", "mlp.down_proj", "self_attn.q_proj"):
            module = f"model.layers.{layer}.{name}"
            expected = targets.index(match_targets(module, linear, targets)[0])
            assert scheme_of(given, module).form.group_size == 16 * (expected + 1)
    plan = read_quantization(given)
    assert plan is not None
    for module in ("lm_head", "model.layers.1.self_attn.k_proj", "model.embed_tokens"):
        assert plan.scheme(module) is None


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        ({"format": "marlin-24"}, ["format", "'pack-quantized'", "marlin-24"]),
        ({"format": None}, ["format", "None"]),
        ({"config_groups": None}, ["config_groups", "None"]),
        ({"config_groups": {"W8A8": ["Linear"]}}, ["config_groups", "W8A8"]),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, ["sparsity_config", "sparse-24"]),
        ({"transform_config": {"config_groups": {}}}, ["transform_config"]),
        ({"ignore": "lm_head"}, ["ignore", "list"]),
        ({"ignore": ["re:(a"]}, ["pattern", "(a"]),
        ({"quantization_status": "calibration"}, ["quantization_status", "calibration"]),
        ({"rotation": 3}, ["rotation"]),
    ],
)
def test_refused(edit: dict[str, Any], words: list[str]) -> None:
    given = config("pack-quantized", W4)
    given["quantization_config"] |= edit
    with pytest.raises(ValueError, match=r"config\.json") as error:
        read_quantization(given)
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize(
    ("edit", "word"),
    [
        ({"num_bits": 3}, "num_bits"),
        ({"type": "float"}, "float of 8"),
        ({"group_size": 24}, "group_size"),
        ({"group_size": 2**63}, "group_size"),
        ({"group_size": "64"}, "group_size"),
        ({"strategy": "attn_head"}, "strategy"),
        ({"symmetric": "yes"}, "symmetric"),
        ({"dynamic": True}, "dynamic"),
        ({"actorder": "other"}, "actorder"),
        ({"strategy": "block", "block_structure": [0, 128]}, "block_structure"),
        ({"lattice": 1}, "lattice"),
    ],
)
def test_numbers_refused(edit: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        read_quantization(config("pack-quantized", {**W4, **edit}))


def test_classes_refused() -> None:
    given = config("pack-quantized", W4)
    given["quantization_config"]["config_groups"]["group_0"]["targets"] = ["LlamaAttention"]
    with pytest.raises(ValueError, match=r"targets .* 'LlamaAttention'"):
        read_quantization(given)


def test_values_refused() -> None:
    made, _ = published("pack-quantized", W4)
    scheme = scheme_of(config("pack-quantized", W4))
    with pytest.raises(ValueError, match="weight_scale must hold finite numbers"):
        decoded(scheme, {**made, "weight_scale": made["weight_scale"] / 0}, (N, K))
    with pytest.raises(ValueError, match="weight_shape must be the size"):
        decoded(scheme, {**made, "weight_shape": torch.tensor([N, K + 8])}, (N, K))
    made, _ = published("int-quantized", W4)
    with pytest.raises(ValueError, match="weight must be from -8 to 7"):
        decoded(scheme_of(config("int-quantized", W4)), {**made, "weight": made["weight"] * 9}, (N, K))
