"""Whole models: logits of quantised checkpoints are those of transformers' own dequantised forward, in float32.

Layouts that transformers loads on a CPU are made and read by the libraries that define them. GPTQ, AWQ and layouts
that these libraries no longer write are packed here by their documentation; transformers then gets the matrices that
they stand for. So it is with activations that are quantised by row too: compressed-tensors and torchao divide by
absmax / 127.5, vLLM's kernels and ours by absmax / 127, and our rule is hooked into transformers' layers.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torchao.quantization as ao
import transformers
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from torch import Tensor

from compiled_llm.checkpoint import loader, quantization
from compiled_llm.models.config_file import read_config
from compiled_llm.models.linears.packed import Packed
from compiled_llm.models.weights import tensors
from tests.checkpoint.test_reader import logits, rounded, write
from tests.models.quantized import test_bitsandbytes as bitsandbytes
from tests.models.quantized import test_compressed_tensors as ct
from tests.models.quantized import test_gptq as gptq

_SMALL = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 307, "max_position_embeddings": 64,
    "initializer_range": 0.1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
# What each has besides.
_MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "llama": {},
    "glm": {},
    "qwen3_moe": {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
}
Layer = dict[str, Tensor]  # its tensors by their last names, and "dequantised"


class Case(NamedTuple):
    """A layout.

    Attributes:
        transformers: what it reads: "checkpoint": the quantised one itself; "matrices": what the codes stand for;
            "rows": these, with inputs rounded to int8 by our rule.
        skip: ends of the names of layers that are left as they are.
    """

    make: Callable[[Tensor], Layer]
    fields: dict[str, Any]
    transformers: str = "checkpoint"
    skip: tuple[str, ...] = ("gate",)


def compressed(matrix: Tensor, format_: str, weights: dict[str, Any], *, static: bool = False) -> Layer:
    """As compressed-tensors writes it."""
    args = QuantizationScheme(targets=["Linear"], weights=weights)
    rows, columns = matrix.shape
    strategy, size = weights["strategy"], weights.get("group_size") or columns
    down, across = {"tensor": (rows, columns), "block": weights.get("block_structure")}.get(strategy) or (1, size)
    blocks = matrix.view(rows // down, down, columns // across, across)
    low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    most = 448.0 if weights["type"] == "float" else 2.0 ** (weights["num_bits"] - 1) - 1
    scale = torch.maximum(-low, high) / most
    zero = torch.zeros_like(scale)
    if not weights["symmetric"]:
        scale = (high - low) / (2 * most + 1)
        zero = torch.round(-most - 1 - low / scale).clamp(-most - 1, most)
    shape = (1,) if strategy == "tensor" else tuple(scale.shape)
    state = {
        "weight": matrix,
        "weight_scale": scale.view(shape),
        "weight_zero_point": zero.view(shape).to(torch.float8_e4m3fn if weights["type"] == "float" else torch.int8),
    }
    compressor = BaseCompressor.get_value_from_registry(format_)
    made = compressor.compress(state, args)
    made["dequantised"] = compressor.decompress(made, args)["weight"]
    if static:
        made["input_scale"] = torch.tensor([0.11])
    return made


def case(format_: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None, ignore: str = "") -> Case:
    static = inputs is not None and not inputs["dynamic"]
    fields = ct.config(format_, weights, input_activations=inputs)["quantization_config"]
    fields["quantization_status"] = "compressed"
    fields["ignore"] += ["re:.*gate$", *([f"re:.*{ignore}$"] if ignore else [])]
    make = functools.partial(compressed, format_=format_, weights=weights, static=static)
    reads = "rows" if inputs and inputs["dynamic"] else "checkpoint"
    # transformers makes room for zero points that are not packed, and takes int8 without activations for packed.
    if (format_, weights["symmetric"], inputs) in [
        ("pack-quantized", False, None),
        ("int-quantized", True, None),
        ("int-quantized", False, None),
    ]:
        reads = "matrices"
    return Case(make, fields, reads, ("gate", ignore) if ignore else ("gate",))


def by_activations(matrix: Tensor) -> Layer:
    """``actorder`` "group": columns quantised in another order, then laid back."""
    order = torch.randperm(matrix.shape[1], generator=torch.Generator().manual_seed(matrix.shape[1]))
    made = compressed(matrix[:, order].contiguous(), "pack-quantized", ct.W4)
    codes = torch.stack([made["weight_packed"] >> 4 * i & 15 for i in range(8)], 2).flatten(1)
    g_idx, laid, dequantised = torch.empty_like(order), torch.empty_like(codes), torch.empty_like(matrix)
    g_idx[order], laid[:, order] = torch.arange(len(order)) // 64, codes
    dequantised[:, order] = made["dequantised"]
    packed = gptq.packed_down(laid.t(), 4).t()
    return made | {"weight_packed": packed, "weight_g_idx": g_idx.int(), "dequantised": dequantised}


def as_gptq(matrix: Tensor, bits: int, size: int, *, sym: bool, desc_act: bool) -> Layer:
    columns = matrix.shape[1]
    size = size if size > 0 else columns
    order = torch.arange(columns)
    if desc_act:
        order = torch.randperm(columns, generator=torch.Generator().manual_seed(columns))
    codes, zeros, scales = rounded(matrix[:, order].contiguous(), size, bits)
    if sym:
        values = matrix[:, order].view(len(matrix), -1, size)
        scales = values.abs().amax(2) / (2 ** (bits - 1) - 1)
        zeros = torch.full_like(zeros, 2 ** (bits - 1))
    scales = scales.half()
    spread_zeros, spread = zeros.repeat_interleave(size, 1), scales.float().repeat_interleave(size, 1)
    codes = torch.round(matrix[:, order] / spread + spread_zeros).clamp(0, 2**bits - 1).long()
    back = torch.argsort(order)
    return {
        "qweight": gptq.packed_down(codes[:, back].t(), bits),
        "qzeros": _packed_zeros(zeros - 1, bits),
        "scales": scales.t(),
        "g_idx": (torch.arange(columns) // size)[back].int(),
        "dequantised": ((codes - spread_zeros) * spread)[:, back].contiguous(),
    }


def _packed_zeros(zeros: Tensor, bits: int) -> Tensor:
    """``[N, G]`` -> ``[G, N * bits / 32]``."""
    return gptq.packed_down(zeros, bits).t()


def as_awq(matrix: Tensor, size: int) -> Layer:
    codes, zeros, scales = rounded(matrix, size, 4)
    scales = scales.half()
    spread_zeros, spread = zeros.repeat_interleave(size, 1), scales.float().repeat_interleave(size, 1)
    codes = torch.round(matrix / spread + spread_zeros).clamp(0, 15).long()
    return {
        "qweight": gptq.packed_awq(codes.t()),
        "qzeros": gptq.packed_awq(zeros.t()),
        "scales": scales.t(),
        "dequantised": (codes - spread_zeros) * spread,
    }


def as_fp8_blocks(matrix: Tensor) -> Layer:
    made = compressed(matrix, "float-quantized", {**ct.FP8, "strategy": "block", "block_structure": [64, 128]})
    return {"weight": made["weight"], "weight_scale_inv": made["weight_scale"], "dequantised": made["dequantised"]}


def _gptq(bits: int, size: int, *, sym: bool = False, desc_act: bool = False) -> Case:
    make = functools.partial(as_gptq, bits=bits, size=size, sym=sym, desc_act=desc_act)
    fields = {**gptq.GPTQ, "bits": bits, "group_size": size, "sym": sym, "desc_act": desc_act}
    return Case(make, fields, "matrices")


_ASYMMETRIC = {**ct.W4, "symmetric": False}
_BY_ACTIVATIONS = ct.config("pack-quantized", {**ct.W4, "actorder": "group"})["quantization_config"]
_FP8_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 128]}
CASES = {
    "pack-quantized": case("pack-quantized", ct.W4),
    "pack-quantized, zero points": case("pack-quantized", _ASYMMETRIC),
    "pack-quantized, channels": case("pack-quantized", {**ct.W4, "strategy": "channel", "group_size": None}),
    "pack-quantized, order of weights": case("pack-quantized", {**ct.W4, "actorder": "weight"}),
    "pack-quantized, order of activations": Case(by_activations, _BY_ACTIVATIONS, "matrices"),
    "pack-quantized, 8 bits": case("pack-quantized", {**ct.W8, "strategy": "group", "group_size": 32}),
    "pack-quantized, parts kept differently": case("pack-quantized", ct.W4, ignore="k_proj"),
    "int-quantized": case("int-quantized", ct.W8),
    "int-quantized, zero points": case("int-quantized", {**ct.W8, "symmetric": False}),
    "int-quantized, int8 by row": case("int-quantized", ct.W8, ct.DYNAMIC),
    "int-quantized, static int8": case("int-quantized", ct.W8, ct.STATIC),
    "int-quantized, 4 bits, int8 by row": case("int-quantized", ct.W4, ct.DYNAMIC),
    "float-quantized": case("float-quantized", ct.FP8),
    "float-quantized, tensor": case("float-quantized", {**ct.FP8, "strategy": "tensor"}),
    "float-quantized, blocks": case("float-quantized", {**ct.FP8, "strategy": "block", "block_structure": [64, 128]}),
    "fp8 blocks": Case(as_fp8_blocks, _FP8_BLOCKS),
    "gptq, 4 bits": _gptq(4, 64),
    "gptq, 4 bits, symmetric": _gptq(4, 128, sym=True),
    "gptq, 4 bits, desc_act": _gptq(4, 32, desc_act=True),
    "gptq, 8 bits": _gptq(8, -1),
    "gptq, 8 bits, symmetric, desc_act": _gptq(8, 64, sym=True, desc_act=True),
    "awq": Case(functools.partial(as_awq, size=64), gptq.AWQ, "matrices"),
}
_BY_DEFAULT = {
    ("qwen3", "pack-quantized, zero points"),
    ("qwen3", "pack-quantized, order of activations"),
    ("llama", "pack-quantized, parts kept differently"),
    ("llama", "int-quantized, int8 by row"),
    ("qwen3", "int-quantized, static int8"),
    ("llama", "float-quantized"),
    ("llama", "gptq, 4 bits, desc_act"),
    ("qwen3", "awq"),
    ("glm", "gptq, 4 bits, symmetric"),
    ("qwen3_moe", "pack-quantized, zero points"),
    ("mixtral", "int-quantized"),
}
# transformers loads experts into one tensor, which compressed-tensors does not know: it gets the matrices.
_ONE_TENSOR = ("qwen3_moe", "mixtral")
# Refused, or with hooks that transformers has no place for.
_NOT_FOR_EXPERTS = [
    name
    for name, case in CASES.items()
    if case.transformers == "rows" or any(word in name for word in ("desc_act", "order of activations", "static"))
]


def write_source(model: str, directory: Path) -> None:
    """A model with random weights."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model, **_SMALL, **_MODELS[model])
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(directory)


def round_rows(_: object, inputs: tuple[Tensor]) -> Tensor:
    """What ops.quantized_linear_a8 does to its input."""
    scale = inputs[0].abs().amax(-1, keepdim=True) / 127
    return torch.round(inputs[0] / scale) * scale


def check(found: Tensor, expected: Tensor, *, rounded_inputs: bool = False) -> None:
    """``rounded_inputs``: the two round a few inputs that lie between two codes to different ones.

    From that token on all logits differ a little. By another rule they would differ everywhere.
    """
    if not rounded_inputs:
        torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
        return
    differences = (found - expected).abs().amax(1)
    assert (differences < 1e-3).sum() >= 3
    assert differences.max() < 0.1


def logits_of(model: Any, skip: tuple[str, ...] | None = None) -> Tensor:
    """Of transformers; ``skip``: inputs of all other layers are rounded."""
    for name, module in model.named_modules():
        if skip is not None and isinstance(module, torch.nn.Linear) and not name.endswith(("lm_head", *skip)):
            module.register_forward_pre_hook(round_rows)
    with torch.no_grad():
        return model(torch.arange(5, 26)[None]).logits[0]


def check_case(directory: Path, model: str, case: Case) -> None:
    """Logits of a checkpoint in this layout against those of transformers."""
    write_source(model, directory / "source")
    fields = case.fields
    if fields["quant_method"] in ("fp8", "modelopt") and model in _ONE_TENSOR:
        routers = [f"model.layers.{i}.{name}.gate" for i in range(2) for name in ("mlp", "block_sparse_moe")]
        named = "modules_to_not_convert" if fields["quant_method"] == "fp8" else "ignore"
        fields = {**fields, named: ["lm_head", *routers]}
    write(directory, directory / "source", case.make, fields, case.skip)
    held = "quantised" if case.transformers == "checkpoint" and model not in _ONE_TENSOR else "plain"
    theirs = transformers.AutoModelForCausalLM.from_pretrained(directory / held, dtype=torch.float32)
    expected = logits_of(theirs, case.skip if case.transformers == "rows" else None)
    check(logits(directory / "quantised"), expected, rounded_inputs=case.transformers == "rows")


@pytest.mark.parametrize(
    ("model", "name"),
    [
        pytest.param(model, name, marks=() if (model, name) in _BY_DEFAULT else pytest.mark.battery)
        for model in _MODELS
        for name in CASES
        if model not in _ONE_TENSOR or name not in _NOT_FOR_EXPERTS
    ],
)
def test_logits_are_those_of_transformers(tmp_path: Path, model: str, name: str) -> None:
    check_case(tmp_path, model, CASES[name])


@pytest.mark.parametrize("name", ["pack-quantized, order of activations", "int-quantized, static int8"])
def test_experts_refused(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    write_source("qwen3_moe", tmp_path / "source")
    write(tmp_path, tmp_path / "source", case.make, case.fields, case.skip)
    with pytest.raises(ValueError, match="without an order of inputs or static activations"):
        logits(tmp_path / "quantised")


@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("name", ["pack-quantized, zero points", "int-quantized, int8 by row"])
def test_dummy_weights_are_of_the_checkpoints_kind(tmp_path: Path, model: str, name: str) -> None:
    case = CASES[name]
    write_source(model, tmp_path / "source")
    write(tmp_path, tmp_path / "source", case.make, case.fields, case.skip)
    config, cpu = read_config(tmp_path / "quantised"), torch.device("cpu")
    kind = quantization.published(config, Packed)
    read = tensors(loader.load_weights(tmp_path / "quantised", config, torch.float32, cpu, kind))
    made = [tensors(loader.dummy_weights(config, torch.float32, cpu, seed, kind)) for seed in (0, 0, 1)]
    for given in made:
        assert [(t.shape, t.dtype) for t in given] == [(t.shape, t.dtype) for t in read]
    assert all(torch.equal(a, b) for a, b in zip(made[0], made[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(made[0], made[2], strict=True))


TORCHAO: dict[str, Any] = {
    "int8": ao.Int8WeightOnlyConfig(version=2),
    "int8 groups": ao.Int8WeightOnlyConfig(granularity=ao.PerGroup(32), version=2),
    "int8 by row": ao.Int8DynamicActivationInt8WeightConfig(version=2),
    "fp8": ao.Float8WeightOnlyConfig(),
    "int4": ao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=ao.PerGroup(32)),
}


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x == "int8" else pytest.mark.battery) for x in TORCHAO])
def test_torchao(tmp_path: Path, name: str) -> None:
    """Quantised and saved by transformers."""
    write_source("qwen3", tmp_path / "source")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "source", dtype=torch.float32, quantization_config=transformers.TorchAoConfig(TORCHAO[name])
    )
    theirs.save_pretrained(tmp_path / "quantised")
    if name == "int8 by row":
        for module in theirs.modules():
            if isinstance(module, torch.nn.Linear) and hasattr(module.weight, "dequantize"):
                module.weight = torch.nn.Parameter(module.weight.dequantize())
    expected = logits_of(theirs, () if name == "int8 by row" else None)
    check(logits(tmp_path / "quantised"), expected, rounded_inputs=name == "int8 by row")


# -- fp8 with a scale for a matrix, fp4 in groups, and what is "naive-quantized". transformers reads few of these on a
# CPU: of the others it gets the matrices that the codes stand for.

_VALUES = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])
_GROUPS = {16: {"strategy": "tensor_group", "group_size": 16}, 32: {"strategy": "group", "group_size": 32}}


def as_fp4(matrix: Tensor, size: int) -> Layer:
    """NVFP4 (groups of 16) and MXFP4 (of 32) as compressed-tensors writes them."""
    format_ = "nvfp4-pack-quantized" if size == 16 else "mxfp4-pack-quantized"
    args = QuantizationScheme(targets=["Linear"], weights={"num_bits": 4, "type": "float", **_GROUPS[size]})
    largest = matrix.view(len(matrix), -1, size).abs().amax(2)
    state = {"weight": matrix}
    if size == 16:
        of_all = 448 * 6 / matrix.abs().amax()
        state |= {"weight_scale": largest / 6 * of_all, "weight_global_scale": of_all.view(1)}
    else:
        state["weight_scale"] = torch.exp2(torch.floor(torch.log2(largest)) - 2)
    compressor = BaseCompressor.get_value_from_registry(format_)
    made = compressor.compress(state, args)
    return made | {"dequantised": _fp4_matrix(made, size)}


def _fp4_matrix(made: Layer, size: int) -> Tensor:
    """By the layouts' documentation: the library gives bfloat16."""
    held = made["weight_packed"]
    values = _VALUES[torch.stack([held & 15, held >> 4], 2).flatten(1).long()]
    scales = made["weight_scale"].float()
    scales = scales / made["weight_global_scale"] if size == 16 else torch.exp2(scales - 127)
    return values * scales.repeat_interleave(size, 1)


def as_modelopt_nvfp4(matrix: Tensor) -> Layer:
    made = as_fp4(matrix, 16)
    return {
        "weight": made["weight_packed"],
        "weight_scale": made["weight_scale"],
        "weight_scale_2": 1 / made["weight_global_scale"].view(()),
        "input_scale": torch.tensor(0.01),
        "dequantised": made["dequantised"],
    }


def as_fp8_matrix(matrix: Tensor, scale: str, inputs: str = "") -> Layer:
    """One scale of the whole matrix, and one of activations, by which we do not round."""
    of_all = matrix.abs().amax() / 448
    codes = (matrix / of_all).to(torch.float8_e4m3fn)
    besides = {inputs: torch.tensor(0.01)} if inputs else {}
    return {"weight": codes, scale: of_all, **besides, "dequantised": codes.float() * of_all}


def _compressed_fp4(size: int) -> Case:
    fields = ct.config(
        "nvfp4-pack-quantized" if size == 16 else "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "symmetric": True, **_GROUPS[size]},
    )["quantization_config"]
    fields["quantization_status"] = "compressed"
    fields["ignore"] += ["re:.*gate$"]
    return Case(functools.partial(as_fp4, size=size), fields, "matrices")


def _fp8(fields: dict[str, Any], **names: str) -> Case:
    return Case(functools.partial(as_fp8_matrix, **names), fields, "matrices")


_FP8: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
_MODELOPT: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
FLOATS = {
    # transformers takes int8 without activations for packed.
    "naive-quantized": case("naive-quantized", ct.W8)._replace(transformers="matrices"),
    "naive-quantized, groups": case("naive-quantized", {**ct.W8, "strategy": "group", "group_size": 64})._replace(
        transformers="matrices"
    ),
    "naive-quantized, fp8": case("naive-quantized", ct.FP8),
    "nvfp4-pack-quantized": _compressed_fp4(16),
    "mxfp4-pack-quantized": _compressed_fp4(32),
    "fp8, a scale": _fp8(_FP8, scale="weight_scale"),
    "fp8, a scale, static": _fp8({**_FP8, "activation_scheme": "static"}, scale="weight_scale", inputs="input_scale"),
    "fp8, an inverse scale": _fp8(
        {**_FP8, "activation_scheme": "static", "weight_block_size": None},
        scale="weight_scale_inv",
        inputs="activation_scale",
    ),
    "modelopt FP8": _fp8(_MODELOPT, scale="weight_scale", inputs="input_scale"),
    "nf4": Case(functools.partial(bitsandbytes.as_nf4, nested=False), bitsandbytes.CONFIG, "matrices"),
    "nf4, nested": Case(
        functools.partial(bitsandbytes.as_nf4, nested=True),
        {**bitsandbytes.CONFIG, "bnb_4bit_use_double_quant": True},
        "matrices",
    ),
    "modelopt NVFP4": Case(as_modelopt_nvfp4, {**_MODELOPT, "quant_algo": "NVFP4"}, "matrices"),
}
_FLOATS_BY_DEFAULT = {("qwen3", name) for name in FLOATS} | {
    ("mixtral", "nvfp4-pack-quantized"),
    ("mixtral", "fp8, a scale"),
    ("mixtral", "nf4, nested"),
}


@pytest.mark.parametrize(
    ("model", "name"),
    [
        pytest.param(model, name, marks=() if (model, name) in _FLOATS_BY_DEFAULT else pytest.mark.battery)
        for model in ("qwen3", "llama", "mixtral", "qwen3_moe")
        for name in FLOATS
    ],
)
def test_logits_of_floats_are_those_of_transformers(tmp_path: Path, model: str, name: str) -> None:
    check_case(tmp_path, model, FLOATS[name])


def test_nf4_of_another_size_or_too_large_for_the_dtype_is_refused(tmp_path: Path) -> None:
    write_source("qwen3", tmp_path / "source")

    def load(folder: str, make: Callable[[Tensor], Layer], dtype: torch.dtype) -> None:
        (tmp_path / folder).mkdir()
        write(tmp_path / folder, tmp_path / "source", make, bitsandbytes.CONFIG)
        made = tmp_path / folder / "quantised"
        config = read_config(made)
        loader.load_weights(made, config, dtype, torch.device("cpu"), quantization.published(config, Packed))

    def says_half(matrix: Tensor) -> Layer:
        half = bitsandbytes.as_nf4(matrix.view(-1, 64), nested=False)[bitsandbytes.STATE]
        return bitsandbytes.as_nf4(matrix, nested=False) | {bitsandbytes.STATE: half}

    with pytest.raises(ValueError, match=r"layers\.\d\..*rows must have (128|256) weights, found 64"):
        load("half", says_half, torch.float32)
    with pytest.raises(ValueError, match=r"_proj\.weight holds values too large for float16: choose a wider dtype"):
        load("large", lambda matrix: bitsandbytes.as_nf4(matrix * 1e6, nested=False), torch.float16)


def test_rounding_is_no_detail() -> None:
    """Codes stand for other matrices than those that were rounded: else the tests above would show nothing."""
    matrix = torch.randn(64, 128, generator=torch.Generator().manual_seed(0))
    for name, each in FLOATS.items():
        error = (each.make(matrix)["dequantised"] - matrix).norm() / matrix.norm()
        assert (0.05 if "4" in name else 0.001) < error < 0.2
