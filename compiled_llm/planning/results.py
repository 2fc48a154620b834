"""What a plan says: tables for people, JSON for programs, and how attainment changes with the load."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from compiled_llm.api.tables import text_table
from compiled_llm.planning.placement import Planner, Rated
from compiled_llm.planning.traces import TraceRequest, at_rate, thinned, with_cv

RATES = (0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0)  # times the trace's
CVS = (1.0, 2.0, 4.0, 8.0)
SCALES = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0)  # times the targets


def group_rows(planner: Planner, rated: Rated) -> list[dict[str, Any]]:
    """A row for groups of one shape with the same models: how many, their KV pools, and the share of time at work."""
    rows = []
    for group, count in sorted(Counter(rated.groups).items()):
        plan = planner.plan_of(group)
        assert plan is not None
        busy = [share for one, share in zip(rated.groups, rated.outcome.busy, strict=True) if one == group]
        pools = [f"{tokens / 1e3:,.0f}k" for _, tokens in plan.replicas.values()]
        shape = {"models": ", ".join(group.models) or "(none)", "groups": count, "tp": group.tp, "pp": group.pp}
        rows.append({**shape, "kv_tokens": ", ".join(pools), "busy": round(float(np.mean(busy)), 3)})
    return rows


def model_rows(rated: Rated, trace: Sequence[TraceRequest]) -> list[dict[str, Any]]:
    """A row for each model, and all: requests, the share within the targets, latencies in seconds of those served."""
    names = np.array([row.model for row in trace])
    rows = []
    for model in (*sorted(set(names.tolist())), "all"):
        own = np.ones(len(names), bool) if model == "all" else names == model
        served = own & np.isfinite(rated.outcome.e2el)
        row = {"model": model, "requests": int(own.sum()), "attained": round(float(rated.kept[own].mean()), 4)}
        for name, values in (("ttft", rated.outcome.ttft), ("e2el", rated.outcome.e2el)):
            for share in (50, 90, 99):
                row[f"{name}_p{share}"] = float(np.percentile(values[served], share)) if served.any() else None
        rows.append(row)
    return rows


def curves(planner: Planner, rated: Rated, trace: Sequence[TraceRequest]) -> dict[str, list[tuple[float, float]]]:
    """Attainment of the placement over rate, burstiness and targets, on as large a part of it as was planned."""
    groups = rated.groups[: len(rated.groups) // planner.share]
    own = thinned(trace, planner.share) if planner.share > 1 else trace

    def attained(requests: Sequence[TraceRequest], factor: float = 1.0) -> float:
        return planner.rate(groups, requests, planner.targets.scaled(factor)).attained

    return {
        "rate": [(factor, attained(at_rate(own, factor))) for factor in RATES],
        "cv": [(cv, attained(with_cv(own, cv))) for cv in CVS] if len(own) > 1 else [],
        "slo_scale": [(factor, attained(own, factor)) for factor in SCALES],
    }


def text_of(planner: Planner, rated: Rated, trace: Sequence[TraceRequest], found: dict[str, Any]) -> str:
    """All of it for a terminal."""
    parts = [text_table(group_rows(planner, rated)), text_table(model_rows(rated, trace))]
    titles = {"rate": "at times the rate", "cv": "with a CV of arrivals of", "slo_scale": "with targets times"}
    for name, points in found.items():
        shares = "  ".join(f"{at:g}: {share:.1%}" for at, share in points)
        parts.append(f"attained {titles[name]}  {shares}")
    return "\n\n".join(parts[:2]) + "\n\n" + "\n".join(parts[2:])
