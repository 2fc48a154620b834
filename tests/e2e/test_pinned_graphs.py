"""cuda_graphs="pinned" without a GPU: a queue of graphs stands for the device, which runs as late as it may."""

import functools
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from compiled_llm import CompiledEngine, SamplingParams
from compiled_llm.compiling import function as function_module
from compiled_llm.worker import build_ahead, compiled_steps, field_buffers, started_model, step_buffers
from compiled_llm.worker.block_tables import BlockTables
from compiled_llm.worker.field_buffers import FieldBuffers
from compiled_llm.worker.launched_step import HostSlot
from compiled_llm.worker.step_buffers import StepBuffers

SIZES: dict[str, Any] = {
    "bucket_sizes": (1, 4), "token_bucket_sizes": (8, 32), "max_model_len": 64, "num_kv_blocks": 16,
    "dtype": "float32", "check_invariants": True,
}  # fmt: skip
PROMPTS = [[5], [9, 8, 7], list(range(3, 40)), list(range(3, 30)), [5, 6], list(range(70, 90))]
PARAMS = [
    SamplingParams(max_tokens=10 + 4 * (n % 3), ignore_eos=True, temperature=float(n % 2), seed=n)
    for n in range(len(PROMPTS))
]


class Device:
    """What was started and has not run yet. Its time passes only where the host waits."""

    def __init__(self) -> None:
        self.queue: deque[Callable[[], None]] = deque()
        self.most_waiting = 0
        self.is_serving = False
        self.pool = SimpleNamespace(
            device=torch.device("cpu"),
            pinned=True,
            programmatic=False,
            before=lambda args: None,
            after=lambda args: None,
            renew=lambda: None,
        )

    def start(self, work: Callable[[], None]) -> None:
        self.queue.append(work)
        self.most_waiting = max(self.most_waiting, len(self.queue))
        if not self.is_serving:
            self.run_all()

    def run_all(self) -> None:
        while self.queue:
            self.queue.popleft()()


class Event:
    def __init__(self, device: Device) -> None:
        self._device, self._has_happened = device, False

    def record(self) -> None:
        self._has_happened = False
        self._device.start(lambda: setattr(self, "_has_happened", True))

    def synchronize(self) -> None:
        while not self._has_happened:
            self._device.queue.popleft()()

    def elapsed_time(self, other: "Event") -> float:
        return 1.0


class Graphs:
    """In the place of ``CapturedFunction``: a graph runs its function again, once the device comes to it."""

    device: Device

    def __init__(self, pool: Any) -> None:
        self._graphs: dict[int, tuple[Callable, tuple, Any]] = {}

    def drop(self) -> None:
        self._graphs.clear()

    def _run(self, call: Callable, args: tuple) -> Any:
        self.device.pool.before(args)
        with torch.no_grad():
            output = call(*args)
        self.device.pool.after(args)
        return output

    def capture(self, call: Callable, args: tuple) -> None:
        self._graphs[id(args[1])] = call, args, self._run(call, args)

    def __call__(self, *args: Any) -> Any:
        call, captured, output = self._graphs[id(args[1])]

        def work() -> None:
            found = self._run(call, captured)
            if isinstance(output, Tensor):
                output.copy_(found)

        self.device.start(work)
        return output


def take(hosts: tuple, target: Tensor, chosen: Tensor, tables: Tensor, places: int, entries: int) -> None:
    """As the kernel, see tests/ops/test_triton_pinned.py."""
    wanted = int(target[:4].view(torch.int32)) % (1 << 30) + 1
    for host in hosts:
        turn, slot, count = host[:12].view(torch.int32).tolist()
        if turn == wanted:
            target.copy_(host)
            chosen[0] = slot
            where = host[places : places + 8 * count].view(torch.int64)
            tables[where] = host[entries : entries + 4 * count].view(torch.int32)
            return


def give(tokens: Tensor, hosts: tuple, chosen: Tensor) -> None:
    hosts[int(chosen)].copy_(tokens)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()
    monkeypatch.setattr(Graphs, "device", device, raising=False)
    monkeypatch.setattr(function_module, "CapturedFunction", Graphs)
    monkeypatch.setattr(function_module, "compile_at_first_call", lambda function, cuda_graphs: function)
    monkeypatch.setattr(started_model, "graph_pool", lambda *_: device.pool)
    for module in (compiled_steps, build_ahead):
        monkeypatch.setattr(module, "keeps_compiled_code", lambda: False)
    monkeypatch.setattr(step_buffers, "FieldBuffers", functools.partial(FieldBuffers, is_apart=True))
    monkeypatch.setattr(field_buffers, "take", take)
    monkeypatch.setattr(compiled_steps, "give", give)

    @functools.cache
    def tables(limits: Any) -> BlockTables:
        return BlockTables(limits, torch.device("cpu"), 0)

    def buffers(bucket: Any, limits: Any, on: torch.device, windows: Any, _: None, *others: Any) -> StepBuffers:
        return StepBuffers(bucket, limits, on, windows, tables(limits), *others)

    monkeypatch.setattr(compiled_steps, "StepBuffers", buffers)

    def in_turns(last_tokens: Tensor, drafts: Tensor | None, _: torch.device) -> deque[HostSlot]:
        made: Any = [HostSlot(last_tokens.clone(), Event(device), Event(device), None, Event(device)) for _ in range(2)]  # type: ignore[arg-type]
        return deque(made)

    monkeypatch.setattr(HostSlot, "in_turns", in_turns)
    return device


@pytest.mark.parametrize("overlaps", [True, False])
def test_tokens_are_the_same_however_late_the_device_runs(device: Device, overlaps: bool) -> None:
    def tokens(engine: CompiledEngine) -> list[list[int]]:
        return [out.outputs[0].token_ids for out in engine.generate(PROMPTS, PARAMS, use_tqdm=False)]

    with pytest.MonkeyPatch.context() as plain:
        plain.setattr(started_model, "graph_pool", lambda *_: None)
        plain.setattr(HostSlot, "in_turns", lambda *_: deque())
        plain.setattr(compiled_steps, "StepBuffers", StepBuffers)
        plain.setattr(step_buffers, "FieldBuffers", FieldBuffers)
        with CompiledEngine(enforce_eager=True, **SIZES) as engine:
            expected = tokens(engine)
    with CompiledEngine(async_scheduling=overlaps, **SIZES) as engine:
        buffers = engine.runner.steps.buffers.values()
        assert all(one.is_taken for one in buffers)
        device.is_serving, device.most_waiting = True, 0
        assert tokens(engine) == expected
        device.is_serving = False
        assert engine.stats().num_preemptions == 0
    # A step is one graph and its events, or two where some request samples.
    assert device.most_waiting > (4 if overlaps else 2)
