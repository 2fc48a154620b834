"""B5: what the prefix cache holds changes no token, whatever its dtype and whatever it served before."""

import itertools
import random
from collections import Counter
from typing import Any

import pytest

from compiled_llm import CompiledEngine, SamplingParams
from tests.battery.reference import LENGTHS, model_directory, prompts
from tests.drawn import marked

NUM_TOKENS = 16
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)

BUCKETS: dict[str, Any] = {"bucket_sizes": (1, 8), "token_bucket_sizes": (4, 32)}


def engine(kv_cache_dtype: str, model: str = "demo", **arguments: Any) -> CompiledEngine:
    defaults = {"dtype": "float32", "max_model_len": max(LENGTHS) + NUM_TOKENS, "enforce_eager": True}
    defaults |= {"kv_cache_dtype": kv_cache_dtype, "check_invariants": True}
    return CompiledEngine(model_directory(model), **defaults | arguments)


def conversations(model: str, count: int) -> list[list[int]]:
    """The prompts of the batteries, and these again with something added, as a next turn has."""
    rng = random.Random(5)
    known = prompts(model)
    turns = [
        (prompt + rng.choice(known)[: rng.randrange(1, 60)])[: max(LENGTHS)]
        for prompt in (known + known)[: max(0, count - len(known))]
    ]
    return (known + turns)[:count]


MODELS = [("demo", "auto"), ("demo", "int8"), ("demo", "fp8"), ("lfm2", "auto"), ("lfm2", "int8")]
CASES = [
    *(pytest.param("demo", "auto", 40, 20, id="small-demo"), pytest.param("lfm2", "int8", 1000, 20, id="small-lfm2")),
    *(
        pytest.param(*model, blocks, 100, id=f"full-{'-'.join(model)}-{blocks}", marks=pytest.mark.battery)
        for model, blocks in itertools.product(MODELS, (1000, 40))
    ),
]


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize(("model", "kv_cache_dtype", "num_kv_blocks", "num_prompts"), CASES)
def test_cold_equals_warm(
    model: str, kv_cache_dtype: str, num_kv_blocks: int, num_prompts: int, battery_counts: Counter[str]
) -> None:
    """Three rounds in other orders: with a pool that keeps every block, and with one that evicts all the time.

    Of states, the first keeps every snapshot, too.
    """
    asked = conversations(model, num_prompts)
    with engine(kv_cache_dtype, model, enable_prefix_caching=False, num_kv_blocks=1000, **BUCKETS) as cold:
        expected = [output.outputs[0].token_ids for output in cold.generate(asked, GREEDY, use_tqdm=False)]
        assert cold.stats().prefix_hit_tokens == 0
    assert len(set(map(tuple, expected))) > num_prompts // 2, "they would not tell one prompt from another"

    rng = random.Random(55)
    slots = None if model == "demo" else num_kv_blocks
    with engine(kv_cache_dtype, model, num_kv_blocks=num_kv_blocks, num_state_slots=slots, **BUCKETS) as warm:
        for number in (1, 2, 3):
            order = rng.sample(range(num_prompts), num_prompts)
            hits = warm.stats().prefix_hit_tokens
            outputs = warm.generate([asked[index] for index in order], GREEDY, use_tqdm=False)
            assert [output.outputs[0].token_ids for output in outputs] == [expected[index] for index in order]
            battery_counts["prompts"] += num_prompts
            battery_counts[f"tokens found in round {number}"] = found = warm.stats().prefix_hit_tokens - hits
            assert found == sum(output.num_cached_tokens for output in outputs) > 0
            if number > 1 and num_kv_blocks == 1000:
                # All full blocks but one that holds a prompt's last token, which has to be computed.
                assert [output.num_cached_tokens for output in outputs] == [
                    (len(asked[index]) - 1) // 16 * 16 for index in order
                ]
        battery_counts["evictions"] = warm.stats().num_evictions
        assert (warm.stats().num_evictions > 0) == (num_kv_blocks == 40)
        assert (warm.stats().used_blocks, warm.stats().used_slots) == (0, 0)


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("kv_cache_dtype", marked(["auto", "int8", "fp8"], ("int8",)))
def test_another_salt_finds_nothing_and_gives_the_same_tokens(kv_cache_dtype: str) -> None:
    prompt = next(prompt for prompt in prompts("demo") if len(prompt) > 60)
    cacheable = (len(prompt) - 1) // 16 * 16

    def of_salt(*salts: str | None) -> list[dict[str, Any]]:
        return [{"prompt_token_ids": prompt} | ({} if salt is None else {"cache_salt": salt}) for salt in salts]

    with engine(kv_cache_dtype, num_kv_blocks=200, **BUCKETS) as salted:
        batches = [  # one after another: prompts of a batch, and which of its tokens each should find
            (of_salt("a"), [0]),
            (of_salt("a"), [cacheable]),
            (of_salt("b"), [0]),
            (of_salt(None), [0]),
            (of_salt(None, "b", "a", "c", "c", "d"), [cacheable, cacheable, cacheable, 0, cacheable, 0]),
        ]
        tokens = set()
        for batch, expected in batches:
            outputs = salted.generate(batch, GREEDY, use_tqdm=False)
            assert [output.num_cached_tokens for output in outputs] == expected
            tokens |= {tuple(output.outputs[0].token_ids) for output in outputs}
        assert len(tokens) == 1
