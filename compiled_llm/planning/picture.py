"""Attainment over rate, burstiness and targets, drawn. Needs matplotlib."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9")  # Okabe and Ito's
_AXES = {
    "rate": "rate, times that of the trace",
    "cv": "CV of intervals between arrivals",
    "slo_scale": "targets, times those given",
}


def draw(path: Path, results: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]], title: str) -> None:
    """``results``: label -> the curves of ``results.curves``."""
    figure = Figure(figsize=(10, 3.4), layout="constrained")
    figure.suptitle(title, fontsize=10)
    for axes, (name, label) in zip(figure.subplots(1, 3, sharey=True), _AXES.items(), strict=True):
        for (of, curves), colour in zip(results.items(), _COLOURS, strict=False):
            xs, ys = zip(*curves[name], strict=True) if curves[name] else ((), ())
            axes.plot(xs, [100 * y for y in ys], "-o", markersize=4, color=colour, label=of)
        axes.set_xlabel(label)
        axes.axhline(99, linestyle=":", color="#999999")
        axes.set_ylim(0, 102)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].set_ylabel("requests within the targets, %")
    if len(results) > 1:
        figure.axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)
