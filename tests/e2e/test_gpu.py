"""The engine on a CUDA GPU: tokens equal transformers', and every step replays a CUDA graph."""

import gc
import json

import pytest
import torch
import transformers
from torch.profiler import ProfilerActivity, profile

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.engine import DEMO_MODEL

pytestmark = pytest.mark.gpu

NUM_TOKENS = 32


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO_MODEL)
    rows = (DEMO_MODEL / "prompts.jsonl").read_text().splitlines()
    return [tokenizer(json.loads(row)["prompt"]).input_ids for row in rows]


@pytest.fixture(scope="module")
def engine():
    with CompiledEngine(device="cuda", dtype="float32", bucket_sizes=(1, 8, 32), check_invariants=True) as engine:
        yield engine


def test_greedy_tokens_equal_transformers(engine: CompiledEngine, prompts: list[list[int]]) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32).eval().cuda()
    expected = []
    with torch.inference_mode():
        for prompt in prompts:
            step, cache, tokens = torch.tensor([prompt], device="cuda"), None, []
            for _ in range(NUM_TOKENS):
                result = model(step, past_key_values=cache, use_cache=True)
                cache, step = result.past_key_values, result.logits[:, -1].argmax(-1, keepdim=True)
                tokens.append(int(step))
            expected.append(tokens)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = engine.generate(prompts, params, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
    report = engine.compile_report()
    assert (report.graph_breaks, report.recompiles) == (0, 0)
    assert all(r.graphs == 1 for r in report.reports)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_step_replays_a_cuda_graph(engine: CompiledEngine, prompts: list[list[int]], temperature: float) -> None:
    """One graph launch a step, and one more where tokens are sampled; no kernel is launched beside them."""
    params = SamplingParams(temperature=temperature, max_tokens=NUM_TOKENS, ignore_eos=True)
    engine.generate(prompts[:8], params, use_tqdm=False)
    steps = engine.stats().num_steps
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        engine.generate(prompts[:8], params, use_tqdm=False)
    steps = engine.stats().num_steps - steps
    counts = {event.key: event.count for event in profiled.key_averages()}
    assert counts.get("cudaGraphLaunch", 0) == steps * (1 if temperature == 0 else 2)
    assert not {name: count for name, count in counts.items() if "LaunchKernel" in name}


def test_preemption_on_the_gpu_changes_no_token(engine: CompiledEngine, prompts: list[list[int]]) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in engine.generate(prompts, params, use_tqdm=False)]
    longest = max(map(len, prompts)) + NUM_TOKENS
    with CompiledEngine(
        device="cuda",
        dtype="float32",
        bucket_sizes=(8,),
        max_num_batched_tokens=16,
        max_model_len=longest,
        num_kv_blocks=-(-longest // 16) + 6,
        check_invariants=True,
    ) as small:
        outputs = small.generate(prompts, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert small.stats().num_preemptions > 0


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_a_quantised_cache_replays_cuda_graphs_and_preemption_changes_no_token(
    prompts: list[list[int]], kv_cache_dtype: str
) -> None:
    if kv_cache_dtype == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        with pytest.raises(ValueError, match="use 'int8'"):
            CompiledEngine(device="cuda", kv_cache_dtype="fp8")
        return
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    longest = max(map(len, prompts)) + NUM_TOKENS
    pools = {"large": {}, "small": {"max_num_batched_tokens": 16, "num_kv_blocks": -(-longest // 16) + 6}}
    tokens = {}
    for name, pool in pools.items():
        arguments = {"dtype": "float32", "bucket_sizes": (8,), "max_model_len": longest, "check_invariants": True}
        with CompiledEngine(device="cuda", kv_cache_dtype=kv_cache_dtype, **arguments, **pool) as engine:
            engine.generate(prompts[:8], params, use_tqdm=False)
            steps = engine.stats().num_steps
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
                outputs = engine.generate(prompts, params, use_tqdm=False)
            steps = engine.stats().num_steps - steps
            counts = {event.key: event.count for event in profiled.key_averages()}
            assert counts.get("cudaGraphLaunch", 0) == steps
            assert not {name: count for name, count in counts.items() if "LaunchKernel" in name}
            assert (engine.stats().num_preemptions > 0) == (name == "small")
            report = engine.compile_report()
            assert (report.graph_breaks, report.recompiles) == (0, 0)
            tokens[name] = [output.outputs[0].token_ids for output in outputs]
    assert tokens["small"] == tokens["large"]


def test_closing_frees_the_device_memory() -> None:
    torch._C._cuda_clearCublasWorkspaces()  # cuBLAS keeps its own, which are not the engine's to free
    before = torch.cuda.memory_allocated()
    engine = CompiledEngine(device="cuda", bucket_sizes=(1,), num_kv_blocks=4096, enforce_eager=True)
    assert torch.cuda.memory_allocated() > before + engine.runner.kv_cache_bytes
    engine.close()
    del engine
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() <= before + 2**20
