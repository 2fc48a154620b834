"""B4: tokens equal an unbatched float32 reference, whatever else the engine serves, has served and gives up meanwhile.

Cold = warm = alone = batched = chunked = preempted = swapped out = compiled: each engine serves one schedule after
another and keeps its prefix cache, so nearly every schedule finds other blocks, computed in other chunks and batches.
= from host memory, from files after a restart, from another engine that computes the prompt at the same time.
"""

import dataclasses
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.scheduling.host_blocks import MoveCosts
from tests.battery.reference import LENGTHS, NUM_TOKENS, expected_tokens, model_directory, prompts
from tests.families import COMPILED_SIZES

COUNTS = (14, 1, 8, 4, 20)  # requests of a schedule, in turns
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
LONGEST = max(LENGTHS) + NUM_TOKENS


def _engine(model: str, **arguments: Any) -> tuple[str, dict[str, Any]]:
    return model, arguments


# name -> (model, engine arguments). Pools hold the longest request, and little more.
ENGINES = {
    "chunks-recompute": _engine(
        "demo", bucket_sizes=(1, 8), max_num_batched_tokens=24, num_kv_blocks=14, preemption_mode="recompute",
    ),
    "chunks-swap-async-priority": _engine(
        "demo", bucket_sizes=(8,), max_num_batched_tokens=16, num_kv_blocks=13, preemption_mode="swap",
        swap_space_bytes=2**22, async_scheduling=True, scheduling_policy="priority",
    ),
    "no-cache-no-chunks": _engine(
        "demo", bucket_sizes=(6,), enable_prefix_caching=False, enable_chunked_prefill=False, num_kv_blocks=13,
        preemption_mode="recompute",
    ),
    "no-chunks-auto-async": _engine(
        "llama", bucket_sizes=(5,), block_size=4, enable_chunked_prefill=False, num_kv_blocks=50,
        swap_space_bytes=2**21, async_scheduling=True,
    ),
    "no-cache-chunks-async-priority": _engine(
        "llama", bucket_sizes=(8,), block_size=32, enable_prefix_caching=False, max_num_batched_tokens=9,
        num_kv_blocks=7, preemption_mode="swap", swap_space_bytes=2**20, async_scheduling=True,
        scheduling_policy="priority",
    ),
    "block-size-1-latency-target": _engine(
        "llama", bucket_sizes=(8,), block_size=1, token_bucket_sizes=(8, 16, 64), target_itl_ms=1.0,
        num_kv_blocks=200, preemption_mode="swap", swap_space_bytes=2**19,
    ),
    "states-chunks-swap-async": _engine(
        "lfm2", bucket_sizes=(8,), max_num_batched_tokens=24, num_kv_blocks=14, num_state_slots=9,
        preemption_mode="swap", swap_space_bytes=2**21, async_scheduling=True,
    ),
    "states-recompute-priority": _engine(
        "lfm2-tied", bucket_sizes=(8,), block_size=4, max_num_batched_tokens=48, num_kv_blocks=50,
        preemption_mode="recompute", scheduling_policy="priority",
    ),
    "states-compiled": _engine(
        "lfm2", enforce_eager=False, **COMPILED_SIZES, num_kv_blocks=14, preemption_mode="swap",
        swap_space_bytes=2**21, async_scheduling=True,
    ),
    "compiled-swap-async": _engine(
        "demo", enforce_eager=False, **COMPILED_SIZES, num_kv_blocks=14, preemption_mode="swap",
        swap_space_bytes=2**22, async_scheduling=True,
    ),
    "two-ranks-recompute-exact": _engine(
        "llama", tensor_parallel_size=2, tensor_parallel_exact=True, bucket_sizes=(1, 8), block_size=4,
        max_num_batched_tokens=24, num_kv_blocks=56, preemption_mode="recompute",
    ),
    "compiled-no-chunks-priority": _engine(
        "llama", enforce_eager=False, bucket_sizes=(8,), token_bucket_sizes=(192,), enable_chunked_prefill=False,
        num_kv_blocks=14, preemption_mode="recompute", scheduling_policy="priority",
    ),
}  # fmt: skip
for _name in ("chunks-swap-async-priority", "compiled-swap-async"):
    _model, _arguments = ENGINES[_name]
    ENGINES[f"two-ranks-{_name}"] = _model, {**_arguments, "tensor_parallel_size": 2}
DEFAULTS: dict[str, Any] = {
    "dtype": "float32", "max_model_len": LONGEST, "enforce_eager": True, "check_invariants": True,
}  # fmt: skip
SMALL = ("chunks-swap-async-priority",)


@dataclasses.dataclass(frozen=True)
class Arrival:
    """A request of a schedule: it comes before step ``step``, and is aborted ``aborted_after`` steps later."""

    step: int
    prompt: list[int]
    priority: int
    aborted_after: int | None


def random_schedule(rng: random.Random, pool: list[list[int]], count: int, priorities: bool) -> list[Arrival]:
    """Requests in the order of their arrival: all at once, one by one, or anything between."""
    spread = rng.choice((0, 5, 60))
    schedule = [
        Arrival(
            step=rng.randint(0, spread),
            prompt=rng.choice(pool),
            priority=rng.randrange(3) if priorities else 0,
            aborted_after=rng.randrange(NUM_TOKENS) if rng.random() < 0.15 else None,
        )
        for _ in range(count)
    ]
    return sorted(schedule, key=lambda arrival: arrival.step)


def serve(
    engine: CompiledEngine,
    model: str,
    schedule: list[Arrival],
    rng: random.Random,
    counts: Counter[str],
    ask: Callable[[str, Arrival], dict[str, Any]] = lambda *_: {},
    step_others: Callable[[], None] = lambda: None,
) -> None:
    """Run a schedule to its end. Every output on the way is compared, so those of aborted requests are too.

    ``ask`` returns more arguments of a request, and ``step_others`` comes before each step.
    """
    unfinished: dict[str, tuple[Arrival, int]] = {}  # with the step before which it leaves
    coming, step = schedule[::-1], 0
    while coming or unfinished:
        for request_id, (arrival, leaves) in list(unfinished.items()):
            if leaves == step:
                engine.abort(request_id)
                del unfinished[request_id]
                counts["aborted"] += 1
                if rng.random() < 0.5:  # its client tries again, and finds in the cache what is left of it
                    coming.append(dataclasses.replace(arrival, step=step, aborted_after=None))
                    counts["submitted again"] += 1
        while coming and coming[-1].step <= step:
            arrival, request_id = coming.pop(), f"request {counts['requests']}"
            engine.add_request(request_id, arrival.prompt, GREEDY, arrival.priority, **ask(request_id, arrival))
            unfinished[request_id] = arrival, -1 if arrival.aborted_after is None else step + arrival.aborted_after + 1
            counts["requests"] += 1
        step_others()
        for output in engine.step():
            tokens, (arrival, _) = output.outputs[0].token_ids, unfinished[output.request_id]
            expected = expected_tokens(model, tuple(arrival.prompt))
            assert tokens == expected[: len(tokens)], (output.request_id, arrival, output.metrics)
            counts["tokens"] += 1
            if output.finished:
                assert len(tokens) == NUM_TOKENS
                del unfinished[output.request_id]
                counts["finished"] += 1
                counts["preempted on the way"] += output.metrics.num_preemptions > 0
        step += 1
        assert step < 3000, "a schedule does not end"


@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize(
    ("name", "num_schedules", "num_prompts"),
    [pytest.param(name, 3, 12, id=f"small-{name}") for name in SMALL]
    + [pytest.param(name, 25, 40, id=f"full-{name}", marks=pytest.mark.battery) for name in ENGINES],
)
def test_tokens_equal_the_reference(
    name: str, num_schedules: int, num_prompts: int, battery_counts: Counter[str]
) -> None:
    model, arguments = ENGINES[name]
    rng = random.Random(name)
    pool = prompts(model)[:num_prompts]
    with CompiledEngine(model_directory(model), **DEFAULTS | arguments) as engine:
        for index in range(num_schedules):
            schedule = random_schedule(rng, pool, COUNTS[index % len(COUNTS)], "scheduling_policy" in arguments)
            serve(engine, model, schedule, rng, battery_counts)
            battery_counts["schedules"] += 1
            stats = engine.stats()
            assert (stats.used_blocks, stats.used_swap_blocks) == (0, 0)
        battery_counts["preemptions by recompute"] = stats.num_recompute_preemptions
        battery_counts["preemptions by swap"] = stats.num_swap_preemptions
        battery_counts["tokens swapped in"] = stats.num_swapped_in_tokens
        battery_counts["tokens found in the cache"] = stats.prefix_hit_tokens
        battery_counts["evictions"] = stats.num_evictions
        report = engine.compile_report()

    assert battery_counts["finished"] + battery_counts["aborted"] == battery_counts["requests"] == stats.num_finished
    assert battery_counts["aborted"] > 0
    assert battery_counts["preempted on the way"] > 0
    mode = arguments.get("preemption_mode")
    assert stats.num_preemptions > 0
    assert (stats.num_swap_preemptions > 0) >= (mode == "swap")
    assert (stats.num_swapped_in_tokens > 0) >= (mode == "swap")
    assert (stats.num_recompute_preemptions > 0) >= (mode == "recompute")
    cached = arguments.get("enable_prefix_caching", True)
    assert (stats.prefix_hit_tokens > 0, stats.num_evictions > 0) == (cached, cached)
    assert (report.recompiles, report.graph_breaks) == (0, 0)
    of_a_rank = 0 if arguments.get("enforce_eager", True) else 5
    assert report.graphs == of_a_rank * arguments.get("tensor_parallel_size", 1)


CACHED = [name for name, (_, arguments) in ENGINES.items() if arguments.get("enable_prefix_caching", True)]
STARTS = 5


@pytest.mark.battery
@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("name", CACHED)
def test_tokens_with_tiers(
    name: str, tmp_path: Path, battery_counts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pools of a few requests, host memory of a few more, files that outlive the engine."""
    monkeypatch.setattr(MoveCosts, "pays", lambda *_: True)  # models this small compute faster than blocks are read
    model, arguments = ENGINES[name]
    rng, pool = random.Random(name), prompts(model)
    tiers = {"kv_host_bytes": 2**19, "kv_disk_path": str(tmp_path / "kv"), "kv_disk_bytes": 2**25}
    for start in range(STARTS):
        with CompiledEngine(model_directory(model), **DEFAULTS | arguments, **tiers) as engine:
            for index in range(5):
                schedule = random_schedule(rng, pool, COUNTS[index], "scheduling_policy" in arguments)
                serve(engine, model, schedule, rng, battery_counts)
                stats = engine.stats()
                assert (stats.used_blocks, stats.used_swap_blocks) == (0, 0)
        assert stats.num_disk_failures == 0
        assert (stats.disk_hit_tokens > 0) >= (start > 0)
        battery_counts["tokens from host memory"] += stats.host_hit_tokens
        battery_counts["tokens from files"] += stats.disk_hit_tokens
        battery_counts["evictions from host memory"] += stats.num_host_evictions
    assert battery_counts["finished"] + battery_counts["aborted"] == battery_counts["requests"]
    assert battery_counts["tokens from host memory"] > 0


@pytest.mark.battery
@pytest.mark.usefixtures("_one_thread")
@pytest.mark.parametrize("name", CACHED)
def test_tokens_with_roles(
    name: str, tmp_path: Path, battery_counts: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another engine computes the prompts meanwhile, also those of requests that leave before it has."""
    monkeypatch.setenv("COMPILED_LLM_KV_KEY", "a key that both share")
    model, arguments = ENGINES[name]
    rng, pool, address = random.Random(name), prompts(model), f"unix:{tmp_path}/blocks"
    prompt_only = dataclasses.replace(GREEDY, max_tokens=1)
    more = {"kv_host_bytes": 2**21}
    giving = {"role": "prefill", "kv_transfer_address": address, "kv_transfer_bytes": 2**25}
    with (
        CompiledEngine(model_directory(model), **DEFAULTS | arguments | more | giving) as prefill,
        CompiledEngine(model_directory(model), **DEFAULTS | arguments | more, role="decode") as decode,
    ):

        def ask(request_id: str, arrival: Arrival) -> dict[str, Any]:
            named = {"remote_request_id": f"{battery_counts['requests']:064x}"}
            params = {"do_remote_decode": True, **named}
            prefill.add_request(request_id, arrival.prompt, prompt_only, arrival.priority, kv_transfer_params=params)
            return {"kv_transfer_params": {"do_remote_prefill": True, "remote_host": address, **named}}

        def step_prefill() -> None:
            if prefill.has_unfinished_requests():
                prefill.step()
            else:
                time.sleep(0.001)  # a step that waits for blocks takes no time

        for index in range(25):
            schedule = random_schedule(rng, pool, COUNTS[index % len(COUNTS)], "scheduling_policy" in arguments)
            serve(decode, model, schedule, rng, battery_counts, ask, step_prefill)
            while prefill.has_unfinished_requests():
                prefill.step()
            stats = decode.stats()
            assert (stats.used_blocks, stats.used_swap_blocks) == (0, 0)
        battery_counts["tokens from the other engine"] = stats.peer_hit_tokens
        battery_counts["takes that failed"] = stats.num_takes_failed
    assert battery_counts["finished"] + battery_counts["aborted"] == battery_counts["requests"]
    assert battery_counts["tokens from the other engine"] > 0
