"""A quantised KV cache: the same tokens whatever the batch, the chunk or the preemptions, and the memory it says.

A token's codes and scale depend on nothing but its own key and value, and these have the same bits in every step.
"""

import json

import pytest
import torch

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.engine.engine import DEMO_MODEL
from tests.families import COMPILED_SIZES

NUM_PROMPTS, NUM_TOKENS = 16, 24
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
PROMPTS = [json.loads(row)["prompt"] for row in (DEMO_MODEL / "prompts.jsonl").read_text().splitlines()][:NUM_PROMPTS]


def engine(kv_cache_dtype: str, **arguments) -> CompiledEngine:
    defaults = {"dtype": "float32", "max_model_len": 256, "num_kv_blocks": 300, "check_invariants": True}
    return CompiledEngine(**defaults | {"kv_cache_dtype": kv_cache_dtype} | arguments)


def tokens_of(engine: CompiledEngine, prompts: list[str] = PROMPTS) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in engine.generate(prompts, GREEDY, use_tqdm=False)]


@pytest.fixture(scope="module")
def expected() -> dict[str, list[list[int]]]:
    """Tokens of each dtype, uncompiled, whole prompts in a step."""
    tokens = {}
    for kv_cache_dtype in ("auto", "int8", "fp8"):
        with engine(kv_cache_dtype, enforce_eager=True, bucket_sizes=(16,)) as plain:
            tokens[kv_cache_dtype] = tokens_of(plain)
    return tokens


def num_same(ours: list[list[int]], theirs: list[list[int]]) -> int:
    return sum(a == b for a, b in zip(ours, theirs, strict=True))


def test_the_cache_is_quantised_and_mostly_right(expected: dict[str, list[list[int]]]) -> None:
    for kv_cache_dtype, least in (("int8", 12), ("fp8", 8)):
        assert least <= num_same(expected[kv_cache_dtype], expected["auto"]) < NUM_PROMPTS
    assert expected["int8"] != expected["fp8"]


@pytest.mark.battery
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_compiled_in_chunks_of_32_with_preemptions(kv_cache_dtype: str, expected: dict[str, list[list[int]]]) -> None:
    with engine(kv_cache_dtype, **COMPILED_SIZES, max_num_batched_tokens=32, num_kv_blocks=16 + 1) as small:
        alone = [tokens_of(small, [prompt])[0] for prompt in PROMPTS]
        assert small.stats().num_preemptions == 0
        assert tokens_of(small) == alone
        assert small.stats().num_preemptions > 0
        assert alone == expected[kv_cache_dtype]
        report = small.compile_report()
        assert (report.graphs, report.graph_breaks, report.recompiles) == (5, 0, 0)


@pytest.mark.parametrize(
    ("kv_cache_dtype", "batch", "block_size", "tokens"), [("int8", 8, 1, 16), ("fp8", 16, 32, 100)]
)
def test_other_batches_chunks_and_block_sizes(
    kv_cache_dtype: str, batch: int, block_size: int, tokens: int, expected: dict[str, list[list[int]]]
) -> None:
    sizes = {"bucket_sizes": (batch,), "block_size": block_size, "token_bucket_sizes": (tokens,)}
    blocks = 300 * 16 // block_size
    with engine(kv_cache_dtype, enforce_eager=True, num_kv_blocks=blocks, **sizes) as other:
        assert tokens_of(other) == expected[kv_cache_dtype]


@pytest.mark.parametrize(
    "kv_cache_dtype", [pytest.param(each, marks=pytest.mark.battery) for each in ("auto", "int8", "fp8")]
)
def test_in_bfloat16_every_batch_gives_the_same_tokens(kv_cache_dtype: str) -> None:
    arguments = {"dtype": "bfloat16", "enforce_eager": True}
    with engine(kv_cache_dtype, bucket_sizes=(16,), **arguments) as large:
        wanted = tokens_of(large)
    with engine(kv_cache_dtype, bucket_sizes=(3,), token_bucket_sizes=(16,), **arguments) as small:
        assert tokens_of(small) == wanted


def test_skipped_layers_stay_in_the_models_dtype(expected: dict[str, list[list[int]]]) -> None:
    arguments = {"enforce_eager": True, "bucket_sizes": (16,)}
    with engine("int8", kv_cache_skip_layers=(0, 1, 2, 3), **arguments) as nothing_quantised:
        assert tokens_of(nothing_quantised) == expected["auto"]
    with engine("int8", kv_cache_skip_layers=(3, 0), **arguments) as mixed:
        kinds = [layer.k.dtype for layer in mixed.runner.steps.kv_cache]
        assert [kind == torch.float32 for kind in kinds] == [True, False, False, True]
        assert [layer.k_scale is None for layer in mixed.runner.steps.kv_cache] == [True, False, False, True]
        assert len(tokens_of(mixed)) == NUM_PROMPTS


@pytest.mark.parametrize("kv_cache_dtype", ["int8", pytest.param("fp8", marks=pytest.mark.battery)])
def test_the_pool_counts_codes_and_scales_to_the_byte(kv_cache_dtype: str) -> None:
    arguments = {"dtype": "bfloat16", "enforce_eager": True, "bucket_sizes": (1,)}
    memory = 2**20
    with engine("auto", **arguments) as plain, engine(kv_cache_dtype, **arguments) as quantised:
        head_dim = plain.model_config.head_dim
        assert quantised.runner.kv_cache_bytes * 2 * head_dim == plain.runner.kv_cache_bytes * (head_dim + 4)
    arguments |= {"num_kv_blocks": None, "kv_cache_memory_bytes": memory}
    for layers in ((), (1,)):
        with engine(kv_cache_dtype, **arguments, kv_cache_skip_layers=layers) as sized:
            block = sized.runner.kv_cache_bytes // (sized.runner.facts.num_blocks + 1)
            assert sized.runner.facts.num_blocks == memory // block
