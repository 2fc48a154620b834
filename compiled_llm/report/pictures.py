"""The pictures of a report's page, as PNG. Importing this file needs matplotlib.

A report here is the content of ``report.json``, as ``RunReport.to_dict`` gives it.
"""

import io
from collections.abc import Callable
from typing import Any

from matplotlib.figure import Figure

from compiled_llm.worker.profiler import KINDS

# Okabe and Ito's colours, which colour-blind people can distinguish.
_BLUE, _ORANGE, _GREEN, _PINK, _GREY, _SKY = "#0072B2", "#E69F00", "#009E73", "#CC79A7", "#999999", "#56B4E9"
_COLOURS = {
    "attention": _BLUE,
    "states": "#F0E442",
    "linears": _SKY,
    "sampling": _GREEN,
    "everything else": "#4C566A",
    "device": _BLUE,
    "padding": _ORANGE,
    "host": _PINK,
    "waiting": "#DDDDDD",
}


def draw(report: dict[str, Any]) -> dict[str, bytes]:
    """PNG files by name: "time", "limits", "latency", "series"; a picture without values is left out."""
    pictures = {}
    if report["seconds"] > 0:
        pictures["time"] = _png(lambda figure: _draw_time(figure, report), 8.5, 1.5)
    if report["limits"] is not None and report["buckets"]:
        pictures["limits"] = _png(lambda figure: _draw_limits(figure, report), 8.5, 1.1 + 0.42 * len(report["buckets"]))
    if report["latencies"]["itl"] is not None or report["latencies"]["ttft"] is not None:
        pictures["latency"] = _png(lambda figure: _draw_latency(figure, report), 8.5, 2.4)
    if len(report["series"]["seconds"]) > 1:
        pictures["series"] = _png(lambda figure: _draw_series(figure, report), 8.5, 4.2)
    return pictures


def _png(draw_on: Callable[[Figure], None], width: float, height: float) -> bytes:
    figure = Figure(figsize=(width, height), layout="constrained")
    draw_on(figure)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=130)
    return file.getvalue()


def _draw_time(figure: Figure, report: dict[str, Any]) -> None:
    """One bar of the whole time: the device's work by kind where it was profiled, padding, host, waiting."""
    axes = figure.subplots()
    shares = {"device": 1.0}
    if report["device_shares"]:
        shares = {kind: share for kind in KINDS if (share := report["device_shares"].get(kind))}
    parts = [(kind, report["time"]["device"] * share) for kind, share in shares.items()]
    parts += [(name, report["time"][name]) for name in ("padding", "host", "waiting")]
    left = 0.0
    for name, seconds in parts:
        share = 100 * seconds / report["seconds"]
        axes.barh(0, share, left=left, color=_COLOURS[name], edgecolor="white", label=f"{name} {share:.1f}%")
        left += share
    axes.set_xlim(0, max(100.0, left))
    axes.set_yticks([])
    axes.set_xlabel("share of the time (%)")
    axes.spines[["top", "right", "left"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=4, frameon=False, fontsize=9)


def _draw_limits(figure: Figure, report: dict[str, Any]) -> None:
    """For each bucket, bars of its shares of bandwidth and matrix peak, and a mark for its share of the limit."""
    axes = figure.subplots()
    names = [f"{bucket['name']}  ({bucket['num_steps']} steps)" for bucket in report["buckets"]]
    kinds = [
        ("of the memory bandwidth", _SKY, [bucket["bandwidth_share"] for bucket in report["buckets"]]),
        ("of the matrix peak", _ORANGE, [bucket["peak_share"] for bucket in report["buckets"]]),
    ]
    for place, (label, colour, shares) in enumerate(kinds):
        positions = [index + 0.19 - 0.38 * (1 - place) for index in range(len(names))]
        axes.barh(positions, [100 * (share or 0.0) for share in shares], height=0.36, color=colour, label=label)
    limits = [100 * (bucket["limit_share"] or 0.0) for bucket in report["buckets"]]
    axes.plot(limits, range(len(names)), "D", color="black", markersize=5, label="of the limit")
    axes.axvline(100, color=_GREY, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("share of what the machine can do (%)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=9)


def _draw_latency(figure: Figure, report: dict[str, Any]) -> None:
    """From p50 to p99 of each latency, on a logarithmic scale."""
    axes = figure.subplots()
    shown = [name for name in ("ttft", "itl", "tpot", "e2e") if report["latencies"][name] is not None]
    marks = {"p50": ("o", _BLUE), "p90": ("s", _ORANGE), "p99": ("D", _PINK)}
    values = [[max(1e-3, report["latencies"][name][column] * 1e3) for name in shown] for column in marks]
    axes.hlines(range(len(shown)), values[0], values[-1], color=_GREY, linewidth=2, zorder=1)
    for (label, (marker, colour)), places in zip(marks.items(), values, strict=True):
        axes.scatter(places, range(len(shown)), marker=marker, color=colour, s=45, zorder=2, label=label)
    axes.set_yticks(range(len(shown)), [{"e2e": "whole request"}.get(name, name.upper()) for name in shown])
    axes.set_ylim(len(shown) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.set_xlabel("milliseconds")
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=9)


def _draw_series(figure: Figure, report: dict[str, Any]) -> None:
    """Above: blocks of the KV pool over time. Below: numbers of requests."""
    blocks, requests = figure.subplots(2, 1, sharex=True)
    times, used, cached = (report["series"][name] for name in ("seconds", "used_blocks", "cached_blocks"))
    blocks.stackplot(times, used, cached, colors=[_BLUE, _SKY], labels=["used", "cached"], step="post")
    blocks.axhline(report["stats"]["num_kv_blocks"], color=_GREY, linestyle="--", linewidth=1, label="all")
    blocks.set_ylabel("KV blocks")
    requests.step(times, report["series"]["num_running"], where="post", color=_BLUE, label="running")
    requests.step(times, report["series"]["num_waiting"], where="post", color=_ORANGE, label="waiting")
    requests.set_ylabel("requests")
    requests.set_xlabel("seconds since the first arrival")
    requests.set_xlim(0, times[-1])
    for axes in (blocks, requests):
        axes.set_ylim(bottom=0)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=9)
