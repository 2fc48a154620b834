"""The engine on a CUDA GPU: tokens equal transformers', and every step replays a CUDA graph."""

import gc
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from torch.profiler import ProfilerActivity, profile

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.compiling.function import CompiledFunction
from compiled_llm.engine.engine import DEMO_MODEL
from compiled_llm.ops.programmatic_launch import CAPABILITY

pytestmark = pytest.mark.gpu

NUM_TOKENS = 32
TOKENS = {"token_bucket_sizes": (128, 2048)}  # the defaults would be nine to compile
HAS_PROGRAMMATIC = torch.cuda.is_available() and torch.cuda.get_device_capability() >= CAPABILITY
MODES = ("trees", "manual", "programmatic")[: 3 if HAS_PROGRAMMATIC else 2]


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO_MODEL)
    rows = (DEMO_MODEL / "prompts.jsonl").read_text().splitlines()
    return [tokenizer(json.loads(row)["prompt"]).input_ids for row in rows]


@pytest.fixture(scope="module", params=MODES)
def cuda_graphs(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(cuda_graphs: str):
    with CompiledEngine(
        device="cuda",
        dtype="float32",
        bucket_sizes=(1, 8, 32),
        check_invariants=True,
        cuda_graphs=cuda_graphs,
        **TOKENS,
    ) as engine:
        yield engine


def check_launches(counts: dict[str, int], steps: int) -> None:
    """Beside the graphs, a step launches one kernel at most: where block tables change."""
    assert sum(count for name, count in counts.items() if "LaunchKernel" in name) <= steps


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
    """One graph launch a step, and one more where tokens are sampled; no kernel but that for block tables."""
    params = SamplingParams(temperature=temperature, max_tokens=NUM_TOKENS, ignore_eos=True)
    engine.generate(prompts[:8], params, use_tqdm=False)
    steps = engine.stats().num_steps
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        engine.generate(prompts[:8], params, use_tqdm=False)
    steps = engine.stats().num_steps - steps
    counts = {event.key: event.count for event in profiled.key_averages()}
    assert counts.get("cudaGraphLaunch", 0) == steps * (1 if temperature == 0 else 2)
    check_launches(counts, steps)


def test_every_kind_of_request_in_one_batch_is_as_on_the_cpu(engine: CompiledEngine, prompts: list[list[int]]) -> None:
    """Changed logits, masks, log-probabilities of output and prompt, continuations, beams: nothing is compiled."""
    common = {"max_tokens": 12, "ignore_eos": True}
    params = [
        SamplingParams(temperature=0, **common),
        SamplingParams(temperature=0, repetition_penalty=1.3, logprobs=3, **common),
        SamplingParams(temperature=0, presence_penalty=1.0, frequency_penalty=0.5, logit_bias={5: 3.0}, **common),
        SamplingParams(temperature=0, allowed_token_ids=tuple(range(300, 900)), prompt_logprobs=2, **common),
        SamplingParams(temperature=0, bad_words=("return", "self"), min_tokens=4, **common),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9, min_p=0.02, seed=3, **common),
        SamplingParams(temperature=1.0, n=3, seed=4, repetition_penalty=1.1, **common),
    ]
    chosen = prompts[: len(params)]
    outputs = engine.generate(chosen, params, use_tqdm=False)
    beams = engine.beam_search(chosen[:2], beam_width=3, max_tokens=8)
    with CompiledEngine(device="cpu", dtype="float32", bucket_sizes=(8,), enforce_eager=True) as on_cpu:
        expected = on_cpu.generate(chosen, params, use_tqdm=False)
        expected_beams = on_cpu.beam_search(chosen[:2], beam_width=3, max_tokens=8)
    for output, other in zip([*outputs, *beams], [*expected, *expected_beams], strict=True):
        assert [c.token_ids for c in output.outputs] == [c.token_ids for c in other.outputs]
    for index, logprobs in ((1, outputs[1].outputs[0].logprobs), (3, outputs[3].prompt_logprobs)):
        others = expected[1].outputs[0].logprobs if index == 1 else expected[3].prompt_logprobs
        for found, wanted in zip(logprobs, others, strict=True):
            for token_id in (found or {}).keys() & (wanted or {}).keys():
                assert found[token_id].logprob == pytest.approx(wanted[token_id].logprob, abs=1e-3)
    assert engine.compile_report().recompiles == 0


def test_both_kinds_of_graphs_give_the_same_tokens_whatever_happens_to_other_memory(prompts: list[list[int]]) -> None:
    """Greedy and sampled. Of graphs captured by hand, nothing may lie in memory that somebody else could be given.

    Not the KV pool that they were captured on first, nor cuBLAS's workspaces, which anybody may clear.
    """
    greedy = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    sampled = [SamplingParams(temperature=1.0, seed=n, max_tokens=NUM_TOKENS, ignore_eos=True) for n in range(9)]
    tokens = {}
    for mode in MODES:
        with CompiledEngine(
            device="cuda", dtype="bfloat16", bucket_sizes=(1, 8, 32), cuda_graphs=mode, **TOKENS
        ) as engine:
            torch._C._cuda_clearCublasWorkspaces()
            others = [torch.full((n,), float("nan"), device="cuda") for n in (2**10, 2**18, 2**21, 2**24) * 8]
            outputs = [
                output.outputs[0].token_ids
                for some in (prompts[:1], prompts[:9], prompts[9:])
                for params in ([greedy] * len(some), (sampled * 4)[: len(some)])
                for output in engine.generate(some, params, use_tqdm=False)
            ]
            assert all(other.isnan().all() for other in others)
            report = engine.compile_report()
            assert (report.graphs, report.graph_breaks, report.recompiles) == (len(report.reports), 0, 0)
            assert sum(r.cuda_graph_bytes for r in report.reports) > 0
            tokens[mode] = outputs
    assert all(given == tokens["trees"] for given in tokens.values())


@pytest.mark.parametrize("mode", MODES)
def test_engines_in_other_threads_one_after_the_other(prompts: list[list[int]], mode: str) -> None:
    def serve() -> list[list[int]]:
        with CompiledEngine(device="cuda", bucket_sizes=(8,), cuda_graphs=mode, **TOKENS) as engine:
            params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
            outputs = engine.generate(prompts[:8], params, use_tqdm=False)
            bytes_before = sum(r.cuda_graph_bytes for r in engine.compile_report().reports)
            again = engine.generate([[5] * 100], params, use_tqdm=False)
            assert again[0].prompt_logprobs is not None
            assert sum(r.cuda_graph_bytes for r in engine.compile_report().reports) == bytes_before
            return [output.outputs[0].token_ids for output in outputs]

    found = []
    for _ in range(2):
        with ThreadPoolExecutor(1) as pool:
            found.append(pool.submit(serve).result())
    assert found[0] == found[1]


def test_preemption_on_the_gpu_changes_no_token(
    engine: CompiledEngine, prompts: list[list[int]], cuda_graphs: str
) -> None:
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
        cuda_graphs=cuda_graphs,
    ) as small:
        outputs = small.generate(prompts, params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
        assert small.stats().num_preemptions > 0


@pytest.mark.parametrize("async_scheduling", [None, False])
def test_swapping_out_and_in_changes_no_token_and_every_step_is_one_graph(
    engine: CompiledEngine, prompts: list[list[int]], cuda_graphs: str, async_scheduling: bool | None
) -> None:
    """Also with the next step launched before this one's tokens are known, which is the default here."""
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
        preemption_mode="swap",
        swap_space_bytes=2**26,
        async_scheduling=async_scheduling,
        check_invariants=True,
        cuda_graphs=cuda_graphs,
    ) as small:
        small.add_request("first", prompts[0][:8], params)
        assert len(small.step()) == (0 if async_scheduling is None else 1)
        small.abort("first")
        small.generate(prompts[:8], params, use_tqdm=False)
        steps = small.stats().num_steps
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
            outputs = small.generate(prompts, params, use_tqdm=False)
        stats, report = small.stats(), small.compile_report()
    assert [output.outputs[0].token_ids for output in outputs] == expected
    counts = {event.key: event.count for event in profiled.key_averages()}
    assert counts.get("cudaGraphLaunch", 0) == stats.num_steps - steps
    assert stats.num_swap_preemptions > 0
    assert stats.num_swapped_in_tokens > 0
    assert (stats.used_blocks, stats.used_swap_blocks) == (0, 0)
    assert (report.graph_breaks, report.recompiles) == (0, 0)


def test_prefix_hits_on_the_gpu_change_no_token_and_every_step_is_one_graph(
    engine: CompiledEngine, prompts: list[list[int]]
) -> None:
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    engine.reset_prefix_cache()
    before = engine.stats()
    cold = engine.generate(prompts, params, use_tqdm=False)
    between = engine.stats()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        warm = engine.generate(prompts[::-1], params, use_tqdm=False)[::-1]
    after = engine.stats()
    assert [output.outputs[0].token_ids for output in warm] == [output.outputs[0].token_ids for output in cold]
    found = after.prefix_hit_tokens - between.prefix_hit_tokens
    assert found > between.prefix_hit_tokens - before.prefix_hit_tokens
    assert [output.num_cached_tokens for output in warm] == [(len(prompt) - 1) // 16 * 16 for prompt in prompts]
    counts = {event.key: event.count for event in profiled.key_averages()}
    steps = after.num_steps - between.num_steps
    assert counts.get("cudaGraphLaunch", 0) == steps
    check_launches(counts, steps)


def test_an_abort_while_steps_are_in_flight_changes_no_other_token(
    engine: CompiledEngine, prompts: list[list[int]]
) -> None:
    """Its blocks are free, and used by others, while a step that writes to them is still on its way."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    expected = [output.outputs[0].token_ids for output in engine.generate(prompts, params, use_tqdm=False)]
    engine.reset_prefix_cache()
    tokens: dict[int, list[int]] = {}
    for n, prompt in enumerate(prompts):
        engine.add_request(f"{n}", prompt, params)
        engine.add_request(f"{n} aborted", prompt[::-1], params)
    step = 0
    while engine.has_unfinished_requests():
        tokens |= {
            int(output.request_id.split()[0]): output.outputs[0].token_ids
            for output in engine.step()
            if "aborted" not in output.request_id
        }
        step += 1
        engine.abort(f"{step % len(prompts)} aborted")
    assert [tokens[n] for n in range(len(prompts))] == expected


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
    pools = {
        "large": {"token_bucket_sizes": (2048,)},
        "small": {"max_num_batched_tokens": 16, "num_kv_blocks": -(-longest // 16) + 6},
    }
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
            check_launches(counts, steps)
            assert (engine.stats().num_preemptions > 0) == (name == "small")
            report = engine.compile_report()
            assert (report.graph_breaks, report.recompiles) == (0, 0)
            tokens[name] = [output.outputs[0].token_ids for output in outputs]
    assert tokens["small"] == tokens["large"]


@pytest.mark.parametrize("mode", [{"enforce_eager": True}, {"cuda_graphs": "manual"}])
def test_closing_frees_the_device_memory(mode: dict) -> None:
    torch._C._cuda_clearCublasWorkspaces()  # cuBLAS keeps its own, which are not the engine's to free
    before = torch.cuda.memory_allocated()
    engine = CompiledEngine(device="cuda", bucket_sizes=(1,), num_kv_blocks=4096, **mode, **TOKENS)
    assert torch.cuda.memory_allocated() > before + engine.runner.kv_cache_bytes
    engine.close()
    del engine
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() <= before + 2**20


def test_a_start_keeps_to_its_share_of_the_memory_and_serving_takes_no_more() -> None:
    arguments = {"device": "cuda", "bucket_sizes": (64,), "token_bucket_sizes": (256,), "swap_space_bytes": 2**24}
    with CompiledEngine(**arguments, preemption_mode="swap") as engine:
        ledger, num_blocks = engine.memory_report(), engine.runner.facts.num_blocks
    taken = ledger.bytes_of("compiled code and CUDA graphs") + ledger.bytes_of("activations")
    del engine
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    assert ledger.total == total

    slack = 16 * 2**20
    share = (total - free + 2 * taken + 2**26) / total
    with CompiledEngine(**arguments, preemption_mode="swap", gpu_memory_utilization=share) as engine:
        free, reserved = torch.cuda.mem_get_info()[0], torch.cuda.memory_reserved()
        assert total - free <= share * total + slack
        assert abs(engine.memory_report().bytes_of("free afterwards") - free) <= slack
        assert 64 <= engine.runner.facts.num_blocks <= num_blocks
        for temperature in (0.0, 1.0):
            params = SamplingParams(temperature=temperature, max_tokens=200, ignore_eos=True)
            engine.generate([[5] * 800] * 64, params, use_tqdm=False)
        assert torch.cuda.memory_reserved() <= reserved + 2**22  # small tensors of what changes
        assert engine.compile_report().recompiles == 0


def test_too_little_memory_fails_before_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CompiledFunction, "warm_up", lambda *_: pytest.fail("compiled first"))
    free, total = torch.cuda.mem_get_info()
    share = (total - free + 2**20) / total  # less than the weights
    with pytest.raises(ValueError, match=r"0 MiB are free for the KV pool.*Free some memory"):
        CompiledEngine(device="cuda", bucket_sizes=(1,), gpu_memory_utilization=share)
