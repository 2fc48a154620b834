"""Engines whose drafts are trees: keys and values are those of a run without, the same tokens come, and who refuses."""

import dataclasses
from typing import Any

import pytest
import torch

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.models.config_file import read_config
from compiled_llm.scheduling.scheduler_output import SchedulerOutput, WindowOutput
from compiled_llm.worker.draft_trees import check_trees
from tests.drawn import marked
from tests.families import checkpoint

ARGUMENTS: dict[str, Any] = {
    "enforce_eager": True, "bucket_sizes": (2,), "block_size": 8, "max_model_len": 256, "num_kv_blocks": 60,
    "check_invariants": True, "progress": "off", "num_threads": 1,
}  # fmt: skip
TREE: dict[str, Any] = {
    "method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2, "num_speculative_tokens": 63, "adaptive": False,
    "speculative_token_tree": "auto",
}  # fmt: skip
PROMPT = "def area(width, height):\n    return width * height\n\n\ndef area(width, depth):\n    return width"
PARAMS = SamplingParams(temperature=0.7, seed=3, max_tokens=60, ignore_eos=True, logprobs=2)
KINDS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "int8": {"kv_cache_dtype": "int8"},
    "latents": {"model": "deepseek-v3"},
    "latents-float32": {"model": "deepseek-v2", "dtype": "float32"},
    "latents-int8": {"model": "deepseek-v3", "kv_cache_dtype": "int8"},
    "latents-compiled": {"model": "deepseek-v3", "enforce_eager": False},
    "latents-fp8": {"model": "mistral4", "kv_cache_dtype": "fp8"},
}


def served(engine: CompiledEngine) -> tuple[list[int], list[Any], list[torch.Tensor], int]:
    """Tokens, log-probabilities, all tensors of the request's full blocks, and how many keys were moved."""
    if engine.tokenizer is None:  # of random weights: with few tokens to choose from it repeats itself
        params = dataclasses.replace(PARAMS, detokenize=False, max_tokens=120, allowed_token_ids=[5, 6, 7])
        engine.add_request("a", [5, 6, 7] * 12, params)
    else:
        engine.add_request("a", PROMPT, PARAMS)
    blocks: list[int] = []
    steps, moved, outputs = engine.own_runner.steps, 0, []
    while engine.has_unfinished_requests():
        outputs = engine.step() or outputs
        scheduler = engine.scheduler
        moved += len(scheduler.running_set.moved_keys)
        if scheduler.running:
            request = scheduler.running[0]
            blocks = request.block_ids[: request.num_computed_tokens // ARGUMENTS["block_size"]]
    windows = tuple(WindowOutput(moved_keys=tuple(window.moved_keys)) for window in engine.scheduler.pool.windows)
    moves = tuple(engine.scheduler.running_set.moved_keys)
    steps.move_keys(SchedulerOutput(windows=windows, moved_keys=moves))
    held = [cache[blocks].clone() for group in steps.cache_groups()[:1] for cache in group]
    completion = outputs[0].outputs[0]
    return list(completion.token_ids), completion.logprobs, held, moved


@pytest.mark.parametrize("kind", marked(KINDS, ["int8", "latents"]))
def test_keys_are_those_of_a_run_without_trees(kind: str) -> None:
    """Bit for bit, in all full blocks of the request, with many of them moved there."""
    options = dict(KINDS[kind])
    if "model" in options:
        options["model"] = str(checkpoint(options["model"]))
    options = ARGUMENTS | options
    with CompiledEngine(**options) as engine:
        tokens, logprobs, held, moved = served(engine)
    assert moved == 0
    with CompiledEngine(**options, speculative_config=TREE) as engine:
        drafted = served(engine)
        stats = engine.stats()
    assert drafted[:2] == (tokens, logprobs)
    assert drafted[3] > 3  # how many it is depends on the tokens, and these on the kernels
    assert stats.num_steps < len(tokens)
    count = min(len(held[0]), len(drafted[2][0]))
    assert count > 8
    for one, other in zip(held, drafted[2], strict=True):
        assert torch.equal(one[:count].view(torch.uint8), other[:count].view(torch.uint8))


@pytest.mark.parametrize(("sizes", "count", "num_requests"), [((2,), 40, 1), ((1, 2), 40, 2), ((1, 3), 63, 3)])
def test_drafts_that_no_number_of_requests_divides(sizes: tuple[int, ...], count: int, num_requests: int) -> None:
    """A step of as many drafts as there is room for has a bucket."""
    prompts, params = ["a = 1\n" * 6] * num_requests, SamplingParams(temperature=0.0, max_tokens=90, ignore_eos=True)
    config = {"method": "ngram", "num_speculative_tokens": count, "adaptive": False}
    found = []
    for drafting in (None, config):
        arguments = ARGUMENTS | {"bucket_sizes": sizes, "max_model_len": 160}
        with CompiledEngine(**arguments, speculative_config=drafting) as engine:
            outputs = engine.generate(prompts, params, use_tqdm=False)
            stats = engine.stats()
        found.append([list(output.outputs[0].token_ids) for output in outputs])
    assert found[0] == found[1]
    assert stats.num_accepted_draft_tokens > 40 * num_requests


def test_who_refuses_trees() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    for name in ("llama", "deepseek-v2"):
        model_config = read_config(checkpoint(name))
        for device in (cpu, gpu):
            check_trees(model_config, device, 63, exact=device == cpu)
        with pytest.raises(ValueError, match=r"must be left out for .* on 'cuda' \(exact=True"):
            check_trees(model_config, gpu, 63, exact=True)
    with pytest.raises(ValueError, match="layers with a state"):
        CompiledEngine(str(checkpoint("lfm2")), **ARGUMENTS, speculative_config=TREE)
