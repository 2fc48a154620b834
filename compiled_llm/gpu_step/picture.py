"""A picture of a layer's launches and what bounds each. Importing this file needs matplotlib."""

from pathlib import Path

from matplotlib.figure import Figure

from compiled_llm.gpu_step.estimate import GAP_SECONDS
from compiled_llm.gpu_step.inspection import Inspection
from compiled_llm.gpu_step.measured import Measured

# Okabe and Ito's colours, which colour-blind people can distinguish.
_LIMITS = {"memory": "#0072B2", "issue": "#E69F00", "matrix": "#009E73", "chain": "#56B4E9"}
_START, _JOIN, _GAP, _MEASURED = "#AAAAAA", "#CC79A7", "#DDDDDD", "black"


def draw(inspection: Inspection, path: Path, measured: Measured | None = None) -> None:
    """Write a picture with a row for each launch from the last layer's attention to the next, in microseconds.

    A row has the time to start, then a bar for each limit, one below the other; behind the longest of them the time of
    joining and the gap.
    With ``measured`` a line shows how long the launch took on a GPU.

    Args:
        path: ends in .png, .svg or .pdf.
    """
    span = inspection.spans[-1]
    rows = inspection.rows[span]
    figure = Figure(figsize=(10, 1.6 + 0.55 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for place, row in enumerate(rows):
        start = row.estimate.start * 1e6
        axes.barh(place, start, 0.8, color=_START, label=None if place else "start and end")
        for n, (name, colour) in enumerate(_LIMITS.items()):
            us = getattr(row.estimate, name) * 1e6
            axes.barh(place + 0.2 * (n - 1.5), us, 0.19, start, color=colour, label=None if place else name)
        longest = (row.estimate.seconds - row.estimate.join) * 1e6
        joining, gap = row.estimate.join * 1e6, GAP_SECONDS * 1e6
        axes.barh(place, joining, 0.8, longest, color=_JOIN, label=None if place else "joining")
        axes.barh(place, gap, 0.8, longest + joining, color=_GAP, label=None if place else "gap to the next")
        us_measured = None if measured is None else measured.us[span.start + place]
        if us_measured is not None:
            axes.plot([us_measured] * 2, [place - 0.42, place + 0.42], color=_MEASURED, label="_")
    if measured is not None:
        axes.plot([], [], color=_MEASURED, label=f"measured on {measured.gpu}")
    axes.set_yticks(range(len(rows)), [row.name[:60] for row in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("us (estimated; a launch takes its longest bar, then what is behind it)")
    axes.legend(frameon=False, fontsize=8)
    axes.set_title(title(inspection), fontsize=9)
    figure.savefig(path, dpi=130)


def title(inspection: Inspection) -> str:
    """What step it is, how long all of it should take, and how much of that are such layers."""
    layer = inspection.seconds_of(inspection.rows[inspection.spans[-1]])
    share = layer * inspection.num_layers / inspection.seconds()
    return (
        f"{inspection.gpu.name}, {inspection.step.bucket.name}, {inspection.contexts.num_keys} keys a request: "
        f"{inspection.seconds() * 1e3:.3f} ms estimated, {inspection.bandwidth_share:.0%} of the bandwidth\n"
        f"a layer: {inspection.launches_per_layer[-1]} launches, {layer * 1e6:.1f} us; "
        f"{inspection.num_layers} such layers are {share:.0%} of the step"
    )
