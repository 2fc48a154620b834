"""compile_unit: a step compiled layer by layer gives what the whole one gives, and keeps to its graphs."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.compiling.ahead import Job
from compiled_llm.compiling.cache import CompileCache, engine_cache
from compiled_llm.progress import StartProgress
from compiled_llm.worker.step_units import LayeredStep, check_unit, layer_kinds
from tests.families import CONFIGS, checkpoint

SIZES = {"bucket_sizes": (4,), "token_bucket_sizes": (16,), "num_kv_blocks": 60, "block_size": 8, "max_model_len": 64}
BEHIND = ["sample_4", "sample_changed_4", "logprobs_4", "prompt_logprobs"]
PARTS = [  # without, and with a layer whose cache is not quantised as the others are
    [f"{part}_{bucket}" for bucket in ("decode_4", "tokens_16") for part in parts]
    for parts in (("embed", "layer", "head"), ("embed", "layer", "layer1", "head"))
]


def engine(name: str, **arguments) -> CompiledEngine:
    defaults = {"compile_unit": "layer", "compile_workers": 0, "check_invariants": True}
    return CompiledEngine(str(checkpoint(name)), **SIZES | defaults | arguments)


def tokens_of(engine: CompiledEngine, temperature: float = 0.0) -> list[list[int]]:
    prompts = [[5 + i % 7 for i in range(length)] for length in (30, 9, 2)]  # the first in two chunks, both buckets
    params = SamplingParams(temperature=temperature, seed=3, max_tokens=8, ignore_eos=True)
    return [output.outputs[0].token_ids for output in engine.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("name", CONFIGS)
def test_every_family_gives_the_tokens_of_the_whole_step(name: str) -> None:
    """Uncompiled: the parts are the same functions, in the same order, on the same layers."""
    with engine(name, enforce_eager=True) as layered, engine(name, enforce_eager=True, compile_unit="model") as whole:
        assert all(isinstance(step, LayeredStep) for step in layered.runner.steps._functions.values())
        assert tokens_of(layered) == tokens_of(whole)
        assert tokens_of(layered, temperature=1.0) == tokens_of(whole, temperature=1.0)


QUANTISED = {"kv_cache_dtype": "int8", "kv_cache_skip_layers": (1,)}


@pytest.mark.parametrize(("name", "arguments"), [("llama-biases", {}), ("qwen3-untied", QUANTISED)])
def test_compiled_it_gives_the_same_keeps_to_its_graphs_and_is_found_on_disk(
    name: str, arguments: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with engine(name, enforce_eager=True, compile_unit="model", **arguments) as whole:
        expected = tokens_of(whole)
    keys = {}

    def record(cache: CompileCache, jobs: list[Job], num_workers: int, progress: StartProgress) -> dict[str, float]:
        keys.update({job.name: cache.key_of(job.name, job.recipe(), job.args) for job in jobs})
        return {}

    monkeypatch.setattr("compiled_llm.worker.compiled_steps.build_missing", record)
    monkeypatch.setattr("compiled_llm.worker.compiled_steps.engine_cache", in_directory(tmp_path))
    for outcome in ("miss", "hit"):
        with engine(name, **arguments) as layered:
            assert tokens_of(layered) == expected
            reports = layered.compile_report().reports
            assert [r.name for r in reports] == [*PARTS[bool(arguments)], *BEHIND]
            for r in reports:
                assert (r.graphs, r.graph_breaks, r.recompiles, r.cache) == (1, 0, 0, outcome), (r.name, r.reason)
                # Described before any part has run; other processes compile from that.
                assert not isinstance(layered.runner.steps.cache.find(keys[r.name]), str), r.name
            refuses_other_arguments(layered)


def refuses_other_arguments(layered: CompiledEngine) -> None:
    """Once for all layers, before any of them runs; each refused call counts."""
    runner = layered.runner
    step, args = runner.steps._functions[runner.steps.buckets[0]], runner.steps.step_arguments(runner.steps.buckets[0])
    logits = step(*args)
    weights, *others = args
    layer = weights.layers[1]._replace(input_norm=torch.ones(113))
    with pytest.raises(RuntimeError, match=r"embed_decode_4 would have to be .* shape \(112,\) and is \(113,\)"):
        step(weights._replace(layers=(weights.layers[0], layer)), *others)
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(RuntimeError, match="the default dtype was"):
            step(*args)
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(step(*args), logits)
    assert {r.name: r.recompiles for r in layered.compile_report().reports if r.recompiles} == {"embed_decode_4": 2}


def in_directory(path: Path) -> Callable[..., CompileCache]:
    """``engine_cache`` that keeps its entries there."""

    def make(*args) -> CompileCache:
        cache = engine_cache(*args)
        cache.directory = path
        return cache

    return make


def test_a_layer_whose_cache_is_of_another_kind_has_a_function_of_its_own() -> None:
    arguments = {"enforce_eager": True, **QUANTISED}
    with engine("llama", **arguments) as layered, engine("llama", **arguments, compile_unit="model") as whole:
        runner = layered.runner
        assert layer_kinds(runner.steps.weights, runner.steps.kv_cache) == [0, 1]
        assert tokens_of(layered) == tokens_of(whole)
        assert [r.name for r in layered.compile_report().reports[:4]] == PARTS[True][:4]
        for ours, theirs in zip(runner.steps.kv_cache, whole.runner.steps.kv_cache, strict=True):
            assert ours.k.dtype == theirs.k.dtype
            assert torch.equal(ours.k[1:], theirs.k[1:]), "block 0 is the sink"


def test_refused_where_one_layer_cannot_serve_all() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    check_unit("layer", cpu, enforce_eager=False)
    check_unit("model", gpu, enforce_eager=False)
    with pytest.raises(ValueError, match=r"compile_unit must be 'model'.* a CUDA graph holds .* Given 'layer'"):
        check_unit("layer", gpu, enforce_eager=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        check_unit("model", cpu, enforce_eager=False)
        check_unit("layer", cpu, enforce_eager=True)
        with pytest.raises(ValueError, match=r"compile_unit must be 'model'.* caches are disabled .* Given 'layer'"):
            check_unit("layer", cpu, enforce_eager=False)
