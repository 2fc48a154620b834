"""Experts in calibration: the modules of transformers split, errors beside rounding, few tokens, written and loaded."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.checkpoint.stored_tensors import locate
from compiled_llm.checkpoint.writing import CheckpointWriter
from compiled_llm.quantizing.block_quantizer import Settings
from compiled_llm.quantizing.blocks import BlockModel, run_block
from compiled_llm.quantizing.folding import find_folds
from compiled_llm.quantizing.model_quantizer import Result, Windows, quantize_checkpoint
from compiled_llm.quantizing.schemes import make_scheme
from tests.drawn import marked
from tests.families import CONFIGS, checkpoint, strengthened

IDS = [torch.randint(0, 300, (48,), generator=torch.Generator().manual_seed(seed)) for seed in range(6)]
CHECKED = IDS[:1]


class Written(NamedTuple):
    directory: Path
    result: Result
    logits: Tensor  # [T, V] of CHECKED, by the weights as they are quantised


@pytest.fixture(scope="module", params=["qwen3-moe", pytest.param("mixtral", marks=pytest.mark.battery)])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose layers have groups of 16 inputs."""
    class_name, fields = CONFIGS[request.param]
    kind = getattr(transformers, class_name)
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp(request.param)
    strengthened(kind(kind.config_class(**{**fields, "moe_intermediate_size": 80})).eval()).save_pretrained(directory)
    return directory


def quantise(
    source: Path,
    target: Path,
    method: str,
    kind: str,
    *,
    ids: Sequence[Tensor] = IDS,
    least_tokens: int = 16,
    skip: tuple[str, ...] = (),
) -> Written:
    model = BlockModel(source)
    scheme = make_scheme(kind, 16 if kind == "int4" else None, False, model.dtype)
    settings = Settings(method, scheme, skip=skip, least_tokens=least_tokens)
    hidden, calls = model.embed(list(CHECKED))
    checked = Windows(list(hidden), calls), Windows(list(hidden), calls)
    text, writer = Windows(*model.embed(list(ids))), CheckpointWriter(source, target)
    result = quantize_checkpoint(model, writer, settings, text, checked, lambda line: None)
    return Written(target, result, model.logits(checked[1].hidden[0]))


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral", "glm4-moe"])
def test_split_experts_give_the_logits_of_transformers_and_take_scales(name: str) -> None:
    directory = checkpoint(name)
    model = BlockModel(directory)
    text = Windows(*model.embed(list(CHECKED)))
    for index in range(len(model.blocks)):
        block = model.load(index)
        folds = find_folds(block, lambda b=block, i=index: run_block(b, text.hidden[0], text.calls[48][i]))
        consumers = {fold.producer: fold.consumers for fold in folds}
        if "mlp.gate" in dict(block.named_modules()):
            assert {"mlp.gate", "mlp.experts.4.gate_proj", "mlp.experts.4.up_proj"} < {
                *consumers["post_attention_layernorm"]
            }
            assert consumers["mlp.experts.4.up_proj"] == ("mlp.experts.4.down_proj",)
        text.run(block, index)
        model.drop(index)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)(CHECKED[0][None]).logits[0]
    assert (model.logits(text.hidden[0]) - expected).norm() < 1e-5 * expected.norm()


@pytest.fixture(scope="module")
def calibrated(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return quantise(source, tmp_path_factory.mktemp("calibrated") / "out", "awq+gptq", "int4")


@pytest.mark.parametrize("method", marked(("awq+gptq", "gptq", "awq"), ("awq+gptq",)))
def test_calibrated_experts_have_no_larger_errors_than_rounded_ones(
    source: Path, calibrated: Written, method: str, tmp_path: Path
) -> None:
    is_made = method == "awq+gptq"
    result = calibrated.result if is_made else quantise(source, tmp_path / "out", method, "int4").result
    assert result.rounded == []
    experts = [layer for layer in result.layers if ".experts." in layer["name"]]
    assert experts
    assert all(16 <= layer["tokens"] < 6 * 48 for layer in experts)
    for layer in result.layers:
        if "gptq" in method:
            assert layer["error"] <= layer["rtn_error"], layer
    for part in ("self_attn", "gate_proj" if "gate_proj" in experts[0]["name"] else "w1", "experts"):
        of_part = [layer for layer in result.layers if part in layer["name"]]
        assert sum(layer["error"] for layer in of_part) <= sum(layer["rtn_error"] for layer in of_part), part


def test_smoothquant_of_experts_has_no_larger_errors(source: Path, tmp_path: Path) -> None:
    layers = quantise(source, tmp_path / "out", "smoothquant", "int8_w8a8").result.layers
    assert sum(layer["error"] for layer in layers) < 1.01 * sum(layer["rtn_error"] for layer in layers)


def test_experts_with_few_tokens_are_rounded_and_named(source: Path, tmp_path: Path) -> None:
    """One token throughout goes to the same experts."""
    same = [torch.full((16,), 7)]
    written = quantise(source, tmp_path / "out", "gptq", "int4", ids=same, least_tokens=4)
    experts = {layer["name"]: layer for layer in written.result.layers if ".experts." in layer["name"]}
    assert written.result.rounded == [name for name, layer in experts.items() if layer["tokens"] < 4]
    unseen = [layer for layer in experts.values() if layer["tokens"] == 0]
    assert unseen
    assert all("error" not in layer for layer in unseen)
    plain = quantise(source, tmp_path / "plain", "rtn", "int4", ids=[])
    assert plain.result.rounded == []
    tensors = [load_file(one.directory / "model.safetensors") for one in (written, plain)]
    for name in experts:
        is_same = torch.equal(*(each[f"{name}.weight_packed"] for each in tensors))
        assert is_same == (name in written.result.rounded), name


def test_layers_are_skipped_by_the_names_that_the_checkpoint_has(source: Path, tmp_path: Path) -> None:
    (first, *_) = [name for name in locate(source) if ".experts.3." in name]
    part = first.split(".experts.")[0].rpartition(".")[2] + ".experts."
    written = quantise(source, tmp_path / "out", "rtn", "int4", ids=[], skip=(part,)).result
    assert first.removesuffix(".weight") in written.ignored
    assert not [layer for layer in written.layers if part in layer["name"]]
    with pytest.raises(ValueError, match="given 'nothing', which no layer has"):
        quantise(source, tmp_path / "none", "rtn", "int4", ids=[], skip=("nothing",))


@pytest.mark.parametrize(
    ("method", "kind"), [("awq+gptq", "int4"), pytest.param("smoothquant+gptq", "int8_w8a8", marks=pytest.mark.battery)]
)
@pytest.mark.filterwarnings("ignore")  # of the library
def test_what_is_written_loads_here_and_in_transformers(
    source: Path, calibrated: Written, method: str, kind: str, tmp_path: Path
) -> None:
    pytest.importorskip("compressed_tensors")
    written = calibrated if kind == "int4" else quantise(source, tmp_path / "out", method, kind)
    ids = CHECKED[0]
    config = {"enforce_eager": True, "num_kv_blocks": 16, "bucket_sizes": (1,), "max_model_len": 64}
    with CompiledEngine(str(written.directory), dtype="float32", progress="off", **config) as engine:
        (output,) = engine.generate(
            [{"prompt_token_ids": ids.tolist()}],
            SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0),
            use_tqdm=False,
        )
    assert output.prompt_logprobs is not None
    rows = output.prompt_logprobs[1:]
    found = torch.tensor([row[int(token)].logprob for row, token in zip(rows, ids[1:], strict=True) if row is not None])
    differences = (found - written.logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]).abs()
    if kind == "int8_w8a8":
        # The first input that is rounded to the other side changes it for all tokens from there on.
        assert differences[:2].max() < 1e-4
        assert differences.mean() < 0.1
        return  # of experts transformers reads packed and fp8 layouts alone
    assert differences.max() < 1e-3
    model = AutoModelForCausalLM.from_pretrained(
        written.directory, dtype=torch.float32, quantization_config=CompressedTensorsConfig(dequantize=True)
    )
    with torch.no_grad():
        logits = model(ids[None]).logits[0]
    assert (logits - written.logits).norm() < 1e-3 * written.logits.norm()
