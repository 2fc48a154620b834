"""A bucket's step as a table: each launch with its work, its code and its estimate; and what they make together."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from compiled_llm.models.config import ModelConfig
from compiled_llm.report.gpu_step.estimate import GAP_SECONDS, Estimate, estimate
from compiled_llm.report.gpu_step.fake_step import FakeStep
from compiled_llm.report.gpu_step.gpus import Gpu
from compiled_llm.report.gpu_step.kernels import Compiled, Compiler
from compiled_llm.report.gpu_step.launches import Launch, launches_of, spans_of
from compiled_llm.report.gpu_step.work import Contexts, Work, work_of


@dataclasses.dataclass(frozen=True)
class Row:
    """A launch of the step."""

    launch: Launch
    work: Work
    compiled: Compiled | None
    estimate: Estimate

    def as_json(self) -> dict[str, Any]:
        """Plain values; times in microseconds."""
        values: dict[str, Any] = {
            "name": self.launch.name,
            "kind": self.launch.kind,
            "op": self.launch.op,
            "read": self.work.read,
            "written": self.work.written,
            "flops": self.work.flops,
            "us": round(self.estimate.seconds * 1e6, 3),
            "bound_by": self.estimate.bound_by,
        }
        values |= {f"{name}_us": round(getattr(self.estimate, name) * 1e6, 3) for name in ("memory", "issue", "matrix")}
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
        num_layers: of the model; ``rows`` may have fewer.
        spans: of ``rows``: from a layer's attention to the next layer's, a period of the model.
        dynamic_inputs, skip_reasons: of the CUDA graph, see ``Generated``.
    """

    gpu: Gpu
    step: FakeStep
    contexts: Contexts
    num_layers: int
    rows: tuple[Row, ...]
    spans: tuple[slice, ...]
    dynamic_inputs: tuple[int, ...]
    skip_reasons: tuple[str, ...]

    @property
    def launches_per_layer(self) -> list[int]:
        """From each layer's attention to the next layer's."""
        return [span.stop - span.start for span in self.spans]

    def seconds(self) -> float:
        """Of the whole step: layers that were left out count as the last one that was not."""
        seconds = self._sum(self.rows)
        left_out = self.num_layers - len(self.step.layers)
        return seconds + left_out * self._sum(self.rows[self.spans[-1]]) if left_out else seconds

    @staticmethod
    def _sum(rows: Sequence[Row]) -> float:
        return sum(row.estimate.seconds + GAP_SECONDS for row in rows)

    def num_bytes(self) -> int:
        """That the launches of the whole step read and write."""
        count = _bytes(self.rows)
        left_out = self.num_layers - len(self.step.layers)
        return count + left_out * _bytes(self.rows[self.spans[-1]]) if left_out else count

    def num_launches(self) -> int:
        """Of the whole step."""
        left_out = self.num_layers - len(self.step.layers)
        return len(self.rows) + (left_out * self.launches_per_layer[-1] if left_out else 0)

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "gpu": self.gpu.name,
            "bucket": self.step.bucket.name,
            "contexts": dataclasses.asdict(self.contexts),
            "layers": self.num_layers,
            "launches_per_layer": self.launches_per_layer,
            "launches": self.num_launches(),
            "step_us": round(self.seconds() * 1e6, 1),
            "step_bytes": self.num_bytes(),
            "bandwidth_share": round(self.num_bytes() / self.seconds() / self.gpu.bandwidth, 3),
            "dynamic_inputs": list(self.dynamic_inputs),
            "skip_reasons": list(self.skip_reasons),
            "rows": [row.as_json() for row in self.rows],
        }


def _bytes(rows: Sequence[Row]) -> int:
    return sum(row.work.read + row.work.written for row in rows)


def inspect(step: FakeStep, num_layers: int, gpu: Gpu, context: int) -> Inspection:
    """``context``: keys of each request. ``num_layers``: of the whole model, of which ``step`` may have the first."""
    contexts, compiler = Contexts.of(step.bucket, context), Compiler(gpu)
    launches = launches_of(step)
    return of_launches(step, launches, compiler, num_layers, gpu, contexts)


def of_launches(
    step: FakeStep, launches: list[Launch], compiler: Compiler, num_layers: int, gpu: Gpu, contexts: Contexts
) -> Inspection:
    """The same for launches that are known already."""
    rows = []
    for launch in launches:
        work = work_of(launch, contexts)
        compiled = None if launch.triton is None else compiler.compile(launch.triton)
        rows.append(Row(launch, work, compiled, estimate(launch, work, compiled, gpu)))
    made = step.generated
    return Inspection(
        gpu, step, contexts, num_layers, tuple(rows), spans_of(launches), made.dynamic_inputs, made.skip_reasons
    )


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
