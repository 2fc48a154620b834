"""Streams (StreamingLLM): the first tokens and the last ones, at their positions in the cache, in flat memory.

The reference computes every query against all keys, in float64 and without a cache: a key that the query sees is turned
by its position among those that it sees.
"""

import re
from typing import Any

import psutil
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor

from compiled_llm import CompiledEngine, EngineConfig, SamplingParams
from compiled_llm.api.streaming import Stream
from tests.battery import sized
from tests.families import checkpoint, transformers_model

SINKS, WINDOW, BLOCK = 4, 32, 4
SIZES: dict[str, Any] = {
    "bucket_sizes": (4,), "max_num_batched_tokens": 16, "max_model_len": 400, "block_size": BLOCK,
    "dtype": "float32", "device": "cpu", "enforce_eager": True, "check_invariants": True, "sliding_window": WINDOW,
}  # fmt: skip
STREAM = {"attention_sink_tokens": SINKS, "enable_prefix_caching": False}
PROMPTS = [[(7 * i) % 199 for i in range(90)], [(11 * i) % 197 for i in range(20)], [(5 * i) % 193 for i in range(150)]]


def greedy(count: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=0)


def turned(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Heads ``[..., H]`` turned by ``positions``, which broadcast against the dimensions before."""
    half = x.shape[-1] // 2
    angles = positions[..., None] * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    first, second = x.chunk(2, -1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def seen_by(stream: Stream, length: int) -> Tensor:
    """The position of key j in the cache of query i, ``[length, length]``; -1 where it is not there."""
    where = torch.full((length, length), -1, dtype=torch.float64)
    for i in range(length):
        there = [j for j in range(i + 1) if not 0 <= j - stream.sink_tokens < stream.num_dropped(i)]
        assert len(there) <= stream.capacity
        where[i, there] = torch.arange(len(there), dtype=torch.float64)
    return where


def reference_logits(model: transformers.LlamaForCausalLM, token_ids: list[int], stream: Stream) -> Tensor:
    """Logits ``[T, V]`` of a Llama in float64, each token with the keys that it sees."""
    config, decoder = model.config, model.model
    heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    theta = config.rope_parameters["rope_theta"]
    where = seen_by(stream, len(token_ids))
    own = where.diagonal()
    x = decoder.embed_tokens(torch.tensor(token_ids))
    for layer in decoder.layers:
        normed, block = layer.input_layernorm(x), layer.self_attn
        q = block.q_proj(normed).unflatten(-1, (heads, size)).transpose(0, 1)
        k, v = (
            f(normed).unflatten(-1, (kv_heads, size)).transpose(0, 1).repeat_interleave(heads // kv_heads, 0)
            for f in (block.k_proj, block.v_proj)
        )
        q = turned(q, own, theta)
        keys = turned(k[:, None], where.clamp(min=0), theta)  # [N, query, key, H]
        scores = torch.einsum("nqh,nqkh->nqk", q, keys) * size**-0.5
        probs = scores.masked_fill(where < 0, float("-inf")).softmax(-1)
        x = x + block.o_proj((probs @ v).transpose(0, 1).flatten(1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return F.linear(decoder.norm(x), model.lm_head.weight)


@pytest.fixture(scope="module")
def reference() -> transformers.PreTrainedModel:
    return transformers_model("llama").double()


@pytest.fixture(scope="module")
def directory() -> str:
    return str(checkpoint("llama"))


def generate(engine: CompiledEngine, count: int = 60) -> list[tuple[list[int], list[float]]]:
    outputs = engine.generate([{"prompt_token_ids": ids} for ids in PROMPTS], greedy(count))
    found = []
    for output in outputs:
        tokens = output.outputs[0].token_ids
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        found.append((tokens, [row[token].logprob for row, token in zip(logprobs, tokens, strict=True)]))
    return found


@pytest.mark.parametrize("sinks", [SINKS, 0])
def test_log_probabilities_are_those_of_the_paper(directory: str, reference: Any, sinks: int) -> None:
    arguments = STREAM if sinks else {}
    with CompiledEngine(model=directory, **SIZES, **arguments) as engine:
        found = generate(engine)
    stream = Stream.of(sinks, WINDOW, BLOCK)
    if not sinks:
        stream = Stream(0, WINDOW, 1)  # a plain window loses one token at a time
    for prompt, (tokens, logprobs) in zip(PROMPTS, found, strict=True):
        with torch.no_grad():
            logits = reference_logits(reference, prompt + tokens, stream)[len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1)
        chosen = expected[torch.arange(len(tokens)), torch.tensor(tokens)]
        assert (chosen - torch.tensor(logprobs, dtype=torch.float64)).abs().max() < 1e-4
        assert (chosen >= expected.max(-1).values - 1e-4).all()
        assert len(prompt) + len(tokens) > 2 * stream.capacity, "no token has left the cache twice"


@pytest.fixture(scope="module")
def expected(directory: str) -> list[tuple[list[int], list[float]]]:
    with CompiledEngine(model=directory, **SIZES, **STREAM) as engine:
        return generate(engine)


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"max_num_batched_tokens": 7}, marks=pytest.mark.battery),
        {"max_num_seqs": 1},
        pytest.param(
            {"num_kv_blocks": 100, "async_scheduling": True, "max_num_batched_tokens": 9}, marks=pytest.mark.battery
        ),
        {"num_kv_blocks": 72},
        pytest.param({"kv_cache_dtype": "auto", "enforce_eager": False}, marks=pytest.mark.battery),
    ],
    ids=["small chunks", "alone", "overlapping", "preempted", "compiled"],
)
def test_numbers_are_the_same_in_any_company(
    directory: str, expected: list[tuple[list[int], list[float]]], arguments: dict[str, Any]
) -> None:
    with CompiledEngine(model=directory, **{**SIZES, **STREAM, **arguments}) as engine:
        assert generate(engine) == expected
        if arguments.get("num_kv_blocks") == 72:
            assert engine.stats().num_recompute_preemptions > 0
        report = engine.compile_report()
        assert (report.graph_breaks, report.recompiles) == (0, 0)


def test_continuations_of_a_prompt_compute_it_themselves(directory: str) -> None:
    with CompiledEngine(model=directory, **SIZES, **STREAM) as engine:
        params = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=50, ignore_eos=True)
        several = engine.generate([{"prompt_token_ids": PROMPTS[0]}], params)[0].outputs
        assert len({tuple(completion.token_ids) for completion in several}) == 3
        again = engine.generate([{"prompt_token_ids": PROMPTS[0]}], params)[0].outputs
        assert [a.token_ids for a in again] == [b.token_ids for b in several]


def test_quantised_caches_stream(directory: str) -> None:
    with CompiledEngine(model=directory, **SIZES, **STREAM, kv_cache_dtype="int8") as engine:
        for tokens, _ in generate(engine):
            assert len(tokens) == 60


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"sliding_window": None}, "sliding_window must be given with attention_sink_tokens=4"),
        ({"sliding_window": 30}, "multiple of block_size=4"),
        ({"enable_prefix_caching": True}, "enable_prefix_caching must be False"),
        ({"swap_space_bytes": 2**20}, "swap_space_bytes must be 0"),
        ({"max_num_batched_tokens": 10, "attention_sink_tokens": 8}, "max_num_batched_tokens must be at least 11"),
    ],
)
def test_what_does_not_go_together_is_refused(directory: str, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        CompiledEngine(model=directory, **{**SIZES, **STREAM, **arguments})


@pytest.mark.parametrize("family", ["gpt2", "gemma3", "ministral3"])
def test_models_that_know_positions_are_refused(family: str) -> None:
    sizes = {**SIZES, "max_model_len": 128}
    with pytest.raises(ValueError, match="sliding_window must be None for"):
        CompiledEngine(model=str(checkpoint(family)), **sizes)


def test_sink_tokens_need_layers_that_would_see_them(directory: str) -> None:
    sizes = {**SIZES, **STREAM, "max_model_len": 128}
    for family in ("gpt-oss", "gemma2"):  # windows of 6 in some layers
        with pytest.raises(ValueError, match=r"attention_sink_tokens must be 0 for .* a window of 6 of their own"):
            CompiledEngine(model=str(checkpoint(family)), **sizes)
        with CompiledEngine(model=str(checkpoint(family)), **{**sizes, "sliding_window": 4}) as engine:
            (output,) = engine.generate([{"prompt_token_ids": PROMPTS[1]}], greedy(30))
            assert len(output.outputs[0].token_ids) == 30


def test_a_stream_may_be_longer_than_the_model_and_its_cache_no_longer(directory: str) -> None:
    limit = transformers.AutoConfig.from_pretrained(directory).max_position_embeddings
    with pytest.raises(ValueError, match="max_model_len must be at most"):
        CompiledEngine(model=directory, **{**SIZES, "sliding_window": None, "max_model_len": limit + 1})
    with pytest.raises(ValueError, match="sliding_window and attention_sink_tokens must be at most"):
        CompiledEngine(model=directory, **{**SIZES, **STREAM, "sliding_window": limit})


def test_the_number_of_tokens_that_left_is_a_function_of_the_position() -> None:
    stream = Stream.of(3, 64, 4)
    assert (stream.sink_tokens, stream.unit, stream.capacity) == (4, 8, 68)
    for position in range(300):
        dropped, kept = stream.num_dropped(position), position + 1 - stream.num_dropped(position)
        assert dropped % stream.unit == 0
        assert kept <= stream.capacity
        assert kept > stream.capacity - stream.unit or not dropped
        until = stream.num_until_drop(position)
        assert until >= 1
        assert stream.num_dropped(position + until - 1) == dropped < stream.num_dropped(position + until)


@sized("length", 300, 50_000)
def test_memory_is_flat(directory: str, length: int) -> None:
    """Of one request without end: its places, and the process's memory."""
    sizes = {**SIZES, **STREAM, "bucket_sizes": (1,), "max_model_len": length, "check_invariants": False}
    with CompiledEngine(model=directory, **sizes) as engine:
        assert isinstance(engine.config, EngineConfig)
        (window,) = engine.scheduler.pool.windows
        params = SamplingParams(temperature=0, max_tokens=length - 10, ignore_eos=True, output_kind="delta")
        used, memory = [], []
        for number, _ in enumerate(engine.stream({"prompt_token_ids": PROMPTS[0][:10]}, params)):
            used.append(window.num_used)
            if number % 100 == 0:
                memory.append(psutil.Process().memory_info().rss)
        assert len(used) == length - 10
        assert max(used) <= (SINKS + WINDOW) // BLOCK + 1
        assert engine.runner.kv_cache_bytes < 200 * 2**10
        # What grows is the list of its tokens.
        assert memory[-1] - memory[2] < 2**20 + 100 * length
