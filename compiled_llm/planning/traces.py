"""Requests as they arrive: read from a file, or drawn. A trace is a list of ``TraceRequest``, by arrival."""

import dataclasses
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

_SPREAD = 0.5  # of drawn lengths, around their mean
_QUIET_SHARE, _MEAN_PHASE_SECONDS = 0.25, 20.0  # of bursts: the rate between them, and how long either lasts


class TraceRequest(NamedTuple):
    """``cached_tokens``: of the prompt, that the replica has in its prefix cache."""

    arrival: float
    prompt_tokens: int
    output_tokens: int
    model: str
    cached_tokens: int = 0


def read_trace(path: Path, models: Sequence[str]) -> list[TraceRequest]:
    """A file of JSON lines with the fields of ``TraceRequest``; the first arrival becomes 0.

    Raises:
        ValueError: a line is no such row, with its number; or there is none.
    """
    rows = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--trace {path}: {error}") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                rows.append(_row(json.loads(line), models))
            except (ValueError, TypeError) as error:
                raise ValueError(f"--trace {path}, line {number}: {error}") from None
    if not rows:
        raise ValueError(f"--trace {path} has no row: give arrival, prompt_tokens, output_tokens and model in each")
    rows.sort(key=lambda row: row.arrival)
    return [row._replace(arrival=row.arrival - rows[0].arrival) for row in rows]


def _row(value: Any, models: Sequence[str]) -> TraceRequest:
    if not isinstance(value, dict):
        raise ValueError(f"must be an object, given {value!r:.80}")
    if unknown := value.keys() - set(TraceRequest._fields):
        raise ValueError(f"fields must be of {', '.join(TraceRequest._fields)}, given {sorted(unknown)}")
    if missing := [name for name in TraceRequest._fields[:4] if name not in value]:
        raise ValueError(f"lacks {', '.join(missing)}")
    row = TraceRequest(**value)
    seconds = row.arrival
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise ValueError(f"arrival must be a number of seconds from 0 on, given {seconds!r:.80}")
    for name, least in (("prompt_tokens", 1), ("output_tokens", 1), ("cached_tokens", 0)):
        count = getattr(row, name)
        if isinstance(count, bool) or not isinstance(count, int) or count < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, given {count!r:.80}")
    if row.cached_tokens >= row.prompt_tokens:
        raise ValueError(f"cached_tokens must be below prompt_tokens, given {row.cached_tokens}")
    if row.model not in models:
        raise ValueError(f"model must be one of {', '.join(models)}, given {row.model!r:.80}")
    return row


@dataclasses.dataclass(frozen=True)
class Load:
    """A trace to be drawn.

    Attributes:
        rates: requests a second of each model.
        cv: standard deviation of the intervals between a model's arrivals, over their mean: 1 is a Poisson process,
            more gives bursts (gamma distribution).
        bursts: whether each model's rate changes between a quarter of its usual one and a burst that makes up for it,
            each for 20 s on average, as functions of serverless traces do (Shahrad et al., USENIX ATC 2020).
        prompt_tokens, output_tokens: on average; drawn evenly from half of it to half more.
    """

    rates: Mapping[str, float]
    seconds: float
    cv: float = 1.0
    bursts: bool = False
    prompt_tokens: int = 512
    output_tokens: int = 128
    seed: int = 0

    def draw(self) -> list[TraceRequest]:
        rng = np.random.default_rng(self.seed)
        rows = []
        for model, rate in self.rates.items():
            times = _arrivals(rng, rate, self.seconds, self.cv)
            if self.bursts:
                times = _warped(rng, times, self.seconds)
            prompts = _lengths(rng, self.prompt_tokens, len(times)).tolist()
            outputs = _lengths(rng, self.output_tokens, len(times)).tolist()
            rows += [TraceRequest(*row, model) for row in zip(times.tolist(), prompts, outputs, strict=True)]
        return sorted(rows)


def popularity(models: Sequence[str], rate: float, exponent: float) -> dict[str, float]:
    """``rate`` requests a second shared by a power law: the n-th model gets a share of n ** -exponent."""
    shares = [(number + 1) ** -exponent for number in range(len(models))]
    return {model: rate * share / sum(shares) for model, share in zip(models, shares, strict=True)}


def _arrivals(rng: np.random.Generator, rate: float, seconds: float, cv: float) -> np.ndarray:
    """Of a renewal process with gamma intervals, float64 ``[n]``; it begins somewhere in an interval."""
    shape, count = cv**-2, int(rate * seconds * 1.2 + 20 * (1 + cv))
    times = np.cumsum(rng.gamma(shape, 1 / (rate * shape), count)) - rng.random() / rate
    return times[(times >= 0) & (times < seconds)]


def _lengths(rng: np.random.Generator, mean: int, count: int) -> np.ndarray:
    return np.maximum(1, np.rint(mean * rng.uniform(1 - _SPREAD, 1 + _SPREAD, count))).astype(int)


def _warped(rng: np.random.Generator, times: np.ndarray, seconds: float) -> np.ndarray:
    """``times`` of a steady process as those of one whose rate changes, with as many requests in all."""
    phases = rng.exponential(_MEAN_PHASE_SECONDS, 4 + int(4 * seconds / _MEAN_PHASE_SECONDS))
    ends = np.cumsum(phases)
    rates = np.where((np.arange(len(ends)) + rng.integers(2)) % 2 == 0, _QUIET_SHARE, 2 - _QUIET_SHARE)
    ends = np.append(ends[ends < seconds], seconds)
    rates = rates[: len(ends)]
    done = np.cumsum(rates * np.diff(ends, prepend=0.0))
    return np.interp(times * (done[-1] / seconds), np.append(0.0, done), np.append(0.0, ends))


def at_rate(trace: Sequence[TraceRequest], factor: float) -> list[TraceRequest]:
    """The same requests, ``factor`` times as many a second."""
    return [row._replace(arrival=row.arrival / factor) for row in trace]


def with_cv(trace: Sequence[TraceRequest], cv: float, seed: int = 0) -> list[TraceRequest]:
    """The same requests at other times: each model's arrivals are a gamma process of its mean rate with this ``cv``."""
    rng, rows, seconds = np.random.default_rng(seed), list[TraceRequest](), trace[-1].arrival
    for model in sorted({row.model for row in trace}):
        own = [row for row in trace if row.model == model]
        times = np.cumsum(rng.gamma(cv**-2, 1.0, len(own)))
        times *= seconds * len(own) / (len(own) + 1) / times[-1]
        rows += [row._replace(arrival=time) for row, time in zip(own, times.tolist(), strict=True)]
    return sorted(rows)


def thinned(trace: Sequence[TraceRequest], share: int, seed: int = 0) -> list[TraceRequest]:
    """One request of ``share``, chosen at random."""
    kept = np.random.default_rng(seed).random(len(trace)) < 1 / share
    return [row for row, keep in zip(trace, kept, strict=True) if keep]
