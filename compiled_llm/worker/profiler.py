"""StepProfiler: how the time of a step divides into kinds of work, measured on steps that run a second time.

A step that has just run runs again under torch's profiler, with the same inputs and the states of before: it writes the
same keys to the same slots. So profiling never slows down the first run, whose results are used, and its own time is
left out of all others.
"""

import functools
import re
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity

from compiled_llm.compiling.cuda_graphs import begin_step_of_trees
from compiled_llm.ops.user_warnings import warn
from compiled_llm.scheduling.bucket import Bucket
from compiled_llm.worker.compiled_steps import CompiledSteps
from compiled_llm.worker.sampling_stage import SamplingNeeds

KINDS = ("attention", "states", "linears", "sampling", "everything else")

_SAMPLER = "compiled_llm::sampler"  # the name of the second graph in the profile
_STEP = "compiled_llm::step"
# Ops on a CPU, kernels on a GPU: the first pattern that is found in the name decides.
_PATTERNS = [
    ("attention", re.compile(r"paged_attention|attention|split_kernel|exact_merge|prefill_kernel|write_kernel|flash")),
    # Of layers with a state: its ops, and the norm that follows them.
    (
        "states",
        re.compile(
            r"convolution|gated_delta|delta_(steps|factors|chunks)|mamba2|scan_(steps|chunks)|gated_(rms_)?norm"
        ),
    ),
    ("sampling", re.compile(r"greedy_tokens|sample_tokens|argmax|sort|cumsum|topk|multinomial")),
    (
        "linears",
        re.compile(r"packed_linear|aten::(mm|addmm|linear|matmul|bmm)\b|linear|gemm|gemv|nvjet|cutlass|xmma|triton_mm"),
    ),
]
_EVERY = 4  # the steps profiled of a bucket are number 1, 4, 16, ...: early and late ones of long runs


class StepProfiler:
    """Profiles up to ``steps_per_bucket`` steps of each bucket.

    Attributes:
        pauses: (start, end) of each profile in seconds, on ``time.monotonic``.
        num_steps: number of profiled steps, by bucket name.
    """

    def __init__(self, steps_per_bucket: int, device: torch.device) -> None:
        self.pauses: list[tuple[float, float]] = []
        self.num_steps: dict[str, int] = {}
        self._steps_per_bucket = steps_per_bucket
        self._on_gpu = device.type == "cuda"
        self._seen: dict[str, int] = {}
        self._seconds: dict[str, list[dict[str, float]]] = {}

    def is_due(self, bucket_name: str) -> bool:
        """Whether to profile the next step. Called once before each step."""
        self._seen[bucket_name] = seen = self._seen.get(bucket_name, 0) + 1
        done = self.num_steps.get(bucket_name, 0)
        return done < self._steps_per_bucket and seen >= _EVERY**done

    def profile(
        self, bucket_name: str, step: Callable[[], Tensor], sampler: Callable[..., object] | None, started: float
    ) -> None:
        """Run ``step`` and, on its logits, ``sampler``. ``started``: when this extra work did, on time.monotonic."""
        if self._on_gpu:
            begin_step_of_trees()

        def run() -> None:
            with torch.profiler.record_function(_STEP):
                logits = step()
            if sampler is not None:
                with torch.profiler.record_function(_SAMPLER):
                    sampler(logits=logits)

        events = profiled_events(run, self._on_gpu)
        if self._on_gpu and not kernels_of(events):
            warn(f"the profile of {bucket_name} has no kernel: how its time divides is not known")
        seconds = seconds_by_kind(events, self._on_gpu)
        self._seconds.setdefault(bucket_name, []).append(seconds)
        self.num_steps[bucket_name] = self.num_steps.get(bucket_name, 0) + 1
        self.pauses.append((started, time.monotonic()))

    def repeat(self, steps: CompiledSteps, bucket: Bucket, needs: SamplingNeeds, take_back: Callable[[], None]) -> None:
        """Profile the step that has just run by running it again. ``take_back``: as ``CompiledSteps.undo`` gives it."""
        if self._on_gpu:
            torch.cuda.synchronize(steps.device)  # the step itself is no part of what the profile takes
        started, tokens_after = time.monotonic(), steps.last_tokens.clone()
        take_back()
        run = functools.partial(steps.sampling.run, bucket, steps.buffers[bucket].sampling_input, needs=needs)
        # Changed logits are not sampled again: the penalties would count the tokens twice.
        sampler = run if any(needs) and not needs.changed_logits else None
        self.profile(bucket.name, functools.partial(steps.run_step, bucket), sampler, started)
        steps.last_tokens.copy_(tokens_after)

    def shares(self, bucket_name: str) -> dict[str, float] | None:
        """Each kind's share of the time of a bucket's steps, 0 to 1, by medians; None where no step was profiled."""
        profiles = self._seconds.get(bucket_name)
        if not profiles:
            return None
        seconds = {kind: statistics.median(profile[kind] for profile in profiles) for kind in KINDS}
        whole = sum(seconds.values())
        return {kind: value / whole for kind, value in seconds.items()} if whole > 0 else None


def profiled_events(run: Callable[[], object], on_gpu: bool) -> list[FunctionEvent]:
    """What happens while ``run`` runs: ops of the CPU, and on a GPU all kernels, also those of a replayed graph."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        if on_gpu:
            torch.cuda.synchronize()
    return list(profile.events() or ())


def kernels_of(events: Iterable[FunctionEvent]) -> list[FunctionEvent]:
    """What ran on a GPU: kernels, and copies of memory. Not the named ranges around them, which are there as well."""
    on_device = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    return [one for one in on_device if not (one.is_user_annotation or one.name.startswith("compiled_llm::"))]


def seconds_by_kind(events: list[FunctionEvent], on_gpu: bool) -> dict[str, float]:
    """Seconds of each kind in a profile of one step. Other work, and time between kernels, is "everything else"."""
    return _by_kernels(events) if on_gpu else _by_ops(events)


def kind_of(name: str) -> str | None:
    """The kind of work that an op or a kernel of this name does; None for any other."""
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), None)


def _by_ops(events: list[FunctionEvent]) -> dict[str, float]:
    seconds = dict.fromkeys(KINDS, 0.0)

    def walk(event: Any) -> None:
        kind = "sampling" if event.name == _SAMPLER else kind_of(event.name)
        if kind is None:
            for child in event.cpu_children:
                walk(child)
        else:  # the ops that it calls are part of it
            seconds[kind] += event.cpu_time_total / 1e6

    roots = [event for event in events if event.name in (_STEP, _SAMPLER)]
    for root in roots:
        walk(root)
    whole = sum(root.cpu_time_total for root in roots) / 1e6
    seconds["everything else"] = max(0.0, whole - sum(seconds.values()))
    return seconds


def _by_kernels(events: Iterable[FunctionEvent]) -> dict[str, float]:
    on_device = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    # The sampler's range is among the device's events, and covers its kernels.
    samplers = [event.time_range for event in on_device if event.name == _SAMPLER]
    kernels = kernels_of(on_device)
    seconds = dict.fromkeys(KINDS, 0.0)
    for event in kernels:
        start = event.time_range.start
        samples = any(span.start <= start < span.end for span in samplers)
        kind = "sampling" if samples else kind_of(event.name) or "everything else"
        seconds[kind] += event.time_range.elapsed_us() / 1e6
    if kernels:
        first = min(event.time_range.start for event in kernels)
        last = max(event.time_range.end for event in kernels)
        seconds["everything else"] += max(0.0, (last - first) / 1e6 - sum(seconds.values()))
    return seconds
