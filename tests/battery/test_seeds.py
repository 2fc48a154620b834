"""B8: a seed says which tokens come, and nothing else does: not the batch, the chunks, the preemptions or the cache."""

import dataclasses
import functools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from compiled_llm import CompiledEngine, RequestOutput, SamplingParams
from tests.battery.reference import LENGTHS, NUM_TOKENS, prompts
from tests.families import COMPILED_SIZES

MOST_TOKENS = 24


@dataclasses.dataclass(frozen=True)
class Seeded:
    """A request with a seed of its own."""

    prompt: list[int]
    params: SamplingParams


def seeded_requests(count: int) -> list[Seeded]:
    """Of all kinds: nothing or everything cut off, penalties of either sign, one or more continuations."""
    rng = random.Random(8)
    pool = [prompt for prompt in prompts("demo") if len(prompt) <= 66]
    requests = []
    for index in range(count):
        params = SamplingParams(
            seed=rng.choice([index, -index, rng.randrange(-(2**63), 2**63), 2**63 - 1 - index]),
            max_tokens=rng.randint(MOST_TOKENS // 2, MOST_TOKENS),
            n=rng.choice([1, 1, 2, 3]),
            temperature=rng.choice([0.3, 0.8, 1.0, 1.0, 1.7]),
            top_k=rng.choice([0, 0, 1, 5, 50]),
            top_p=rng.choice([1.0, 1.0, 0.5, 0.95]),
            min_p=rng.choice([0.0, 0.0, 0.05, 0.3]),
            top_n_sigma=rng.choice([0.0, 0.0, 1.0, 3.0]),
            presence_penalty=rng.choice([0.0, 0.0, 1.0, -0.5]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.7, -0.3]),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3, 0.9]),
            ignore_eos=rng.random() < 0.5,
        )
        requests.append(Seeded(rng.choice(pool), params))
    return requests


def tokens_of(outputs: list[RequestOutput]) -> list[list[list[int]]]:
    return [[completion.token_ids for completion in output.outputs] for output in outputs]


def serve(engine: CompiledEngine, requests: list[Seeded]) -> list[RequestOutput]:
    return engine.generate(
        [request.prompt for request in requests], [request.params for request in requests], use_tqdm=False
    )


def make_engine(**arguments: Any) -> CompiledEngine:
    defaults = {"dtype": "float32", "enforce_eager": True, "max_model_len": max(LENGTHS) + NUM_TOKENS}
    return CompiledEngine(**{**defaults, **arguments})


@functools.cache
def alone(count: int, dtype: str = "float32") -> list[list[list[int]]]:
    """Each by itself, in a batch of one, with nothing in the cache."""
    with make_engine(dtype=dtype, bucket_sizes=(1,), enable_prefix_caching=False, num_kv_blocks=64) as engine:
        return [tokens_of(serve(engine, [request]))[0] for request in seeded_requests(count)]


def all_at_once(requests: list[Seeded], counts: Counter[str], **arguments: Any) -> list[RequestOutput]:
    """In an order of its own; the outputs come in that of the requests."""
    order = random.Random(str(sorted(arguments))).sample(range(len(requests)), len(requests))
    with make_engine(**arguments) as engine:
        outputs = serve(engine, [requests[place] for place in order])
        stats = engine.stats()
        report = engine.compile_report()
    assert stats.used_blocks == 0
    counts["preemptions by recompute"] += stats.num_recompute_preemptions
    counts["preemptions by swap"] += stats.num_swap_preemptions
    counts["graphs"] += report.graphs
    assert (report.recompiles, report.graph_breaks) == (0, 0)
    return [outputs[order.index(place)] for place in range(len(requests))]


def together(requests: list[Seeded], counts: Counter[str]) -> list[RequestOutput]:
    return all_at_once(requests, counts, bucket_sizes=(32,), num_kv_blocks=1000)


def in_chunks(requests: list[Seeded], counts: Counter[str]) -> list[RequestOutput]:
    counts["longer than a chunk"] += sum(len(request.prompt) > 16 for request in requests)
    sizes = {"bucket_sizes": (1, 3, 8), "max_num_batched_tokens": 16, "num_kv_blocks": 400}
    return all_at_once(requests, counts, **sizes, async_scheduling=True)


def preempted(requests: list[Seeded], counts: Counter[str]) -> list[RequestOutput]:
    """Computed again, what it had sampled as well."""
    sizes = {"bucket_sizes": (8,), "block_size": 4, "num_kv_blocks": 30}
    outputs = all_at_once(requests, counts, **sizes, preemption_mode="recompute", enable_prefix_caching=False)
    counts["recomputed"] += sum(output.metrics.num_recomputed_tokens for output in outputs)
    return outputs


def swapped(requests: list[Seeded], counts: Counter[str]) -> list[RequestOutput]:
    sizes = {"bucket_sizes": (8,), "block_size": 4, "num_kv_blocks": 30, "swap_space_bytes": 2**22}
    outputs = all_at_once(requests, counts, **sizes, preemption_mode="swap", async_scheduling=True)
    counts["swapped"] += sum(output.metrics.num_swapped_tokens for output in outputs)
    return outputs


def in_a_warm_cache(requests: list[Seeded], counts: Counter[str]) -> list[RequestOutput]:
    """Others have been there with the same prompts, and more of them come and go between."""
    rng = random.Random(5)
    other = SamplingParams(temperature=1.2, max_tokens=8)
    with make_engine(bucket_sizes=(4, 16), num_kv_blocks=600, block_size=4) as engine:
        engine.generate([request.prompt for request in requests], other, use_tqdm=False)
        outputs: dict[str, RequestOutput] = {}
        coming = list(enumerate(requests))
        while coming or engine.has_unfinished_requests():
            if coming and rng.random() < 0.5:
                index, request = coming.pop()
                engine.add_request(f"{index}", request.prompt, request.params)
                engine.add_request(f"other {index}", rng.choice(requests).prompt, other)
            if rng.random() < 0.2:
                engine.abort(f"other {rng.randrange(len(requests))}")
            outputs |= {output.request_id: output for output in engine.step() if output.finished}
    own = [outputs[f"{index}"] for index in range(len(requests))]
    counts["tokens found"] += sum(output.num_cached_tokens for output in own)
    return own


def compiled(requests: list[Seeded], counts: Counter[str]) -> list[RequestOutput]:
    sizes = {**COMPILED_SIZES, "max_model_len": None, "num_kv_blocks": 64, "swap_space_bytes": 2**22}
    return all_at_once(requests, counts, **sizes, dtype="bfloat16", enforce_eager=False, async_scheduling=True)


def of_two_ranks(requests: list[Seeded], counts: Counter[str]) -> list[RequestOutput]:
    sizes = {"bucket_sizes": (1, 8), "block_size": 4, "num_kv_blocks": 30, "swap_space_bytes": 2**22}
    outputs = all_at_once(
        requests, counts, **sizes, preemption_mode="swap", async_scheduling=True, tensor_parallel_size=2
    )
    counts["swapped by ranks"] += sum(output.metrics.num_swapped_tokens for output in outputs)
    return outputs


# What each is about, and must have happened.
MIXES: dict[Callable[[list[Seeded], Counter[str]], list[RequestOutput]], str] = {
    together: "compared",
    in_chunks: "longer than a chunk",
    preempted: "recomputed",
    swapped: "swapped",
    in_a_warm_cache: "tokens found",
    compiled: "graphs",
    of_two_ranks: "swapped by ranks",
}
CASES = [
    pytest.param(10, preempted, id="small-preempted"),
    *(pytest.param(50, mix, id=f"full-{mix.__name__}", marks=pytest.mark.battery) for mix in MIXES),
]


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize(("count", "mix"), CASES)
def test_a_seed_gives_the_same_tokens_in_any_batch(
    count: int, mix: Callable[[list[Seeded], Counter[str]], list[RequestOutput]], battery_counts: Counter[str]
) -> None:
    requests, expected = seeded_requests(count), alone(count, "bfloat16" if mix is compiled else "float32")
    outputs = mix(requests, battery_counts)
    for request, output, tokens in zip(requests, outputs, expected, strict=True):
        assert [completion.token_ids for completion in output.outputs] == tokens, request
        battery_counts["compared"] += sum(map(len, tokens))
    assert battery_counts[MIXES[mix]] > 0


@pytest.mark.battery
@pytest.mark.usefixtures("_one_thread")
def test_other_seeds_give_other_tokens() -> None:
    """So that equal tokens above mean something: each continuation, and each seed, has random numbers of its own."""
    count = 50
    requests = [request for request in seeded_requests(count) if request.params.top_k != 1]
    expected = [
        tokens
        for request, tokens in zip(seeded_requests(count), alone(count), strict=True)
        if request.params.top_k != 1
    ]
    continuations = [tokens for tokens in expected if len(tokens) > 1]
    assert all(len({tuple(token_ids) for token_ids in tokens}) > 1 for tokens in continuations)
    others = []
    for request in requests:
        assert request.params.seed is not None
        params = dataclasses.replace(request.params, seed=request.params.seed ^ 1)
        others.append(Seeded(request.prompt, params))
    with make_engine(bucket_sizes=(32,), num_kv_blocks=1000) as engine:
        changed = tokens_of(serve(engine, others))
    same = sum(tokens == found for tokens, found in zip(expected, changed, strict=True))
    assert same < len(requests) / 4
