"""float32 and float16 on a CPU: a request's log-probabilities have the same bits in every bucket, chunk and company."""

import itertools
import random
from typing import Any

import pytest

from compiled_llm import CompiledEngine, SamplingParams
from tests.families import checkpoint

RNG = random.Random(0)
PROMPTS = [[RNG.randrange(3, 300) for _ in range(RNG.randint(1, 50))] for _ in range(20)]
# Of the choices of a step, 5 log-probabilities each; half of the requests sample.
PARAMS = [
    SamplingParams(temperature=n % 2, seed=n, max_tokens=20, logprobs=5, prompt_logprobs=2, ignore_eos=True)
    for n in range(len(PROMPTS))
]

Bits = list[dict[int, float]]
CASES = list(itertools.product(["float32", "float16"], ["auto", "int8", "fp8"]))


def bits_of(engine: CompiledEngine, first: int = 0, last: int = len(PROMPTS)) -> list[Bits]:
    """All log-probabilities of requests ``first`` to ``last``, of the prompt and of the output, for each token id."""
    outputs = engine.generate(PROMPTS[first:last], PARAMS[first:last], use_tqdm=False)
    lists = [[*filter(None, output.prompt_logprobs), *output.outputs[0].logprobs] for output in outputs]
    return [[{token: entry.logprob for token, entry in choices.items()} for choices in rows] for rows in lists]


@pytest.mark.parametrize(
    ("dtype", "kv_cache_dtype", "compiles"),
    [("float32", "int8", False), *(pytest.param(*case, True, marks=pytest.mark.battery) for case in CASES)],
)
def test_buckets_chunks_preemptions_and_compiling_change_no_bit(
    dtype: str, kv_cache_dtype: str, compiles: bool
) -> None:
    common: dict[str, Any] = {"dtype": dtype, "kv_cache_dtype": kv_cache_dtype, "max_model_len": 96}
    model = str(checkpoint("llama"))
    sizes: dict[str, Any] = {"bucket_sizes": (1, 8, 32), "token_bucket_sizes": (64,), "num_kv_blocks": 200}
    with CompiledEngine(model, enforce_eager=not compiles, **sizes, **common) as engine:
        together = bits_of(engine)
        assert [bits for n in range(len(PROMPTS)) for bits in bits_of(engine, n, n + 1)] == together
        assert [bits for n in range(0, len(PROMPTS), 7) for bits in bits_of(engine, n, n + 7)] == together
    with CompiledEngine(
        model, enforce_eager=True, bucket_sizes=(8,), max_num_batched_tokens=9, num_kv_blocks=7, **common
    ) as eager:
        assert bits_of(eager) == together
        assert eager.stats().num_preemptions > 2
