"""Greedy tokens of the demo model, whatever the batch, chunk or preemptions; in float32 those of transformers."""

import json

import pytest
import torch
import transformers

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.engine.engine import DEMO_MODEL
from tests.families import COMPILED_SIZES

NUM_PROMPTS, NUM_TOKENS = 16, 32
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Bundled prompts and pieces of others: token lists of 1 to some hundred tokens."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO_MODEL)
    rows = (DEMO_MODEL / "prompts.jsonl").read_text().splitlines()
    bundled = [tokenizer(json.loads(row)["prompt"]).input_ids for row in rows]
    pieces = [ids[: 1 + 7 * n] for n, ids in enumerate(bundled)]
    return bundled[: NUM_PROMPTS // 2] + pieces[: NUM_PROMPTS // 2]


def alone(prompts: list[list[int]], dtype: str) -> list[list[int]]:
    """The engine's own tokens, uncompiled, one prompt after another."""
    with CompiledEngine(dtype=dtype, enforce_eager=True, bucket_sizes=(1,), max_num_batched_tokens=512) as engine:
        return [tokens_of(engine, [prompt])[0] for prompt in prompts]


def as_transformers(prompts: list[list[int]]) -> list[list[int]]:
    """Each alone in float32: what transformers finds most likely at each place.

    That is what transformers generates, seen in one pass over a prompt and its tokens.
    """
    found = alone(prompts, "float32")
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval()
    with torch.inference_mode():
        for prompt, tokens in zip(prompts, found, strict=True):
            logits = model(torch.tensor([prompt + tokens])).logits[0]
            assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens
    return found


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> dict[str, list[list[int]]]:
    """By dtype."""
    return {"float32": as_transformers(prompts), "bfloat16": alone(prompts, "bfloat16")}


def tokens_of(
    engine: CompiledEngine, prompts: list[list[int]], sampling_params: SamplingParams = GREEDY
) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in engine.generate(prompts, sampling_params, use_tqdm=False)]


@pytest.mark.battery  # the ordinary run has tests/e2e/test_same_bits.py, and test_sampling.py's compiled requests
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_buckets_of_several_sizes(dtype: str, prompts: list[list[int]], expected: dict[str, list[list[int]]]) -> None:
    with CompiledEngine(dtype=dtype, **COMPILED_SIZES, num_kv_blocks=500, check_invariants=True) as engine:
        assert tokens_of(engine, prompts) == expected[dtype]
        assert tokens_of(engine, prompts[:8]) == expected[dtype][:8]
        assert tokens_of(engine, prompts[8:9]) == expected[dtype][8:9]
        report = engine.compile_report()
        assert (report.graph_breaks, report.recompiles) == (0, 0)
        assert all(r.graphs == 1 for r in report.reports)


@pytest.mark.battery  # the ordinary run has the small size of tests/battery/test_identity.py
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_a_pool_so_small_that_requests_are_preempted(
    dtype: str, mode: str, prompts: list[list[int]], expected: dict[str, list[list[int]]]
) -> None:
    longest = max(map(len, prompts)) + NUM_TOKENS
    with CompiledEngine(
        dtype=dtype,
        **COMPILED_SIZES,
        num_kv_blocks=-(-longest // 16) + 2,
        preemption_mode=mode,
        swap_space_bytes=2**22,
        check_invariants=True,
    ) as engine:
        outputs = engine.generate(prompts, GREEDY, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected[dtype]
        stats = engine.stats()
        assert stats.num_preemptions >= 5
        assert (stats.num_swap_preemptions > 0) == (mode == "swap")
        assert sum(output.metrics.num_preemptions for output in outputs) == stats.num_preemptions
        assert engine.compile_report().recompiles == 0


def test_eager_and_other_block_sizes(prompts: list[list[int]]) -> None:
    some = prompts[4:12]
    expected = as_transformers(some)
    for block_size, chunked, batched in ((1, True, None), (16, True, 16), (32, False, None)):
        with CompiledEngine(
            dtype="float32",
            enforce_eager=True,
            block_size=block_size,
            enable_chunked_prefill=chunked,
            max_num_batched_tokens=batched,
            bucket_sizes=(16,),
        ) as engine:
            assert tokens_of(engine, some) == expected


@pytest.mark.parametrize("kv_cache_dtype", [pytest.param("auto", marks=pytest.mark.battery), "int8"])
def test_requests_that_begin_alike_get_the_tokens_that_each_gets_alone(
    prompts: list[list[int]], kv_cache_dtype: str
) -> None:
    """600 tokens in common: on a CPU, attention reads the first 512 keys of them once for all."""
    common = ([token for prompt in prompts for token in prompt] * 5)[:600]
    requests = [common + prompt[: 5 + n] for n, prompt in enumerate(prompts[:5])]
    arguments = {"dtype": "bfloat16", "kv_cache_dtype": kv_cache_dtype, "enforce_eager": True, "num_kv_blocks": 400}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with CompiledEngine(bucket_sizes=(1, 8), **arguments) as engine:
        together = tokens_of(engine, requests, params)
        assert engine.stats().prefix_hit_tokens >= 4 * 592
    with CompiledEngine(bucket_sizes=(1,), enable_prefix_caching=False, **arguments) as engine:
        assert [tokens_of(engine, [request], params)[0] for request in requests] == together
