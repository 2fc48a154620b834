"""Serving with speculation against serving without: tokens, texts, ends and log-probabilities of random requests.

All methods, with everything that a request may ask for mixed, at random times. Drafts change how many steps a request
takes, and nothing else.
"""

import dataclasses
import functools
import os
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from compiled_llm import CompiledEngine, RequestOutput, SamplingParams
from compiled_llm.checkpoint.model_files import DEMO_MODEL
from tests.draft_heads import write_eagle3, write_medusa
from tests.drafted_runs import facts
from tests.families import checkpoint

METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 4, "num_speculative_tokens": 5},
    "suffix": {"method": "suffix", "suffix_decoding_min_token_prob": 0.0, "num_speculative_tokens": 15},
    "lookahead": {"method": "lookahead", "lookahead_ngram": 3, "num_speculative_tokens": 6},
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 4},
    "layer_skip": {"method": "layer_skip", "num_draft_layers": 2, "num_speculative_tokens": 4},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 4},
    "medusa": {"method": "medusa", "num_speculative_tokens": 4},
    "ngram tree": {
        "method": "ngram",
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
        "speculative_token_tree": "[(0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 1, 0), (0, 0, 0, 0)]",
    },
    "suffix tree": {
        "method": "suffix",
        "suffix_decoding_min_token_prob": 0.0,
        "num_speculative_tokens": 12,
        "speculative_token_tree": "auto",
    },
    "suffix, 63 drafts": {"method": "suffix", "suffix_decoding_min_token_prob": 0.0, "num_speculative_tokens": 63},
    **{
        f"{method} tree": {"method": method, "num_speculative_tokens": 12, "speculative_token_tree": "auto"}
        for method in ("draft_model", "eagle3", "medusa")
    },
}
SMALL_METHODS = ("ngram", "suffix")  # networks: tests/e2e/test_draft_model.py and test_draft_heads.py
HEADS = {"eagle3": write_eagle3, "medusa": write_medusa}  # of random weights; the bundled model has trained ones
# By the model, the one that drafts for it.
DRAFT_MODELS = {None: str(DEMO_MODEL), "lfm2": "llama", "deepseek-v3": "deepseek-v2"}
SIZES: dict[str, Any] = {
    "enforce_eager": True,
    "bucket_sizes": (1, 4, 6),
    "block_size": 8,
    "max_model_len": 160,
    "max_num_batched_tokens": 48,
    "check_invariants": True,
    "progress": "off",
    "num_threads": 1,  # a third of the processor's time: such small models keep two waiting for one another
}
SWAP: dict[str, Any] = {"preemption_mode": "swap", "swap_space_bytes": 2**24}
ENGINES: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32", "num_kv_blocks": 40, **SWAP},
    "bfloat16": {"dtype": "bfloat16", "num_kv_blocks": 40},
    "overlap": {"async_scheduling": True, "num_kv_blocks": 24, **SWAP},
    "int8 cache": {"kv_cache_dtype": "int8", "num_kv_blocks": 60},
    "fp8 cache": {"kv_cache_dtype": "fp8", "num_kv_blocks": 60, "async_scheduling": True},
    "int8 weights": {"quantization": "int8_w8a8", "num_kv_blocks": 60},
    "int4 weights": {"quantization": "int4", "num_kv_blocks": 60},
    "a window": {"sliding_window": 32, "num_kv_blocks": 60},
    "compiled": {"enforce_eager": False, "dtype": "float32", "num_kv_blocks": 40},
    "compiled, bfloat16": {"enforce_eager": False, "dtype": "bfloat16", "num_kv_blocks": 24, **SWAP},
    "states": {"model": "lfm2", "num_kv_blocks": 80, "bucket_sizes": (1, 4)},
    "latents": {"model": "deepseek-v3", "kv_cache_dtype": "int8", "num_kv_blocks": 24, "bucket_sizes": (1, 4)},
}
_CODE = (
    "def read_rows(path, separator):\n    with open(path) as file:\n        rows = [line.split(separator) for line in"
    " file]\n    return rows\n\n\ndef write_rows(path, rows):\n    with open(path) as file:\n        for row in rows:\n"
)
Work = list[tuple[str | list[int], SamplingParams]]


def random_work(rng: random.Random, count: int, *, has_text: bool, vocab_size: int) -> Work:
    """Requests with everything mixed. Prompts repeat themselves, so that there is something to draft."""
    return [_random_request(rng, has_text, vocab_size) for _ in range(count)]


def _random_request(rng: random.Random, has_text: bool, vocab_size: int) -> tuple[str | list[int], SamplingParams]:
    start, length = rng.randrange(60), rng.randint(4, 150)
    prompt: str | list[int] = (_CODE * 3)[start : start + length]
    if not has_text:
        phrase = [rng.randrange(3, vocab_size) for _ in range(rng.randint(1, 12))]
        prompt = (phrase * 20)[: rng.randint(1, 70)]
    asks: dict[str, Any] = {"max_tokens": rng.choice([1, 2, 9, 24, 40]), "seed": rng.randrange(1000)}
    asks["temperature"] = rng.choice([0.0, 0.0, 0.3, 0.8, 1.2])
    for name, values, share in (
        ("top_p", [0.5, 0.9], 0.3),
        ("top_k", [2, 20], 0.3),
        ("min_p", [0.05], 0.2),
        ("presence_penalty", [-1.0, 0.7], 0.15),
        ("frequency_penalty", [-0.5, 0.6], 0.15),
        ("repetition_penalty", [0.8, 1.3], 0.15),
        ("logprobs", [0, 3], 0.4),
        ("prompt_logprobs", [1], 0.1),
        ("logit_bias", [{5: 3.0, 40: -2.0}], 0.15),
        ("ignore_eos", [True], 0.5),
        ("output_kind", ["delta", "final"], 0.1),
    ):
        if rng.random() < share:
            asks[name] = rng.choice(values)
    if has_text:
        _add_text(rng, asks)
    else:
        asks["detokenize"] = False
    if rng.random() < 0.2:
        asks["stop_token_ids"] = [rng.randrange(vocab_size) for _ in range(10)]
    if asks["temperature"] > 0 and rng.random() < 0.15:
        asks["n"] = rng.randint(2, 3)
    return prompt, SamplingParams(**asks)


def _add_text(rng: random.Random, asks: dict[str, Any]) -> None:
    """Stop strings, and one kind of mask."""
    if rng.random() < 0.25:
        asks["stop"] = rng.choice([["\n"], ["row"], ["e"], ["):\n", "path"]])
        asks["include_stop_str_in_output"] = rng.random() < 0.5
    kind = rng.randrange(8)
    if kind == 0:
        asks["min_tokens"] = min(asks["max_tokens"], rng.randint(1, 12))
    elif kind == 1:
        asks["bad_words"] = rng.sample(["row", "path", "for", " file", "in rows", "return rows"], 3)
    elif kind == 2:
        asks["allowed_token_ids"] = list(range(rng.choice([40, 300])))
    elif kind == 3:
        asks["structured_outputs"] = rng.choice(
            [{"regex": "(row|path|file){2,9}"}, {"choice": ["yes", "rows", "rows of a file"]}, {"json_object": True}]
        )
        asks.pop("ignore_eos", None)


def serve(engine: CompiledEngine, work: Work, rng: random.Random) -> dict[str, RequestOutput]:
    """The whole output of each request; some are aborted, with what they have by then."""
    params = {str(index): asks for index, (_, asks) in enumerate(work)}
    outputs: dict[str, RequestOutput] = {}
    waiting = list(enumerate(work))
    while waiting or engine.has_unfinished_requests():
        for index, (prompt, asks) in waiting[: rng.randint(0, 3)]:
            engine.add_request(str(index), prompt, asks)
            waiting.remove((index, (prompt, asks)))
        for output in engine.step():
            if output.finished or params[output.request_id].output_kind == "cumulative":
                outputs[output.request_id] = output
        running = [name for name in outputs if not outputs[name].finished]
        if running and rng.random() < 0.01:
            name = rng.choice(running)
            engine.abort(name)
    return outputs


def compare(work: Work, plain: dict[str, RequestOutput], drafted: dict[str, RequestOutput]) -> int:
    """Returns how many requests were compared to their ends. What was aborted in one of the runs is a beginning."""
    whole = 0
    for name, (prompt, asks) in enumerate(work):
        one, other = plain.get(str(name)), drafted.get(str(name))
        if one is None or other is None:
            continue
        if one.finished and other.finished and asks.output_kind != "delta":
            assert facts(other) == facts(one), f"request {name}: {prompt!r}, {asks}"
            whole += 1
        elif asks.output_kind != "delta":
            for mine, its in zip(one.outputs, other.outputs, strict=False):
                count = min(len(mine.token_ids), len(its.token_ids))
                assert mine.token_ids[:count] == its.token_ids[:count], f"request {name}: {asks}"
    return whole


NUM_REQUESTS = int(os.environ.get("COMPILED_LLM_SPECULATION_REQUESTS", "275"))  # of an engine; 3,000 of a method
_SMALL = 28
_FULL = [
    pytest.param(engine, method, NUM_REQUESTS, id=f"full-{engine}-{method}", marks=pytest.mark.battery)
    for engine in ENGINES
    for method in METHODS
    # With states: the first layer of layer_skip keeps one, and trees are refused. That with latents has two layers.
    if not (engine in ("states", "latents") and method == "layer_skip")
    and not (engine == "states" and "tree" in method)
]


@functools.cache
def served_without(engine: str, count: int) -> tuple[Work, dict[str, RequestOutput]]:
    """Random requests, and what an engine without drafts makes of them."""
    with CompiledEngine(**arguments_of(engine)) as plain_engine:
        has_text = plain_engine.tokenizer is not None
        vocab_size = plain_engine.model_config.vocab_size
        work = random_work(random.Random(f"{engine} {count}"), count, has_text=has_text, vocab_size=vocab_size)
        return work, serve(plain_engine, work, random.Random(1))


def arguments_of(engine: str) -> dict[str, Any]:
    arguments = {**SIZES, **ENGINES[engine]}
    return arguments | ({"model": str(checkpoint(arguments["model"]))} if "model" in arguments else {})


@pytest.mark.parametrize(
    ("engine", "method", "count"),
    [*(pytest.param("float32", name, _SMALL, id=f"small-{name}") for name in SMALL_METHODS), *_FULL],
)
def test_the_same_as_without(
    engine: str, method: str, count: int, battery_counts: Counter[str], tmp_path: Path
) -> None:
    model = ENGINES[engine].get("model")
    work, plain = served_without(engine, count)
    for adaptive in (False, True) if count != _SMALL else (method == "suffix",):
        config = {**METHODS[method], "adaptive": adaptive}
        if config["method"] == "draft_model":
            drafting = DRAFT_MODELS[model]
            config["model"] = drafting if model is None else str(checkpoint(drafting))
        elif config["method"] in HEADS and model is None:
            config["model"] = str(DEMO_MODEL.parent / "demo_drafters" / config["method"])
        elif write := HEADS.get(config["method"]):
            config["model"] = write(tmp_path / method, checkpoint(model))
        with CompiledEngine(**arguments_of(engine), speculative_config=config) as drafting_engine:
            drafted_work = [(prompt, _with_drafts(asks, index)) for index, (prompt, asks) in enumerate(work)]
            drafted = serve(drafting_engine, drafted_work, random.Random(2))
            stats, report = drafting_engine.stats(), drafting_engine.compile_report()
        assert (report.graph_breaks, report.recompiles) == (0, 0)
        battery_counts["compared to the end"] += compare(drafted_work, plain, drafted)
        battery_counts["drafted"] += stats.num_draft_tokens
        battery_counts["accepted"] += stats.num_accepted_draft_tokens
        battery_counts["preemptions"] += stats.num_preemptions
        assert sum(stats.num_accepted_by_position) == stats.num_accepted_draft_tokens
    assert battery_counts["compared to the end"] > count / 2
    # Heads of random weights are hardly ever right.
    assert battery_counts["accepted"] > 0 or (model is not None and METHODS[method]["method"] in HEADS)


def _with_drafts(asks: SamplingParams, index: int) -> SamplingParams:
    """Some requests have no drafts, or few."""
    return dataclasses.replace(asks, num_speculative_tokens={0: 0, 1: 2}.get(index % 12))
