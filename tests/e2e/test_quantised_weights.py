"""Engines whose weights are quantised as they are loaded."""

from pathlib import Path
from typing import Any

import pytest

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.models.linears.quantized import Quantized, QuantizedExperts
from compiled_llm.models.weights import experts, linear_layers
from tests import mxfp4
from tests.compiling.test_function import ENGINE, TWO_BUCKETS, check_one_graph, engine_and_codes
from tests.families import checkpoint

PROMPTS = [[5, 6, 7], list(range(3, 60)), [9] * 20, list(range(100, 131))]


def serve(name: str | Path, prompts: list[list[int]] = PROMPTS, **arguments: Any) -> list[Any]:
    """(tokens, log-probabilities) of each prompt."""
    sizes: dict[str, Any] = {"bucket_sizes": (1, 4), "max_model_len": 128, "num_kv_blocks": 40, "enforce_eager": True}
    params = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=1)
    with CompiledEngine(str(checkpoint(name) if isinstance(name, str) else name), **{**sizes, **arguments}) as engine:
        outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    found = []
    for output in outputs:
        tokens, rows = output.outputs[0].token_ids, output.outputs[0].logprobs
        found.append((tokens, [row[token].logprob for row, token in zip(rows, tokens, strict=True)]))
    return found


@pytest.mark.parametrize(
    "quantization",
    [
        "int4_w4a8",
        *(pytest.param(each, marks=pytest.mark.battery) for each in ("int8", "int8_w8a8", "int4", "fp8", "mxfp4")),
    ],
)
def test_the_same_alone_in_chunks_preempted_and_behind_a_prefix(quantization: str) -> None:
    arguments: dict[str, Any] = {"quantization": quantization, "kv_cache_dtype": "int8", "dtype": "bfloat16"}
    together = serve("qwen3", **arguments)
    alone = [serve("qwen3", [prompt], **arguments)[0] for prompt in PROMPTS]
    chunked = serve("qwen3", token_bucket_sizes=(16,), bucket_sizes=(1, 2, 4), **arguments)
    preempted = serve("qwen3", num_kv_blocks=9, **arguments)
    twice = serve("qwen3", PROMPTS + PROMPTS, max_num_seqs=4, **arguments)
    assert together == alone == chunked == preempted == twice[:4] == twice[4:]


def test_one_graph() -> None:
    arguments = {**ENGINE, "enforce_eager": True, "bucket_sizes": (4,), "token_bucket_sizes": (8,)}
    with CompiledEngine(str(checkpoint("qwen3")), **arguments, quantization="int4_w4a8") as engine:
        check_one_graph(engine)


@pytest.mark.battery
def test_compiled_once_and_nothing_more() -> None:
    engine, codes = engine_and_codes(checkpoint("qwen3"), TWO_BUCKETS, False, quantization="int4_w4a8")
    engine.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], SamplingParams(max_tokens=5), use_tqdm=False)
    (step, *_) = engine.compile_report().reports
    assert (step.name, step.graphs, step.graph_breaks, step.recompiles) == ("step", 1, 0, 0)
    assert len(codes) == 1
    engine.close()


@pytest.mark.parametrize("name", ["gpt2", "gpt-oss", "gemma4-moe"])
def test_other_families(name: str) -> None:
    plain, rounded = serve(name, dtype="float32"), serve(name, quantization="int8", dtype="float32")
    for (tokens, found), (other_tokens, other) in zip(plain, rounded, strict=True):
        assert tokens[0] == other_tokens[0] or abs(found[0] - other[0]) < 0.3
        assert abs(found[0] - other[0]) < 0.5


def test_which_layers_and_how_many_bytes() -> None:
    def engine(**arguments: Any) -> CompiledEngine:
        return CompiledEngine(
            str(checkpoint("qwen3")),
            bucket_sizes=(1,),
            max_model_len=64,
            num_kv_blocks=20,
            enforce_eager=True,
            **arguments,
        )

    with (
        engine(dtype="bfloat16") as plain,
        engine(dtype="bfloat16", quantization="int8", quantization_skip=["layers.1"]) as one,
    ):
        weights = one.runner.steps.weights
        first, second = weights.layers
        assert all(isinstance(layer, Quantized) for layer in linear_layers(first))
        assert not any(isinstance(layer, Quantized) for layer in linear_layers(second))
        assert one.runner.weight_bytes < plain.runner.weight_bytes


@pytest.mark.parametrize(
    ("name", "pattern", "words"),
    [
        ("qwen3", "qkv_proj", "model.layers.*.self_attn.q_proj"),  # one layer here, three in the checkpoint
        ("phi3", "q_proj", "model.layers.*.self_attn.qkv_proj"),  # one layer in the checkpoint
        ("mixtral", "layers.7", "block_sparse_moe.experts.*.w1"),
        ("gpt-oss", "experts.gate", "model.layers.*.mlp.experts.gate_up_proj.*"),
        ("gpt2", "lm-head", "lm_head"),
    ],
)
def test_names_of_no_layer_are_refused(name: str, pattern: str, words: str) -> None:
    with pytest.raises(ValueError, match="quantization_skip must name layers") as error:
        CompiledEngine(str(checkpoint(name)), quantization="int8", quantization_skip=["*attn", pattern])
    assert f"given {pattern!r}" in str(error.value)
    assert words in str(error.value)


def test_experts_in_one_tensor_are_skipped_by_their_name() -> None:
    arguments: dict[str, Any] = {"bucket_sizes": (1,), "max_model_len": 64, "num_kv_blocks": 20, "enforce_eager": True}
    for skip, expected in (((), True), (("mlp.experts",), False)):
        with CompiledEngine(
            str(checkpoint("gpt-oss")), quantization="int8", quantization_skip=skip, **arguments
        ) as engine:
            found = experts(engine.runner.steps.weights)
            assert found
            assert all(isinstance(layer, QuantizedExperts) == expected for layer in found)


def test_experts_of_a_published_gpt_oss_stay_in_four_bits(tmp_path: Path) -> None:
    """The rest is rounded at load where that is asked for."""
    mxfp4.write_checkpoint(tmp_path)
    arguments: dict[str, Any] = {"bucket_sizes": (1,), "max_model_len": 64, "num_kv_blocks": 20, "enforce_eager": True}
    described, num_bytes = [], []
    for quantization in (None, "int8"):
        with CompiledEngine(str(tmp_path), quantization=quantization, **arguments) as engine:
            weights = engine.runner.steps.weights
            found = experts(weights)
            assert all(isinstance(one, QuantizedExperts) and one.scheme.form.element == "fp4" for one in found)
            assert isinstance(weights.layers[0].attention.qkv, Quantized) == (quantization is not None)
            described.append(engine.runner.describe_start())
            num_bytes.append(engine.runner.weight_bytes)
    assert all("; checkpoint: mxfp4 (experts, kept as fp4 in groups of 32);" in text for text in described)
    assert num_bytes[1] < num_bytes[0]
    with pytest.raises(ValueError, match="quantization_skip must name layers that are rounded at load"):
        CompiledEngine(str(tmp_path), quantization="int8", quantization_skip=["mlp.experts"], **arguments)


def test_a_published_gpt_oss_is_the_same_in_any_company(tmp_path: Path) -> None:
    mxfp4.write_checkpoint(tmp_path)
    together = serve(tmp_path, dtype="bfloat16")
    alone = [serve(tmp_path, [prompt], dtype="bfloat16")[0] for prompt in PROMPTS]
    preempted = serve(tmp_path, num_kv_blocks=12, dtype="bfloat16")
    assert together == alone == preempted
