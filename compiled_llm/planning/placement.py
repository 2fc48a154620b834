"""Which models go on which devices: AlpaServe's search (Li et al., OSDI 2023, arXiv:2302.11665).

Models are put into buckets by how long they take, so that none waits behind much slower ones; each bucket has devices
of its own. There, all groups have one shape, ``tp`` x ``pp``, and every shape is tried. Which models a group serves is
found by adding: of the models that miss most targets, each is tried on the groups with least to do that have room for
it, and the simulator says which helps most. Where a cluster is large, a part of it is planned with as large a part of
the requests, and repeated; of a long trace the middle is planned for. What is reported is a simulation of all.
"""

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from compiled_llm.planning.costs import Catalogue
from compiled_llm.planning.simulator import GroupPlan, Outcome, simulate
from compiled_llm.planning.traces import TraceRequest, thinned

_SHARE, _RESERVED_BYTES = 0.9, 3 << 30  # of a device's memory; of that, for activations, code and CUDA graphs
_LEAST_TOKENS = 4096  # that a replica's KV pool must have room for
_LEAST_GAIN = 0.001  # of attainment, that another replica has to bring
_WIDTH = 2  # models, and contents of groups, that are tried for the next replica
_ENOUGH_REQUESTS = 3000  # that a search simulates at a time
_MOST_MOVES = 32  # of devices between buckets
_MOST_SHAPES = 3  # of a bucket, the best, that more replicas are tried for


class Targets(NamedTuple):
    """What a request must keep, in seconds; None: anything. ``scale``: times what it takes alone, at its best."""

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None
    scale: float | None = None

    def scaled(self, factor: float) -> "Targets":
        return Targets(*(None if value is None else value * factor for value in self))


@dataclasses.dataclass(frozen=True)
class Cluster:
    """``devices`` alike, of ``memory_bytes`` each, ``per_machine`` of them in a machine."""

    devices: int
    per_machine: int
    memory_bytes: float


class Group(NamedTuple):
    """``tp`` x ``pp`` devices, and the models that they serve."""

    tp: int
    pp: int
    models: tuple[str, ...] = ()

    @property
    def devices(self) -> int:
        return self.tp * self.pp


@dataclasses.dataclass(frozen=True)
class Rated:
    """A placement, and what its simulation gave. ``attained``: the share of requests within the targets."""

    groups: tuple[Group, ...]
    outcome: Outcome
    kept: np.ndarray
    slowness: float

    @property
    def attained(self) -> float:
        return float(self.kept.mean()) if len(self.kept) else 1.0

    @property
    def rank(self) -> tuple[float, float]:
        """By which the better of two is told: attainment, then latencies."""
        return round(self.attained, 4), -self.slowness


class Planner:
    """Finds placements of a catalogue's models on a cluster.

    Args:
        tp_sizes, pp_sizes: to be tried. models_per_group: most of a group.
        drops_hopeless: whether requests that are late already are not begun.

    Attributes:
        share: the last search planned 1 / ``share`` of the cluster.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        cluster: Cluster,
        targets: Targets,
        *,
        tp_sizes: Sequence[int] = (1, 2, 4, 8),
        pp_sizes: Sequence[int] = (1, 2, 4, 8),
        models_per_group: int = 32,
        drops_hopeless: bool = False,
    ) -> None:
        self.catalogue, self.cluster, self.targets = catalogue, cluster, targets
        self.shapes = [(tp, pp) for tp, pp in itertools.product(tp_sizes, pp_sizes) if tp * pp <= cluster.devices]
        self.models_per_group, self.drops_hopeless = models_per_group, drops_hopeless
        self.num_simulations, self.share = 0, 1
        self._alone: dict[tuple[str, int, int], tuple[float, float]] = {}
        self.costs = functools.cache(catalogue.costs)
        self._feasible = functools.cache(self._find_feasible)

    # -- One placement

    def plan_of(self, group: Group) -> GroupPlan | None:
        """Its costs and KV pools. None: a model cannot be served so, or there is no room (weights / N + KV)."""
        costs = {model: self.costs(model, group.tp, group.pp) for model in group.models}
        known = {model: one for model, one in costs.items() if one is not None}
        free = self.cluster.memory_bytes * _SHARE - _RESERVED_BYTES * (self.cluster.memory_bytes > 32 << 30)
        free -= sum(one.weight_bytes for one in known.values())
        if len(known) < len(costs) or free <= 0:
            return None
        plan = {}
        for model, one in known.items():
            tokens = free / len(known) / one.kv_bytes
            if tokens < _LEAST_TOKENS:
                return None
            plan[model] = one, tokens if one.kv_tokens is None else min(tokens, one.kv_tokens)
        return GroupPlan(plan)

    def rate(self, groups: Sequence[Group], trace: Sequence[TraceRequest], targets: Targets | None = None) -> Rated:
        """Simulate the trace on ``groups``, each of which has room for its models."""
        self.num_simulations += 1
        targets = targets or self.targets
        plans = [self.plan_of(group) for group in groups]
        alone = np.array([self.alone_seconds(row) for row in trace]).reshape(-1)
        deadlines: dict[str, float] = {}
        if self.drops_hopeless:
            latest = targets.ttft or targets.e2el
            if latest is None:
                for row, seconds in zip(trace, alone.tolist(), strict=True):
                    late = (targets.scale or math.inf) * seconds
                    deadlines[row.model] = max(deadlines.get(row.model, 0.0), late)
            else:
                deadlines = {row.model: latest for row in trace}
        outcome = simulate([plan for plan in plans if plan is not None], trace, deadlines)
        kept = self.kept(outcome, trace, alone, targets)
        slowness = float(np.minimum(outcome.e2el / alone, 1e3).mean()) if len(trace) else 0.0
        return Rated(tuple(groups), outcome, kept, slowness)

    def kept(self, outcome: Outcome, trace: Sequence[TraceRequest], alone: np.ndarray, targets: Targets) -> np.ndarray:
        """Which requests are within ``targets``, bool ``[n]``."""
        outputs = np.array([row.output_tokens for row in trace])
        kept = np.isfinite(outcome.e2el)
        with np.errstate(invalid="ignore"):
            tpot = np.where(outputs > 1, (outcome.e2el - outcome.ttft) / np.maximum(1, outputs - 1), 0.0)
        for values, target in ((outcome.ttft, targets.ttft), (tpot, targets.tpot), (outcome.e2el, targets.e2el)):
            if target is not None:
                kept &= values <= target
        return kept & (outcome.e2el <= alone * targets.scale) if targets.scale is not None else kept

    def alone_seconds(self, row: TraceRequest) -> float:
        """Of a request that nothing disturbs, on the shape on which it is fastest without a pipeline."""
        key = row.model, row.prompt_tokens, row.output_tokens
        if key not in self._alone:
            found = [
                costs.alone_seconds(row.prompt_tokens, row.output_tokens)
                for tp, pp in self._feasible(row.model)
                if (costs := self.costs(row.model, tp, pp)) is not None
            ]
            self._alone[key] = min(found, key=lambda each: each[1])
        return self._alone[key][1]

    def _find_feasible(self, model: str) -> list[tuple[int, int]]:
        """Shapes on which a model fits alone: of the fewest devices, the reference of ``scale``."""
        fits = [shape for shape in self.shapes if self.plan_of(Group(*shape, (model,))) is not None]
        if not fits:
            raise ValueError(
                f"--machines: {model} fits into no group of {self.cluster.devices} devices by --tensor-parallel-sizes "
                "and --pipeline-parallel-sizes: allow larger ones, give more devices, or leave the model out"
            )
        fewest = min(tp * pp for tp, pp in fits)
        return [(tp, pp) for tp, pp in fits if tp * pp == fewest]

    # -- Search

    def search(self, trace: Sequence[TraceRequest]) -> Rated:
        """The best placement that is found for ``trace``."""
        share = self._share_planned(trace)
        cluster, own = self.cluster, trace
        if share > 1:
            self.cluster = dataclasses.replace(cluster, devices=cluster.devices // share)
            own = thinned(trace, share)
        own = own[max(0, len(own) - _ENOUGH_REQUESTS) // 2 :][:_ENOUGH_REQUESTS]
        try:
            best: Rated | None = None
            for buckets in self._buckets(own):
                found = self._in_buckets(buckets, own)
                if found is not None and (best is None or found.rank > best.rank):
                    best = found
        finally:
            self.cluster = cluster
        if best is None:
            raise ValueError(
                f"--machines: {self.cluster.devices // share} devices have no room for all of "
                f"{', '.join(self.catalogue.models)} together: give more, or leave models out"
            )
        self.share = share
        return self.rate(best.groups * share, trace)

    def _share_planned(self, trace: Sequence[TraceRequest]) -> int:
        """Into how many alike parts the cluster is cut, each of whole machines: so that a simulation is short."""
        machines = max(1, self.cluster.devices // self.cluster.per_machine)
        least = -(-len(trace) // _ENOUGH_REQUESTS)
        parts = [n for n in range(1, machines + 1) if machines % n == 0 and machines // n >= min(4, machines)]
        return max((n for n in parts if n <= least), default=1)

    def _buckets(self, trace: Sequence[TraceRequest]) -> Iterator[list[list[str]]]:
        """All models together; cut where the next is slowest beside the one before, once and twice; each by itself."""
        rows: dict[str, TraceRequest] = {row.model: row for row in trace}
        seconds = {model: self.alone_seconds(row) for model, row in rows.items()}
        models = sorted(seconds, key=lambda model: seconds[model])
        gaps = sorted(range(1, len(models)), key=lambda place: -seconds[models[place]] / seconds[models[place - 1]])
        for count in sorted({*range(min(3, len(models))), len(models) - 1}):
            ends = [0, *sorted(gaps[:count]), len(models)]
            yield [models[start:end] for start, end in itertools.pairwise(ends)]

    def _in_buckets(self, buckets: Sequence[Sequence[str]], trace: Sequence[TraceRequest]) -> Rated | None:
        devices = self._shares_of(buckets, trace)
        if devices is None:
            return None

        @functools.cache
        def best_of(number: int, devices: int) -> Rated | None:
            return self._bucket(buckets[number], devices, trace) if devices else None

        found = [best_of(number, count) for number, count in enumerate(devices)]
        rated = [one for one in found if one is not None]
        if len(rated) < len(found):
            return None
        for _ in range(_MOST_MOVES):
            moved = self._moved(rated, best_of) if len(buckets) > 1 else None
            if moved is None:
                break
            rated = moved
        return self.rate([group for one in rated for group in one.groups], trace)

    def _moved(self, rated: Sequence[Rated], best_of: Callable[[int, int], Rated | None]) -> list[Rated] | None:
        """With devices that no bucket uses, or of one with less to do, where most is missed. None: nothing helps."""
        missed = [int((~one.kept).sum()) for one in rated]
        counts = [sum(group.devices for group in one.groups) for one in rated]
        free = self.cluster.devices - sum(counts)
        by_load = sorted(range(len(rated)), key=lambda n: float(rated[n].outcome.busy.mean()))
        for to in sorted(range(len(rated)), key=lambda n: -missed[n])[:_WIDTH]:
            size = rated[to].groups[0].devices
            changes = [{to: free}] if free else []
            changes += [{to: free + size, giver: -size} for giver in by_load if giver != to and counts[giver] > size]
            for change in changes if missed[to] else ():
                again = {n: best_of(n, counts[n] + more) for n, more in change.items()}
                known = {n: one for n, one in again.items() if one is not None}
                misses = sum(int((~one.kept).sum()) for one in known.values())
                if len(known) == len(change) and misses < sum(missed[n] for n in change):
                    return [known.get(n, one) for n, one in enumerate(rated)]
        return None

    def _bucket(self, models: Sequence[str], devices: int, trace: Sequence[TraceRequest]) -> Rated | None:
        """The best groups of one shape for these models. None: they have no room."""
        own = [row for row in trace if row.model in models]
        found = [rated for shape in self._tried(models) if (rated := self._with_shape(models, devices, shape, own))]
        found.sort(key=lambda rated: rated.rank, reverse=True)
        best = [self._improved(rated, own) for rated in found[:_MOST_SHAPES]]
        return max(best, key=lambda rated: rated.rank, default=None)

    def _tried(self, models: Sequence[str]) -> list[tuple[int, int]]:
        """Shapes of up to a machine, and larger ones of the size that some model needs."""
        least = max(tp * pp for model in models for tp, pp in self._feasible(model)[:1])
        return [(tp, pp) for tp, pp in self.shapes if tp * pp <= max(self.cluster.per_machine, least)]

    def _demand(self, model: str, trace: Sequence[TraceRequest]) -> float:
        """Device seconds that the requests of a model take in batches of 32."""
        shape = self._feasible(model)[0]
        costs = self.costs(model, *shape)
        assert costs is not None
        rows = min(32, costs.max_num_seqs)
        own = [(row.prompt_tokens, row.output_tokens) for row in trace if row.model == model]
        prompts, outputs = (sum(each) for each in zip(*own, strict=True)) if own else (0, 0)
        prompt = costs.step_seconds(0, 0, costs.max_tokens) / costs.max_tokens
        return shape[0] * shape[1] * (prompts * prompt + outputs * costs.step_seconds(rows, 0) / rows)

    def _shares_of(self, buckets: Sequence[Sequence[str]], trace: Sequence[TraceRequest]) -> list[int] | None:
        """Devices of each bucket, in proportion to what it has to do; at least what its largest model needs."""
        demands = [sum(self._demand(model, trace) for model in bucket) + 1e-9 for bucket in buckets]
        least = [max(tp * pp for model in bucket for tp, pp in self._feasible(model)[:1]) for bucket in buckets]
        total = self.cluster.devices
        if sum(least) > total:
            return None
        counts = [
            max(low, int(total * one / sum(demands)) // low * low) for low, one in zip(least, demands, strict=True)
        ]
        while sum(counts) > total:  # of the one that has most beside its need
            place = max(range(len(counts)), key=lambda n: (counts[n] > least[n], counts[n] / demands[n]))
            counts[place] -= least[place]
        counts[int(np.argmax(demands))] += total - sum(counts)
        return counts

    def _with_shape(
        self, models: Sequence[str], devices: int, shape: tuple[int, int], trace: Sequence[TraceRequest]
    ) -> Rated | None:
        """Groups of one shape, shared by the models' demands. None: no room."""
        count = devices // (shape[0] * shape[1])
        if not count or any(self.plan_of(Group(*shape, (model,))) is None for model in models):
            return None
        demands = {model: self._demand(model, trace) for model in models}
        groups = [Group(*shape) for _ in range(count)]
        loads = [0.0] * count
        wanted = _apportioned(demands, max(count, len(models)))
        for model in sorted(models, key=lambda one: -demands[one]):
            for _ in range(wanted[model]):
                place = self._least_loaded(groups, loads, model)
                if place is None:
                    break
                groups[place] = groups[place]._replace(models=(*groups[place].models, model))
                loads[place] += demands[model] / wanted[model]
            if not any(model in group.models for group in groups):
                return None
        return self.rate(groups, trace)

    def _improved(self, rated: Rated, trace: Sequence[TraceRequest]) -> Rated:
        """With more replicas, one after the other, as long as they help."""
        while rated.attained < 1 and (better := self._with_another(rated, trace)) is not None:
            rated = better
        return rated

    def _least_loaded(self, groups: Sequence[Group], loads: Sequence[float], model: str) -> int | None:
        for place in sorted(range(len(groups)), key=lambda n: (loads[n], n)):
            if self._takes(groups[place], model):
                return place
        return None

    def _takes(self, group: Group, model: str) -> bool:
        models = group.models
        fits = model not in models and len(models) < self.models_per_group
        return fits and self.plan_of(group._replace(models=(*models, model))) is not None

    def _with_another(self, rated: Rated, trace: Sequence[TraceRequest]) -> Rated | None:
        """The best of some placements with more replicas; None: none is better by ``_LEAST_GAIN``."""
        missed = Counter(row.model for row, kept in zip(trace, rated.kept.tolist(), strict=True) if not kept)
        at_once = max(1, len(rated.groups) // 16)
        found = []
        for model, _ in missed.most_common(_WIDTH):
            contents: dict[tuple[str, ...], list[int]] = {}
            for place in np.argsort(rated.outcome.busy, kind="stable").tolist():
                if self._takes(rated.groups[place], model):
                    contents.setdefault(tuple(sorted(rated.groups[place].models)), []).append(place)
            for places in list(contents.values())[:_WIDTH]:
                groups = list(rated.groups)
                for place in places[:at_once]:
                    groups[place] = groups[place]._replace(models=(*groups[place].models, model))
                found.append(self.rate(groups, trace))
        best = max(found, key=lambda one: one.rank, default=None)
        return best if best is not None and best.attained >= rated.attained + _LEAST_GAIN else None


def _apportioned(demands: Mapping[str, float], count: int) -> dict[str, int]:
    """Whole shares of ``count``, one at least each, near to the demands (largest quotient first, Sainte-Lague)."""
    shares = dict.fromkeys(demands, 1)
    for _ in range(count - len(shares)):
        shares[max(shares, key=lambda model: demands[model] / (2 * shares[model] + 1))] += 1
    return shares
