"""Buckets for the work of earlier runs: the sizes with which the same steps would take the least time.

A step takes the time of its bucket, padding included. On a GPU each bucket is compiled, and recorded at every start. On
a CPU one graph serves all, and nothing computes padding: there is nothing to tune. The proposal is the set of buckets,
at most so many of each kind, with the least

    runs_per_start x (the sum of all steps' times) + (the sum of compile seconds),

found by dynamic programming over the sizes in the traces; no other set is better. Several traces count together as one
run; they must be of the same model on the same machine.

A bucket's time is its median where the trace has it. A larger bucket never takes less: if the medians fall, as after
some slow steps, the mean of these buckets is used, weighted by their steps (isotonic regression). Between sizes, times
are interpolated linearly. Below the smallest and above the largest measured size, the nearest line is extended, but not
below the smallest size's time per token. If a kind has only one measured size, its time is used for all. Compiling a
bucket costs the mean of its kind, whatever its size; decode buckets count their sampling graph with them.

The engine keeps its capacity: the largest decode bucket is max_num_seqs, the largest token bucket
max_num_batched_tokens. ``shrink`` reduces both to what was used. Steps are then cut differently, so the savings are
an estimate. Without it the padding is exact for the same requests arriving in the same way (unless ``target_itl_ms`` is
set, which also cuts steps by the buckets).
"""

import dataclasses
import json
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from compiled_llm.api import tables

FORMAT = 1
KINDS = ("decode", "tokens")
FLAGS = {"decode": "--bucket-sizes", "tokens": "--token-bucket-sizes"}
_HISTOGRAM_ROWS = 16
_MOST_DISAGREEMENT = 0.2  # of the modelled time from the measured one


@dataclasses.dataclass
class Work:
    """Steps of one kind, of all traces together.

    Attributes:
        counts: number of tokens in a step -> number of such steps.
        medians: size of a bucket -> median seconds of its steps.
        weights: size of a bucket -> number of its steps, 1 or more.
        compile_seconds: to compile a bucket of this kind, the mean of all that the traces' starts compiled.
        capacity: smallest size that the largest bucket may have.
        present: (sizes of the buckets, number of tokens -> number of steps) of each trace.
        measured_seconds: of all steps, as they were measured.
    """

    counts: Counter[int]
    medians: dict[int, float]
    weights: dict[int, int]
    compile_seconds: float
    capacity: int
    present: list[tuple[list[int], Counter[int]]]
    measured_seconds: float

    def times(self) -> dict[int, float]:
        """Size of a bucket -> seconds of a step, which never fall as the size grows."""
        return never_falling(self.medians, self.weights)

    def step_time(self) -> Callable[[int], float]:
        return interpolated(self.times())

    def candidates(self) -> list[int]:
        """Sizes among which the best set of buckets is."""
        return sorted({size for size in self.counts if size < self.capacity} | {self.capacity})


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a set of buckets costs: seconds of one run's steps, of compiling, and tokens of padding."""

    step_seconds: float
    compile_seconds: float
    padding_tokens: int


def read_trace(path: Path) -> dict[str, Any]:
    """A trace as ``compiled-llm batch --trace`` writes it. ``ValueError`` with what is wrong."""
    try:
        trace = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(trace, dict) or trace.get("format") != FORMAT:
        raise ValueError(f"{path} is no trace of format {FORMAT}, as compiled-llm batch --trace writes it")
    try:
        for kind in KINDS:
            largest = max(trace["buckets"][kind])
            steps = steps_of(trace, kind)
            if any(row["num_tokens"] > largest for row in steps):
                raise ValueError(f"{path} holds a step that is larger than the largest {kind} bucket, {largest}")
            if steps and not any(name.startswith(f"{kind}_") for name in trace["step_seconds"]):
                raise ValueError(f"{path} holds {kind} steps, but step_seconds has no time of any {kind} bucket")
        _ = trace["max_num_seqs"], trace["max_num_batched_tokens"], trace["model"], trace["machine"]
        _ = trace["compile_seconds"], trace["step_seconds"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is no whole trace: {error!r} is missing or of another kind") from error
    if not trace["steps"]:
        raise ValueError(f"{path} holds no step: serve something with --trace first")
    return trace


def steps_of(trace: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    return [row for row in trace["steps"] if row["kind"] == kind]


def check_that_traces_belong_together(traces: Sequence[dict[str, Any]]) -> None:
    """``ValueError`` if the traces are of different models or machines."""
    for what, found in {
        "model": {trace["model"] for trace in traces},
        "machine": {(trace["machine"].get("cpu"), trace["machine"].get("gpu")) for trace in traces},
    }.items():
        if len(found) > 1:
            raise ValueError(
                f"--trace: all traces must be of one {what}, given {sorted(map(str, found))}: their step times "
                "cannot be compared. Tune for each separately"
            )


def work_of(traces: Sequence[dict[str, Any]], kind: str, shrink: bool) -> Work:
    """The work of one kind of step, from the traces."""
    counts: Counter[int] = Counter()
    medians: dict[int, list[tuple[float, int]]] = {}
    compiled: list[float] = []
    present, measured = [], 0.0
    for trace in traces:
        sizes = sorted(trace["buckets"][kind])
        own: Counter[int] = Counter()
        in_bucket: Counter[int] = Counter()
        for row in steps_of(trace, kind):
            own[row["num_tokens"]] += row["count"]
            in_bucket[bucket_of(row["num_tokens"], sizes)] += row["count"]
            measured += row["seconds"]
        for size in sizes:
            name = f"{kind}_{size}"
            if name in trace["step_seconds"]:
                medians.setdefault(size, []).append((trace["step_seconds"][name], max(1, in_bucket[size])))
            if name in trace["compile_seconds"]:
                sampler = trace["compile_seconds"].get(f"sample_{size}", 0.0) if kind == "decode" else 0.0
                compiled.append(trace["compile_seconds"][name] + sampler)
        counts += own
        present.append((sizes, own))
    limit = "max_num_seqs" if kind == "decode" else "max_num_batched_tokens"
    capacity = max(trace[limit] for trace in traces)
    if shrink:
        most_requests = max(row["num_requests"] for trace in traces for row in trace["steps"])
        # A step has a token for each running request at least, whatever its kind.
        capacity = max(most_requests, *counts) if counts else most_requests
    return Work(
        counts=counts,
        medians={size: sum(t * n for t, n in found) / sum(n for _, n in found) for size, found in medians.items()},
        weights={size: sum(n for _, n in found) for size, found in medians.items()},
        compile_seconds=statistics.mean(compiled) if compiled else 0.0,
        capacity=capacity,
        present=present,
        measured_seconds=measured,
    )


def outcome(work: Work, buckets: Sequence[tuple[Sequence[int], Counter[int]]]) -> Outcome:
    """What steps cost: ``buckets`` pairs the sizes of a start with the steps that run in them. Of starts, the mean."""
    step_time, seconds, padding = work.step_time(), 0.0, 0
    for sizes, counts in buckets:
        for num_tokens, count in counts.items():
            size = bucket_of(num_tokens, sizes)
            seconds += count * step_time(size)
            padding += count * (size - num_tokens)
    return Outcome(seconds, statistics.mean(len(sizes) for sizes, _ in buckets) * work.compile_seconds, padding)


def histogram(work: Work) -> list[str]:
    """The sizes of the steps, in at most ``_HISTOGRAM_ROWS`` rows: sizes, steps, a bar."""
    sizes = sorted(work.counts)
    rows = np.array_split(np.array(sizes), min(len(sizes), _HISTOGRAM_ROWS))
    counts = [sum(work.counts[int(size)] for size in row) for row in rows]
    names = [f"{row[0]}" if row[0] == row[-1] else f"{row[0]}..{row[-1]}" for row in rows]
    pairs = zip(names, counts, strict=True)
    return [f"  {name:>12} {count:>9}  {'#' * -(-40 * count // max(counts))}".rstrip() for name, count in pairs]


def tune(traces: Sequence[dict[str, Any]], max_buckets: int, runs_per_start: float, shrink: bool) -> dict[str, Any]:
    """The proposal and what it would change, for each kind. ``work`` in it is what it follows from."""
    check_that_traces_belong_together(traces)
    result: dict[str, Any] = {}
    for kind in KINDS:
        work = work_of(traces, kind, shrink)
        present = sorted({size for sizes, _ in work.present for size in sizes})
        proposed = best_buckets(
            work.counts, work.candidates(), work.step_time(), work.compile_seconds, max_buckets, runs_per_start
        )
        result[kind] = {
            "work": work,
            "tokens": sum(size * count for size, count in work.counts.items()),
            "present": present,
            "proposed": proposed,
            "before": outcome(work, work.present),
            "after": outcome(work, [(proposed, work.counts)]),
        }
    return result


def disagreement(part: dict[str, Any]) -> float:
    """How far the steps as they ran, by the times that a proposal follows from, are from the time they really took."""
    measured = part["work"].measured_seconds
    return part["before"].step_seconds / measured - 1 if measured else 0.0


def share(padding: int, tokens: int) -> float:
    return padding / max(1, padding + tokens)


def rounded_steps(traces: Sequence[dict[str, Any]]) -> int:
    """Steps that the traces have with their bucket's size, because an engine records a limited number of shapes."""
    return sum(trace.get("rounded_steps", 0) for trace in traces)


def remarks(part: dict[str, Any], kind: str) -> list[str]:
    """Where the times of a kind differ from the measured ones, and whether they add up."""
    work, lines = part["work"], []
    times = work.times()
    fallen = [
        f"{kind}_{size} {work.medians[size]:.3g} (weight {work.weights[size]}) as {times[size]:.3g}"
        for size in sorted(times)
        if times[size] != work.medians[size]
    ]
    if fallen:
        lines.append(f"larger buckets took less, so that means are taken, in seconds: {', '.join(fallen)}")
    if len(times) == 1:
        better = "A trace with more buckets would be better"
        lines.append(f"only {kind}_{min(times)} ran: its time is used for all sizes. {better}")
    outside = [size for size in part["proposed"] if size < min(times) or size > max(times)]
    if outside and len(times) > 1:
        lines.append(f"the time of {outside} is extended from sizes that ran: {sorted(times)}")
    off = disagreement(part)
    seconds = part["before"].step_seconds
    lines.append(f"by their buckets' times these steps take {seconds:.3f} s, {off:+.0%} of measured")
    if abs(off) > _MOST_DISAGREEMENT:
        lines.append(
            f"WARNING: more than {_MOST_DISAGREEMENT:.0%} off. Do not rely on this proposal: the trace holds steps "
            "that took far longer or shorter than their bucket's median, as on a busy machine. Record another one"
        )
    return lines


def text_of(result: dict[str, Any], runs_per_start: float, rounded: int) -> str:
    """What a person reads: for each kind its steps, remarks, and the buckets before and after; then what is saved."""
    lines = []
    for kind in KINDS:
        part, work = result[kind], result[kind]["work"]
        before, after, tokens = part["before"], part["after"], part["tokens"]
        lines.append(f"{kind}: {work.counts.total()} steps, {tokens} tokens, measured {work.measured_seconds:.2f} s")
        if not work.counts:
            lines.append(f"  there was no such step: only the capacity counts, {work.capacity}\n")
            continue
        lines += [f"  {'tokens':>12} {'steps':>9}", *histogram(work), *(f"  {line}" for line in remarks(part, kind))]
        rows = [
            {
                "": name,
                "buckets": ",".join(map(str, sizes)),
                "padding": f"{share(cost.padding_tokens, tokens):.1%}",
                "step seconds": f"{cost.step_seconds:.3f}",
                "compile s": f"{cost.compile_seconds:.1f}",
            }
            for name, sizes, cost in (("present", part["present"], before), ("proposed", part["proposed"], after))
        ]
        lines.append(tables.text_table(rows) + "\n")
    saved = {
        name: sum(getattr(result[kind]["before"], name) - getattr(result[kind]["after"], name) for kind in KINDS)
        for name in ("step_seconds", "compile_seconds")
    }
    seconds = sum(result[kind]["before"].step_seconds for kind in KINDS)
    lines.append(
        f"the proposal would {saved_or_cost(saved['step_seconds'], 3)} of {seconds:.3f} s in steps a run and "
        f"{saved_or_cost(saved['compile_seconds'], 1)} of compiling a start, weighed at {runs_per_start:g} runs a start"
    )
    if rounded:
        lines.append(f"{rounded} steps have their bucket's size in the traces: their padding is unknown")
    return "\n".join([*lines, "", flags(result)])


def saved_or_cost(saved: float, digits: int) -> str:
    """Seconds saved, or cost where they are negative, in words."""
    return f"{'cost' if round(saved, digits) < 0 else 'save'} {abs(saved):.{digits}f} s"


def flags(result: dict[str, Any]) -> str:
    """Flags for any command that has the engine's."""
    return " ".join(f"{FLAGS[kind]} {','.join(map(str, result[kind]['proposed']))}" for kind in KINDS)


def as_json(result: dict[str, Any]) -> dict[str, Any]:
    """The proposal in plain values."""

    def cost(part: dict[str, Any], which: str) -> dict[str, Any]:
        return dataclasses.asdict(part[which]) | {"padding_share": share(part[which].padding_tokens, part["tokens"])}

    kinds = {
        kind: {name: part[name] for name in ("present", "proposed", "tokens")}
        | {"steps": part["work"].counts.total(), "measured_seconds": part["work"].measured_seconds}
        | {"disagreement": disagreement(part), "before": cost(part, "before"), "after": cost(part, "after")}
        for kind, part in result.items()
    }
    return {"flags": flags(result), **kinds}


# -- The arithmetic: the time of a bucket of any size, and the set of buckets with the least cost


def bucket_of(num_tokens: int, sizes: Sequence[int]) -> int:
    """The smallest of the sorted ``sizes`` that holds a step."""
    return next(size for size in sizes if size >= num_tokens)


def never_falling(times: dict[int, float], weights: dict[int, int]) -> dict[int, float]:
    """Isotonic regression: the times nearest to ``times`` by weighted least squares that never fall with the size.

    By pooling: sizes whose times fall are taken together, with their weighted mean, until nothing falls.
    """
    pools: list[tuple[float, int, list[int]]] = []  # time, weight, sizes
    for size in sorted(times):
        time, weight, sizes = times[size], weights[size], [size]
        while pools and pools[-1][0] > time:
            before, heavy, smaller = pools.pop()
            time = (before * heavy + time * weight) / (heavy + weight)
            weight, sizes = heavy + weight, smaller + sizes
        pools.append((time, weight, sizes))
    return {size: time for time, _, sizes in pools for size in sizes}


def interpolated(times: dict[int, float]) -> Callable[[int], float]:
    """Seconds of a bucket of any size from ``times``, which never fall: straight lines in between and beyond.

    Of a smaller size than measured, a token takes no less than in the smallest.
    """
    if not times:
        return lambda size: 0.0
    sizes = np.array(sorted(times), dtype=float)
    seconds = np.array([times[size] for size in sorted(times)])
    if len(sizes) == 1:
        return lambda size: float(seconds[0])
    slopes = np.diff(seconds) / np.diff(sizes)

    def time_of(size: int) -> float:
        piece = min(max(int(np.searchsorted(sizes, size)) - 1, 0), len(slopes) - 1)
        line = float(seconds[piece] + slopes[piece] * (size - sizes[piece]))
        return max(line, float(seconds[0] * size / sizes[0])) if size < sizes[0] else line

    return time_of


def best_buckets(
    counts: dict[int, int],
    candidates: Sequence[int],
    step_time: Callable[[int], float],
    compile_seconds: float,
    max_buckets: int,
    runs_per_start: float,
) -> list[int]:
    """At most ``max_buckets`` of the sorted ``candidates``, the last one among them, with the least cost.

    Cost is ``runs_per_start`` times the sum over all steps of the time of the smallest bucket that holds them, and
    ``compile_seconds`` for each bucket. Dynamic programming: ``costs[k][j]`` is the least for all steps up to candidate
    j, which is the largest of k + 1 buckets; the buckets below the second largest, i, do not change the cost of
    the steps between i and j.
    """
    sizes = np.array(candidates)
    steps = np.zeros(len(sizes) + 1)  # steps up to each candidate, beginning with none
    for num_tokens, count in counts.items():
        steps[int(np.searchsorted(sizes, num_tokens)) + 1] += count
    steps = steps.cumsum()
    time = np.array([step_time(size) for size in candidates]) * runs_per_start
    costs = [steps[1:] * time + compile_seconds]
    second_largest: list[np.ndarray] = []
    for _ in range(1, min(max_buckets, len(sizes))):
        cost, choice = np.full(len(sizes), np.inf), np.zeros(len(sizes), dtype=int)
        for j in range(1, len(sizes)):
            below = costs[-1][:j] + (steps[j + 1] - steps[1 : j + 1]) * time[j]
            choice[j] = below.argmin()
            cost[j] = below[choice[j]] + compile_seconds
        costs.append(cost)
        second_largest.append(choice)
    number = int(np.argmin([cost[-1] for cost in costs]))
    chosen = [len(sizes) - 1]
    for choice in reversed(second_largest[:number]):
        chosen.append(int(choice[chosen[-1]]))
    return [int(sizes[j]) for j in reversed(chosen)]
