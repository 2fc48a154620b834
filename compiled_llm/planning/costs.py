"""How long a step takes: ``ReplicaCosts``, from a file of measured ones or an estimate (``gpu_costs.py``)."""

import bisect
import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

FORMAT = 1
Points = tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class ReplicaCosts:
    """A model on ``tp`` x ``pp`` devices. Seconds are of whole steps; a stage of a pipeline takes its part.

    Attributes:
        decode: (rows, seconds) of steps that give each request a token, without what their contexts take; rising.
        chunk: (tokens, seconds) of steps with prompts, likewise.
        key_seconds: of a key in a request's context, in a decode.
        pair_seconds: of a pair of a query and a key, in a prompt.
        hop_seconds: between two stages.
        slowest_stage: its part of a step; 1 / ``pp`` where stages are alike.
        weight_bytes, kv_bytes: of weights and of a token's keys and values, on each device.
        kv_tokens: of the pool, where it has a size of its own; None: what the device's memory leaves.
        max_num_seqs, max_tokens, max_tokens_beside_decodes: limits of steps, as those of the engine.
    """

    tp: int
    pp: int
    decode: Points
    chunk: Points
    key_seconds: float
    pair_seconds: float
    weight_bytes: float
    kv_bytes: float
    max_num_seqs: int
    max_tokens: int
    max_tokens_beside_decodes: int
    kv_tokens: int | None = None
    hop_seconds: float = 0.0
    slowest_stage: float = 1.0

    @functools.cached_property
    def decode_seconds(self) -> list[float]:
        """By the number of rows, from 0."""
        return [0.0, *(_between(self.decode, rows) for rows in range(1, self.max_num_seqs + 1))]

    def step_seconds(self, rows: int, keys: float, tokens: int = 0, pairs: float = 0.0) -> float:
        """Of a step of ``rows`` decodes that see ``keys`` in all, beside ``tokens`` of prompts with ``pairs``."""
        base = _between(self.chunk, rows + tokens) if tokens else self.decode_seconds[rows]
        return base + self.key_seconds * keys + self.pair_seconds * pairs

    def alone_seconds(self, prompt_tokens: int, output_tokens: int) -> tuple[float, float]:
        """Until the first token, and the end, of a request that no other disturbs."""
        first, done = 0.0, 0
        while done < prompt_tokens:
            count = min(self.max_tokens, prompt_tokens - done)
            first += self.step_seconds(0, 0, count, count * done + count * (count + 1) / 2)
            done += count
        steps = output_tokens - 1
        keys = steps * prompt_tokens + steps * (steps + 1) / 2
        hops = (self.pp - 1) * self.hop_seconds
        decode = steps * (self.decode_seconds[1] + hops) + self.key_seconds * keys
        stretch = self.slowest_stage * self.pp  # stages are as long as the slowest
        return first * stretch + hops, (first + decode) * stretch + hops


def _between(points: Points, at: int) -> float:
    """Between two points on their line, beyond the last in proportion, before the first as there."""
    place = bisect.bisect_left(points, (at, 0.0))
    if place == 0:
        return points[0][1]
    if place == len(points):
        return points[-1][1] * at / points[-1][0]
    (low, before), (high, after) = points[place - 1], points[place]
    return before + (after - before) * (at - low) / (high - low)


class Catalogue(Protocol):
    """Which models there are, and how each may be served."""

    models: Sequence[str]

    def costs(self, model: str, tp: int, pp: int) -> ReplicaCosts | None:
        """None: it cannot be, or is not known."""
        ...


class MeasuredCosts:
    """What ``compiled-llm bench step-costs`` wrote.

    Attributes:
        machine: where, for people. memory_bytes: of what counts as a device there.
    """

    def __init__(self, rows: Sequence[tuple[str, ReplicaCosts]], machine: str, memory_bytes: float) -> None:
        self._rows = {(model, costs.tp, costs.pp): costs for model, costs in rows}
        self.models, self.machine = tuple(dict.fromkeys(model for model, _ in rows)), machine
        self.memory_bytes = memory_bytes

    def costs(self, model: str, tp: int, pp: int) -> ReplicaCosts | None:
        return self._rows.get((model, tp, pp))

    def write(self, path: Path) -> None:
        rows = [{"model": model, **dataclasses.asdict(costs)} for (model, _, _), costs in self._rows.items()]
        facts = {"step_costs": FORMAT, "machine": self.machine, "memory_bytes": self.memory_bytes}
        path.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")

    @classmethod
    def read(cls, path: Path) -> "MeasuredCosts":
        """``ValueError``: the file is no such result."""
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
            if value["step_costs"] != FORMAT:
                raise ValueError(f"step_costs must be {FORMAT}, given {value['step_costs']!r}")
            return cls([_costs_of(row) for row in value["rows"]], str(value["machine"]), float(value["memory_bytes"]))
        except (OSError, ValueError, TypeError, KeyError) as error:
            wrote = "as compiled-llm bench step-costs writes it"
            raise ValueError(f"--costs {path} is no file of costs, {wrote}: {error!r}") from None


def _costs_of(row: dict[str, Any]) -> tuple[str, ReplicaCosts]:
    fields = {**row}
    model = fields.pop("model")
    for name in ("decode", "chunk"):
        fields[name] = tuple((int(size), float(seconds)) for size, seconds in fields[name])
        if not fields[name] or list(fields[name]) != sorted(fields[name]):
            raise ValueError(f"{name} must be points with rising sizes")
    return model, ReplicaCosts(**fields)
