"""The picture of ``bench serve``: latencies of a run over time, or of runs over their rates. Needs matplotlib."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from compiled_llm.bench.load import LoadRun, Served

_BLUE, _ORANGE, _GREEN, _PINK = "#0072B2", "#E69F00", "#009E73", "#CC79A7"  # Okabe and Ito's
_COLOURS = {"ttft": _BLUE, "tpot": _ORANGE, "e2el": _PINK}


def draw(path: Path, runs: Sequence[LoadRun], title: str) -> None:
    figure = Figure(figsize=(8.5, 6), layout="constrained")
    figure.suptitle(title, fontsize=10)
    if len(runs) == 1:
        _over_time(figure, [one for one in runs[0].served if not one.error])
    else:
        _over_rate(figure, runs)
    for axes in figure.axes:
        if axes.get_yscale() == "linear":
            axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def _over_time(figure: Figure, done: Sequence[Served]) -> None:
    """Of each request its latencies where it was sent; below, tokens and requests in each of 60 parts of the time."""
    latencies, rates, load = figure.subplots(3, sharex=True, height_ratios=(2, 1, 1))
    start = min((one.sent for one in done), default=0.0)
    sent = [one.sent - start for one in done]
    for name, label in (("ttft", "TTFT"), ("e2el", "end to end")):
        latencies.scatter(sent, [getattr(one, name) for one in done], s=9, color=_COLOURS[name], label=label)
    latencies.set_ylabel("seconds")
    edges = np.linspace(0, max((one.finished - start for one in done), default=1.0), 61)
    times = [t - start for one in done for t in one.token_times]
    weights = [one.output_len / len(one.token_times) for one in done for _ in one.token_times]
    tokens = np.histogram(times, edges, weights=weights)[0] / (edges[1] - edges[0])
    at_once = [sum(one.sent - start <= edge < one.finished - start for one in done) for edge in edges[:-1]]
    rates.stairs(tokens, edges, color=_GREEN, label="output tokens a second")
    load.stairs(at_once, edges, color=_BLUE, label="requests at once")
    load.set_xlabel("seconds since the first request")


def _over_rate(figure: Figure, runs: Sequence[LoadRun]) -> None:
    """Median and 99th percentile of TTFT and TPOT, and what was served, over the rate that was asked for."""
    latencies, served = figure.subplots(2, sharex=True)
    rates = [run.rate for run in runs]
    for name, label in (("ttft", "TTFT"), ("tpot", "TPOT")):
        values = [[getattr(one, name) * 1e3 for one in run.served if not one.error] or [np.nan] for run in runs]
        for percentile, style in ((50, "-o"), (99, "--^")):
            points = [float(np.percentile(each, percentile)) for each in values]
            latencies.plot(rates, points, style, color=_COLOURS[name], markersize=4, label=f"{label}, p{percentile}")
    latencies.set_ylabel("milliseconds")
    latencies.set_yscale("log")
    for key, label, colour in (("request_throughput", "served", _GREEN), ("request_goodput", "within targets", _PINK)):
        if runs[0].metrics[key] is not None:
            served.plot(rates, [run.metrics[key] for run in runs], "-o", color=colour, markersize=4, label=label)
    served.plot(rates, rates, ":", color="#999999", label="asked for")
    served.set_ylabel("requests a second")
    served.set_xlabel("requests a second, asked for")
