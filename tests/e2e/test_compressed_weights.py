"""An engine whose weights are compressed gives the bits of one whose are not."""

import dataclasses
from typing import Any

import pytest
import torch

from compiled_llm import CompiledEngine, EngineConfig, SamplingParams
from compiled_llm.checkpoint import quantization
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from compiled_llm.checkpoint.quantization import bytes_of_layers, plain_kind
from compiled_llm.models.config_file import read_config
from compiled_llm.models.linears.compressed import Compressed, CompressedExperts
from compiled_llm.models.linears.kept_twice import KeptTwice
from compiled_llm.models.linears.packed import Packed
from compiled_llm.models.linears.protocol import LinearKind
from compiled_llm.models.weights import experts, linears
from compiled_llm.ops import native
from tests.families import checkpoint

PROMPTS = [list(range(3 + i, 12 + 5 * i)) for i in range(7)]
SERVES = Compressed.serves(torch.device("cpu"), torch.bfloat16)
SERVES_TWICE = KeptTwice.serves(torch.device("cpu"), torch.bfloat16)


@pytest.mark.skipif(not SERVES, reason="for CPUs with AVX512-BF16")
@pytest.mark.filterwarnings("ignore:.*/compiled-llm-test-.*fields that transformers ignores")
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3-moe", "gpt2"])
def test_bits_are_those_of_plain_weights(family: str) -> None:
    found = []
    for compress in (True, False):
        with CompiledEngine(
            model=str(checkpoint(family)), dtype="bfloat16", compress_weights=compress, max_model_len=64,
            bucket_sizes=[1, 8], num_kv_blocks=40, enforce_eager=True,
        ) as engine:  # fmt: skip
            weights = engine.own_runner.steps.weights
            assert any(isinstance(layer, Compressed) for layer in linears(weights)) == compress
            assert all(isinstance(layer, CompressedExperts) == compress for layer in experts(weights))
            params = SamplingParams(max_tokens=9, temperature=0.8, seed=3, logprobs=3, prompt_logprobs=1)
            outputs = engine.generate(PROMPTS, params, use_tqdm=False)
            found.append([(o.prompt_logprobs, o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
    assert found[0] == found[1]


@pytest.mark.skipif(not SERVES_TWICE, reason="for CPUs with AMX")
@pytest.mark.filterwarnings("ignore:.*/compiled-llm-test-.*fields that transformers ignores")
@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_bits_are_those_of_plain_weights_where_they_are_kept_twice(family: str) -> None:
    """Compiled: a step of few requests takes one of the weights, prompts the other."""
    found = []
    for twice in (True, False):
        with CompiledEngine(
            model=str(checkpoint(family)), dtype="bfloat16", keep_weights_twice=twice, max_model_len=64,
            bucket_sizes=[1, 8], num_kv_blocks=40,
        ) as engine:  # fmt: skip
            weights = engine.own_runner.steps.weights
            assert any(isinstance(layer, KeptTwice) for layer in linears(weights)) == twice
            params = SamplingParams(max_tokens=9, temperature=0.8, seed=3, logprobs=3, prompt_logprobs=1)
            outputs = engine.generate(PROMPTS, params, use_tqdm=False)
            found.append([(o.prompt_logprobs, o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
    assert found[0] == found[1]


@pytest.mark.skipif(not SERVES, reason="for CPUs with AVX512-BF16")
def test_weights_of_caches_and_of_many_threads_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    config = dataclasses.replace(read_config(checkpoint("llama")), hidden_size=256)

    def kind(dtype: torch.dtype = torch.bfloat16, num_bytes_between: int = 0, **arguments: Any) -> LinearKind:
        return plain_kind(EngineConfig(**arguments), config, torch.device("cpu"), dtype, num_bytes_between)

    # Also where there is AMX, which has packed weights unless asked.
    monkeypatch.setattr(native, "best_isa", lambda: "avx512_bf16")
    assert kind(num_threads=1) is Packed
    assert kind(num_threads=1, num_bytes_between=2**26) is Compressed, "another model's are read meanwhile"
    assert kind(num_threads=5, num_bytes_between=2**26) is Packed
    monkeypatch.setattr(quantization, "IN_CACHES", 1000)
    assert kind(num_threads=1) is Compressed
    assert kind(num_threads=4) is Compressed
    assert kind(num_threads=5) is Packed
    assert kind(num_threads=5, compress_weights=True) is Compressed
    assert kind(num_threads=1, compress_weights=False) is Packed
    assert kind(torch.float32, num_threads=1) is Packed
    monkeypatch.setattr(native, "best_isa", lambda: "amx")
    assert kind(num_threads=1) is Packed
    assert kind(num_threads=1, compress_weights=True) is Compressed
    assert kind(num_threads=1, keep_weights_twice=True) is KeptTwice


@pytest.mark.skipif(not SERVES, reason="for CPUs with AVX512-BF16")
@pytest.mark.parametrize(("in_caches", "expected"), [(2**22, True), (2**30, False)])
def test_medusa_heads_are_compressed_beside_a_model_that_is(
    monkeypatch: pytest.MonkeyPatch, in_caches: int, expected: bool
) -> None:
    """Though they alone would stay in the processor's caches; and they draft, with the same tokens."""
    monkeypatch.setattr(native, "best_isa", lambda: "avx512_bf16")
    monkeypatch.setattr(quantization, "IN_CACHES", in_caches)
    heads = DEMO_MODEL.with_name("demo_drafters") / "medusa"
    prompt = "def add(a, b):\n    return a + b\n\n\ndef add(a, b):\n"
    found = []
    for config in ({"method": "medusa", "model": str(heads), "adaptive": False, "quantization": "none"}, None):
        with CompiledEngine(
            str(DEMO_MODEL), speculative_config=config, bucket_sizes=[1], max_model_len=128, num_kv_blocks=40,
            num_threads=1, enforce_eager=True,
        ) as engine:  # fmt: skip
            drafting = engine.own_runner.steps.drafting
            if drafting is not None:
                blocks = [block for head in drafting.network.weights.layers for block in head]
                assert bytes_of_layers(drafting.network.model_config, torch.bfloat16) < 2**22
                assert [isinstance(block, Compressed) for block in blocks] == [expected] * len(blocks)
            (output,) = engine.generate([prompt], SamplingParams(temperature=0, max_tokens=40), use_tqdm=False)
            found.append(output.outputs[0].token_ids)
            assert (engine.stats().num_accepted_draft_tokens > 0) == (config is not None)
    assert found[0] == found[1]


@pytest.mark.parametrize(("arguments", "given"), [({"dtype": "float32"}, "float32 on cpu")])
def test_what_cannot_be_compressed_is_refused(arguments: dict[str, str], given: str) -> None:
    with pytest.raises(ValueError, match=f"compress_weights must be None or False .* given True for {given}"):
        CompiledEngine(compress_weights=True, **arguments)


@pytest.mark.skipif(not SERVES_TWICE, reason="for CPUs with AMX")
def test_quantised_weights_are_not_kept_twice() -> None:
    with pytest.raises(ValueError, match="keep_weights_twice must be False where weights are quantised"):
        CompiledEngine(keep_weights_twice=True, quantization="int8")


def test_what_cannot_be_kept_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"keep_weights_twice must be False .* given True for float32 on cpu"):
        CompiledEngine(keep_weights_twice=True, dtype="float32")
