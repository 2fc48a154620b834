"""An engine whose weights are compressed gives the bits of one whose are not."""

import pytest
import torch

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.models.linears.compressed import Compressed
from compiled_llm.models.weights import linears
from tests.families import checkpoint

PROMPTS = [list(range(3 + i, 12 + 5 * i)) for i in range(7)]
SERVES = Compressed.serves(torch.device("cpu"), torch.bfloat16)


@pytest.mark.skipif(not SERVES, reason="for CPUs with AVX512-BF16 and without AMX")
@pytest.mark.filterwarnings("ignore:.*/compiled-llm-test-.*fields that transformers ignores")
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3-moe", "gpt2"])
def test_bits_are_those_of_plain_weights(family: str) -> None:
    found = []
    for compress in (True, False):
        with CompiledEngine(
            model=str(checkpoint(family)), dtype="bfloat16", compress_weights=compress, max_model_len=64,
            bucket_sizes=[1, 8], num_kv_blocks=40, enforce_eager=True,
        ) as engine:  # fmt: skip
            assert any(isinstance(layer, Compressed) for layer in linears(engine.own_runner.steps.weights)) == compress
            params = SamplingParams(max_tokens=9, temperature=0.8, seed=3, logprobs=3, prompt_logprobs=1)
            outputs = engine.generate(PROMPTS, params, use_tqdm=False)
            found.append([(o.prompt_logprobs, o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs])
    assert found[0] == found[1]


@pytest.mark.parametrize(("arguments", "given"), [({"dtype": "float32"}, "float32 on cpu")])
def test_what_cannot_be_compressed_is_refused(arguments: dict[str, str], given: str) -> None:
    with pytest.raises(ValueError, match=f"compress_weights must be None or False .* given True for {given}"):
        CompiledEngine(compress_weights=True, **arguments)
