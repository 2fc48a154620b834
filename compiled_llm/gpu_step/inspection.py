"""A bucket's step as a table: each launch with its work, its code and its estimate; and what they make together."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from compiled_llm.gpu_step.amounts import Contexts, Work
from compiled_llm.gpu_step.estimate import GAP_SECONDS, Estimate, estimate
from compiled_llm.gpu_step.fake_step import FakeStep
from compiled_llm.gpu_step.gpus import Gpu
from compiled_llm.gpu_step.kernels import Compiled, Compiler
from compiled_llm.gpu_step.launches import Launch, Transfer, run_on_fakes, spans_of
from compiled_llm.gpu_step.transfers import Timeline, timeline
from compiled_llm.gpu_step.work import work_of
from compiled_llm.models.config import ModelConfig


@dataclasses.dataclass(frozen=True)
class Row:
    """A launch of the step."""

    launch: Launch
    work: Work
    compiled: Compiled | None
    estimate: Estimate

    @property
    def name(self) -> str:
        """The kernel's, after the op that launches it."""
        return f"{self.launch.op}: {self.launch.name}" if self.launch.op else self.launch.name

    def as_json(self) -> dict[str, Any]:
        """Plain values; times in microseconds."""
        values: dict[str, Any] = {
            "name": self.launch.name,
            "kind": self.launch.kind,
            "op": self.launch.op,
            "read": self.work.read,
            "written": self.work.written,
            "over_links": self.work.over_links,
            "flops": self.work.flops,
            "us": round(self.estimate.seconds * 1e6, 3),
            "bound_by": self.estimate.bound_by,
        }
        times = ("start", "memory", "issue", "matrix", "chain", "join")
        values |= {f"{name}_us": round(getattr(self.estimate, name) * 1e6, 3) for name in times}
        if self.compiled is None or self.launch.triton is None:
            return values
        c = self.compiled
        values |= {"programs": self.launch.triton.programs, "programs_per_sm": c.programs_per_sm}
        values |= {"registers": c.registers, "shared": c.shared, "spilled": c.spilled}
        values |= {"warps": c.num_warps, "stages": c.num_stages, "load_bytes": (c.loop or c.code).load_bytes}
        if self.estimate.in_flight is not None and self.estimate.wanted is not None:
            values |= {"in_flight": round(self.estimate.in_flight), "wanted": round(self.estimate.wanted)}
        values |= {"instructions": c.code.size, "loop": None if c.loop is None else c.loop.counts}
        return values


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What a step is like on a GPU.

    Attributes:
        num_layers: of the model; ``rows`` may have fewer. Those that were left out count as the last one that was not.
        spans: of ``rows``: from a layer's attention to the next layer's, a period of the model.
        dynamic_inputs, skip_reasons: of the CUDA graph, see ``Generated``.
        transfers: what comes from host memory beside; only where all layers were generated.
    """

    gpu: Gpu
    step: FakeStep
    contexts: Contexts
    num_layers: int
    rows: tuple[Row, ...]
    spans: tuple[slice, ...]
    dynamic_inputs: tuple[int, ...]
    skip_reasons: tuple[str, ...]
    transfers: tuple[Transfer, ...] = ()

    @property
    def launches_per_layer(self) -> list[int]:
        """From each layer's attention to the next layer's."""
        return [span.stop - span.start for span in self.spans]

    @property
    def order(self) -> list[int]:
        """The launches of the whole step, as places in ``rows``."""
        places = list(range(len(self.rows)))
        left_out = self.num_layers - len(self.step.layers)
        if not left_out:
            return places
        last = self.spans[-1]
        return places[: last.stop] + left_out * places[last] + places[last.stop :]

    @property
    def num_launches(self) -> int:
        """Of the whole step."""
        return len(self.order)

    @property
    def num_programmatic(self) -> int:
        """Launches of the whole step that may start while the one before still runs; the estimate leaves that out."""
        return sum(self.rows[place].launch.is_programmatic for place in self.order)

    @property
    def num_bytes(self) -> int:
        """That the launches of the whole step read and write."""
        return sum(self.rows[place].work.read + self.rows[place].work.written for place in self.order)

    @property
    def num_link_bytes(self) -> int:
        """That the launches of the whole step read of other GPUs' memory; the estimate leaves these out."""
        return sum(self.rows[place].work.over_links for place in self.order)

    @property
    def flops(self) -> int:
        """That the whole step needs."""
        return sum(self.rows[place].work.flops for place in self.order)

    @property
    def bandwidth_share(self) -> float:
        """Of the data sheet's bandwidth, over the whole step."""
        return self.num_bytes / self.seconds() / self.gpu.bandwidth

    def seconds(self) -> float:
        """Of the whole step, with what it waits for weights from host memory."""
        return self.timeline.seconds

    @property
    def timeline(self) -> Timeline:
        """Of the launches and of what comes from host memory beside them."""
        assert not self.transfers or len(self.step.layers) == self.num_layers, "a layer's fetches are of some layers"
        return timeline([self.seconds_of([self.rows[place]]) for place in self.order], self.transfers, self.gpu.bus)

    @staticmethod
    def seconds_of(rows: Sequence[Row]) -> float:
        """Of these launches and the gaps after them."""
        return sum(row.estimate.seconds + GAP_SECONDS for row in rows)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "gpu": self.gpu.name,
            "bucket": self.step.bucket.name,
            "dtype": self.step.dtype,
            "contexts": dataclasses.asdict(self.contexts),
            "layers": self.num_layers,
            "launches_per_layer": self.launches_per_layer,
            "launches": self.num_launches,
            "programmatic_launches": self.num_programmatic,
            "step_us": round(self.seconds() * 1e6, 1),
            "step_bytes": self.num_bytes,
            "step_link_bytes": self.num_link_bytes,
            "bandwidth_share": round(self.bandwidth_share, 3),
            "host_copies": self.timeline.copies,
            "host_bytes": self.timeline.nbytes,
            "bus_us": round(self.timeline.bus_seconds * 1e6, 1),
            "waiting_us": round(self.timeline.waiting_seconds * 1e6, 1),
            "dynamic_inputs": list(self.dynamic_inputs),
            "skip_reasons": list(self.skip_reasons),
            "rows": [row.as_json() for row in self.rows],
        }


class CompiledStep(NamedTuple):
    """A step's launches and their code on ``gpu``, for any contexts. ``compiled``: None for kernels of libraries."""

    step: FakeStep
    gpu: Gpu
    launches: tuple[Launch, ...]
    compiled: tuple[Compiled | None, ...]
    transfers: tuple[Transfer, ...] = ()


def compile_step(step: FakeStep, gpu: Gpu) -> CompiledStep:
    """``gpu``: the one that ``step`` was generated for."""
    (launches, transfers), compiler = run_on_fakes(step), Compiler(gpu)
    compiled = [None if launch.triton is None else compiler.compile(launch.triton) for launch in launches]
    return CompiledStep(step, gpu, tuple(launches), tuple(compiled), tuple(transfers))


def inspect(made: CompiledStep, num_layers: int, context: int, gpu: Gpu | None = None) -> Inspection:
    """What ``made`` does with ``context`` keys of each request.

    Args:
        num_layers: of the whole model, of which the step may have the first.
        gpu: another one that runs the same code, with memory of its own.
    """
    gpu = gpu or made.gpu
    assert gpu.runs_code_of(made.gpu), f"{gpu.name} does not run the code of {made.gpu.name}"
    contexts = Contexts.of(made.step.bucket, context)
    rows = []
    for launch, compiled in zip(made.launches, made.compiled, strict=True):
        work = work_of(launch, contexts)
        rows.append(Row(launch, work, compiled, estimate(launch, work, compiled, gpu)))
    spans, generated = spans_of(list(made.launches)), made.step.generated
    of_graph = generated.dynamic_inputs, generated.skip_reasons
    return Inspection(gpu, made.step, contexts, num_layers, tuple(rows), spans, *of_graph, made.transfers)


def first_layers(config: ModelConfig, count: int) -> ModelConfig:
    """``config`` with no more than its first layers."""
    if count >= config.num_layers:
        return config
    per_layer: dict[str, Any] = {
        field.name: value[:count]
        for field in dataclasses.fields(config)
        if isinstance(value := getattr(config, field.name), tuple) and len(value) == config.num_layers
    }
    return dataclasses.replace(config, num_layers=count, **per_layer)
