"""Models from GGUF files whose tensors are blocks of many kinds: the answers of the values that blocks stand for."""

from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from compiled_llm import CompiledEngine, SamplingParams
from tests.checkpoint.gguf.writing import MODELS, metadata_of, tensors_of, write
from tests.drawn import marked

FIRST = {"attn_q": "Q4_0", "attn_k": "Q4_1", "attn_v": "Q8_0", "attn_output": "Q5_1", "ffn_gate": "Q5_0"}
FIRST |= {"ffn_up": "F16", "ffn_down": "BF16", "ffn_gate_exps": "Q4_0", "ffn_up_exps": "Q4_0", "ffn_down_exps": "Q8_0"}
FIRST |= {"token_embd": "Q8_0", "output": "Q4_1", "attn_k_b": "Q8_0", "attn_v_b": "Q5_0", "ssm_out": "Q4_1"}
LATER = FIRST | {"attn_q": "Q8_0", "attn_k": "Q8_0", "ffn_gate": "Q4_1", "ffn_up": "Q4_1"}
LATER |= {f"ffn_{x}_exps": "MXFP4" for x in ("gate", "up", "down")}
PROMPTS = [{"prompt_token_ids": [5 * n + i for i in range(n)]} for n in (1, 3, 17)]
SIZES = {"bucket_sizes": (4,), "token_bucket_sizes": (32,), "num_kv_blocks": 32, "max_model_len": 64}


def kind_of(name: str) -> str:
    if name.endswith(".bias"):
        return "F32"
    return (LATER if name.startswith("blk.1.") else FIRST).get(name.split(".")[-2], "F32")


def rounded(name: str, tensor: Tensor) -> Tensor:
    if tensor.dim() == 1:
        return tensor
    kind = Kind[kind_of(name)]
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind))


ANSWERING = ("llama in blocks", "qwen3moe in blocks", "deepseek2 in blocks", "qwen35 in blocks", "gpt-oss")


@pytest.mark.parametrize("name", marked(ANSWERING, ("deepseek2 in blocks", "gpt-oss")))
def test_answers_are_those_of_the_values(name: str, tmp_path: Path) -> None:
    held, metadata = tensors_of(name), metadata_of(name)
    blocks = write(tmp_path / "blocks.gguf", MODELS[name][0], metadata, held, kind_of)
    values = write(tmp_path / "values.gguf", MODELS[name][0], metadata, {n: rounded(n, t) for n, t in held.items()})
    answers = []
    for path in (blocks, values):
        with CompiledEngine(str(path), dtype="float32", enforce_eager=True, **SIZES) as engine:
            asked = SamplingParams(max_tokens=12, temperature=0, logprobs=3, ignore_eos=True)
            answers.append([output.outputs[0] for output in engine.generate(PROMPTS, asked, use_tqdm=False)])
    for one, other in zip(*answers, strict=True):
        assert one.token_ids == other.token_ids
        for mine, theirs in zip(one.logprobs, other.logprobs, strict=True):
            for token, logprob in theirs.items():
                assert mine[token].logprob == pytest.approx(logprob.logprob, abs=2e-4)


def test_a_file_with_nothing_to_round_takes_no_quantization(tmp_path: Path) -> None:
    """Its codes stay as they are: it would do nothing. One with plain layers takes it."""
    name = "llama in blocks"
    given = MODELS[name][0], metadata_of(name), tensors_of(name)
    arguments = {"dtype": "float32", "enforce_eager": True, "quantization": "int8", **SIZES}
    whole = write(tmp_path / "whole.gguf", *given, lambda one: "F32" if kind_of(one) == "F32" else "Q8_0")
    with pytest.raises(
        ValueError, match=r"quantization='int8' rounds .* keeps all that it could round quantised .gguf Q8_0.*leave"
    ):
        CompiledEngine(str(whole), **arguments)
    with CompiledEngine(str(write(tmp_path / "some.gguf", *given, kind_of)), **arguments) as engine:
        assert engine.generate(PROMPTS[:1], SamplingParams(max_tokens=1), use_tqdm=False)


def test_activations_are_rounded_as_asked(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """By default in 16 bits, as llama.cpp rounds them; float32 and plain checkpoints keep theirs."""
    name = "llama in blocks"
    path = write(tmp_path / "blocks.gguf", MODELS[name][0], metadata_of(name), tensors_of(name), kind_of)

    def logprobs(dtype: str, activations: str) -> list[float]:
        arguments = {"dtype": dtype, "quantization_activations": activations, "progress": "lines", **SIZES}
        with CompiledEngine(str(path), enforce_eager=True, **arguments) as engine:
            asked = SamplingParams(max_tokens=1, prompt_logprobs=0)
            output = engine.generate(PROMPTS[2], asked, use_tqdm=False)[0]
        said = "activations in int8" in capfd.readouterr().err
        assert said is (activations == "int8" or (activations, dtype) == ("auto", "bfloat16"))
        found = zip(output.prompt_logprobs[1:], output.prompt_token_ids[1:], strict=True)
        return [row[token_id].logprob for row, token_id in found]

    kept, rounded = logprobs("bfloat16", "model"), logprobs("bfloat16", "int8")
    assert logprobs("bfloat16", "auto") == rounded != kept
    assert rounded == pytest.approx(kept, abs=0.4)
    assert logprobs("float32", "auto") == logprobs("float32", "model") != logprobs("float32", "int8")


@pytest.mark.parametrize(
    ("kinds", "asked", "message"),
    [
        ("F32", "model", r"quantization_activations must be 'auto' for a checkpoint that is not quantised, given"),
        ("F32", "int8", r"rounds activations .* but this one has none such: leave it out, or .*'int4_w4a8' or"),
        ("MXFP4", "int8", "but this one has none such"),
    ],
)
def test_activations_that_nothing_rounds(kinds: str, asked: str, message: str, tmp_path: Path) -> None:
    name = "llama in blocks"
    kind = {"F32": lambda one: "F32", "MXFP4": lambda one: "F32" if kind_of(one) == "F32" else "MXFP4"}[kinds]
    path = write(tmp_path / "one.gguf", MODELS[name][0], metadata_of(name), tensors_of(name), kind)
    with pytest.raises(ValueError, match=message):
        CompiledEngine(str(path), dtype="bfloat16", enforce_eager=True, quantization_activations=asked, **SIZES)
