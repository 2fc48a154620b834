"""Costs and a catalogue for tests, of no real machine."""

import dataclasses
from typing import Any

from compiled_llm.planning.costs import ReplicaCosts

COSTS = ReplicaCosts(
    tp=1,
    pp=1,
    decode=((1, 4e-3), (8, 5e-3), (32, 8e-3)),
    chunk=((16, 5e-3), (256, 20e-3)),
    key_seconds=2e-7,
    pair_seconds=1e-8,
    weight_bytes=8e9,
    kv_bytes=1e5,
    max_num_seqs=32,
    max_tokens=256,
    max_tokens_beside_decodes=128,
)


def costs_of(**changes: Any) -> ReplicaCosts:
    return dataclasses.replace(COSTS, **changes)


class ScaledCosts:
    """Models whose steps take ``seconds[model]`` times those of ``COSTS``, and share as perfectly as may be."""

    def __init__(self, seconds: dict[str, float], weight_bytes: float = 8e9) -> None:
        self.seconds, self.models, self.weight_bytes = seconds, tuple(seconds), weight_bytes

    def costs(self, model: str, tp: int, pp: int) -> ReplicaCosts | None:
        factor = self.seconds[model] / tp

        def scaled(points: tuple[tuple[int, float], ...]) -> tuple[tuple[int, float], ...]:
            return tuple((size, seconds * factor) for size, seconds in points)

        return costs_of(
            tp=tp,
            pp=pp,
            decode=scaled(COSTS.decode),
            chunk=scaled(COSTS.chunk),
            slowest_stage=1 / pp,
            hop_seconds=1e-5 * (pp > 1),
            weight_bytes=self.weight_bytes / (tp * pp),
            kv_bytes=COSTS.kv_bytes / (tp * pp),
        )
