"""The pictures of bench_phases.py: one for each part, drawn from the plain data that the part returns.

    python scripts/bench/bench_phases_plots.py docs/results/cpu/study-amx.json docs/pictures/study

draws them from the result of an earlier run.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compiled_llm.command_line import FlagParser

Row = dict[str, Any]

# Okabe and Ito's colours, which colour-blind people can distinguish; the markers differ too.
COLOURS = {"engine": "#0072B2", "transformers": "#D55E00", "limit": "#555555", "waste": "#BBBBBB", "prefill": "#E69F00"}
MARKERS = {"engine": "o", "transformers": "s"}
SIDES = ("engine", "transformers")


def draw(part: str, record: Row, directory: Path) -> None:
    """Writes ``<part>.png``, from a whole result as ``bench_phases.py`` writes it."""
    subject = f"{Path(record['model']).name}, {record['dtype']}"
    figure_of(part, record["parts"][part], subject).savefig(directory / f"{part}.png")


def figure_of(part: str, result: Row, subject: str) -> Any:
    """The matplotlib figure of a part. ``subject``: what was measured, for the title."""
    from matplotlib.figure import Figure

    titles = {
        "phases": "Prefill against decode",
        "steps": "Each decode step of one generation",
        "batch": "Batch size, throughput and latency",
        "batching": f"Static and continuous batching, at most {result.get('seats')} requests at once",
        "intensity": "Arithmetic intensity and the machine's roofline",
        "memory": "Memory of the KV cache",
    }
    figure = Figure(figsize=(10, 4.2), dpi=150, layout="constrained")
    figure.suptitle(f"{titles[part]}: {subject}", fontsize=12, fontweight="bold")
    PLOTS[part](figure, result)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
    return figure


def _lines(axes: Any, rows: list[Row], x: str, y: str, label: str = "", **style: Any) -> None:
    """A line for each side, over a logarithmic x axis whose ticks are the values themselves."""
    values = sorted({row[x] for row in rows})
    for side in SIDES:
        points = [(row[x], row[y]) for row in rows if row["side"] == side]
        style |= {"color": COLOURS[side], "marker": MARKERS[side]}
        axes.plot(*zip(*points, strict=True), label=f"{side}{label}", **style)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_ticks(values, labels=[str(value) for value in values])
    axes.xaxis.set_ticks([], minor=True)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)


def _phases(figure: Any, result: Row) -> None:
    left, right = figure.subplots(1, 2)
    _lines(left, result["rows"], "prompt_len", "ttft_ms", ": first token (prefill)")
    _lines(left, result["rows"], "prompt_len", "token_ms", ": a decoded token", linestyle="--", markerfacecolor="white")
    left.set(xlabel="prompt, tokens", ylabel="milliseconds", yscale="log")
    _lines(right, result["rows"], "prompt_len", "prefill_share")
    ylabel = f"prefill's share of the time of a request\nwith {result['output_len']} tokens out"
    right.set(xlabel="prompt, tokens", ylabel=ylabel)
    right.set_ylim(0)


def _steps(figure: Any, result: Row) -> None:
    axes = figure.subplots()
    medians = {row["side"]: row["median_ms"] for row in result["rows"]}
    for side in SIDES:
        series, first = result["series"][side]["ms"], result["series"][side]["first_ever_ms"]
        contexts = range(result["prompt_len"] + 1, result["prompt_len"] + 1 + len(series))
        style = {"color": COLOURS[side], "linewidth": 1}
        axes.plot(
            contexts, series, marker=MARKERS[side], ms=2.5, label=f"{side}: median {medians[side]:.3g} ms", **style
        )
        count = min(len(first), len(series))
        axes.plot(contexts[:count], first[:count], linestyle=":", label=f"{side}: first steps of the process", **style)
    axes.set(xlabel="context of the step, tokens", ylabel="milliseconds a step", yscale="log")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1))


def _batch(figure: Any, result: Row) -> None:
    rows = result["rows"]
    left, middle, right = figure.subplots(1, 3)
    _lines(left, rows, "batch", "tokens_per_s")
    left.set(xlabel="batch size", ylabel="tokens/s, all requests together", title="throughput", yscale="log")
    _lines(middle, rows, "batch", "token_ms")
    middle.set(xlabel="batch size", ylabel="milliseconds a token", title="latency")
    middle.set_ylim(0)
    for side in SIDES:
        own = [row for row in rows if row["side"] == side]
        each, together = ([row[key] for row in own] for key in ("tokens_per_s_each", "tokens_per_s"))
        right.plot(each, together, color=COLOURS[side], marker=MARKERS[side])
        for row, x, y in zip(own, each, together, strict=True):
            right.annotate(str(row["batch"]), (x, y), (4, 4), textcoords="offset points", fontsize=7)
    right.set(xlabel="tokens/s of each request", ylabel="tokens/s, all together", title="both, at each batch size")
    right.grid(alpha=0.3)
    right.set_xlim(0)
    right.set_ylim(0)


def _batching(figure: Any, result: Row) -> None:
    panels = figure.subplots(1, len(result["rows"]), sharey=True)
    ours = max(row["seconds"] for row in result["rows"] if row["way"].startswith("engine"))
    for axes, row in zip(panels, result["rows"], strict=True):
        spans, side = result["timelines_s"][row["way"]], row["way"].split(",")[0]
        for kind, start, end in (("prefill", "start", "first"), (side, "first", "wanted"), ("waste", "wanted", "end")):
            widths, lefts = [span[end] - span[start] for span in spans], [span[start] for span in spans]
            axes.barh(range(len(spans)), widths, 0.8, lefts, color=COLOURS[kind])
        speed = f"{row['seconds']:.3g} s, {row['tokens_per_s']:.4g} tokens/s"
        axes.set_title(f"{row['way']}\n{speed}\n{row['useful_rows']:.0%} of row-steps useful", fontsize=9)
        axes.set_xlabel("seconds (a scale of its own)" if side == "transformers" else "seconds")
        axes.set_xlim(0, 1.03 * (row["seconds"] if side == "transformers" else ours))
    panels[0].invert_yaxis()
    panels[0].yaxis.get_major_locator().set_params(integer=True)
    panels[0].set_ylabel("request")
    handles = [panels[0].barh([0], [0], color=COLOURS[kind]) for kind in ("prefill", *SIDES, "waste")]
    labels = [
        "prompt, and waiting for it",
        *(f"needed tokens, {side}" for side in SIDES),
        "place held, no needed token",
    ]
    figure.legend(handles, labels, fontsize=8, ncols=4, loc="outside lower center")


def _intensity(figure: Any, result: Row) -> None:
    axes = figure.subplots()
    limits, ridge = result["limits"], result["ridge_flop_per_byte"]
    bandwidth, peak = limits["read_bytes_per_second"] / 1e9, limits["flops_per_second"] / 1e9
    intensities = [row["flop_per_byte"] for row in result["rows"]] + [ridge]
    low, high = min(intensities) / 2, max(intensities) * 2
    axes.plot([low, ridge, high], [low * bandwidth, peak, peak], color=COLOURS["limit"], linewidth=1.5)

    def note(
        text: str, place: tuple[float, float], offset: tuple[int, int], align: str = "left", size: int = 8
    ) -> None:
        axes.annotate(text, place, offset, textcoords="offset points", ha=align, fontsize=size)

    note(f"{peak:.4g} GFLOP/s: {limits['instruction']}", (high, peak), (-2, 4), "right")
    note(f"ridge: {ridge:.3g} FLOP/byte", (ridge, peak), (4, -14))
    middle = low**0.3 * ridge**0.7
    note(f"memory: {bandwidth:.3g} GB/s", (middle, middle * bandwidth), (-6, 4), "right")
    for side in SIDES:
        for phase, face in (("decode", COLOURS[side]), ("prefill", "white")):
            points = [row for row in result["rows"] if row["side"] == side and row["phase"] == phase]
            places = [(row["flop_per_byte"], row["gflop_per_s"]) for row in points]
            style = {"color": COLOURS[side], "marker": MARKERS[side], "linewidth": 0.8, "markerfacecolor": face}
            axes.plot(*zip(*places, strict=True), label=f"{side}: {phase}", **style)
            # Sizes of decode are written below the points, those of prefill above, so that they do not overlap.
            offset, align = ((4, -9), "left") if phase == "decode" else ((0, 6), "center")
            for row, place in zip(points, places, strict=True) if side == "engine" else []:
                note(str(row["size"]), place, offset, align, 7)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte, minimum of the step", ylabel="GFLOP/s")
    axes.set_ylim(min(row["gflop_per_s"] for row in result["rows"]) / 2, peak * 2)
    axes.set_xlim(low, high)
    axes.grid(alpha=0.3)
    title = "at the points: requests in decode, tokens in prefill"
    axes.legend(fontsize=8, title=title, title_fontsize=8, loc="lower right", framealpha=1)


def _memory(figure: Any, result: Row) -> None:
    axes = figure.subplots()
    rows, lengths = result["rows"], result["request_lens"]
    for number, row in enumerate(rows):
        counts = [row[f"fit_{length}"] for length in lengths]
        places = [index + (number - (len(rows) - 1) / 2) * 0.2 for index in range(len(lengths))]
        label = f"{row['kv_cache']}: {row['bytes_per_token'] / 1024:.4g} KiB a token"
        axes.bar_label(axes.bar(places, counts, 0.19, label=label), fontsize=7)
    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(0, 2 * max(row[f"fit_{length}"] for row in rows for length in lengths))  # room for the numbers
    axes.set_xticks(range(len(lengths)), labels=[str(length) for length in lengths])
    gib = result["kv_memory_bytes"] / 2**30
    axes.set(xlabel="tokens of a request, prompt and output", ylabel=f"requests at once in {gib:g} GiB")
    axes.legend(fontsize=8)


PLOTS: dict[str, Callable[[Any, Row], None]] = {
    "phases": _phases,
    "steps": _steps,
    "batch": _batch,
    "batching": _batching,
    "intensity": _intensity,
    "memory": _memory,
}


def main() -> None:
    parser = FlagParser(description="Draw the pictures of an earlier run of bench_phases.py.")
    parser.add_argument("result", type=Path, help="phases.json of an earlier run")
    parser.add_argument("directory", type=Path, help="where the pictures go")
    args = parser.parse_args()
    record = json.loads(args.result.read_text())
    args.directory.mkdir(parents=True, exist_ok=True)
    for part in record["parts"]:
        draw(part, record, args.directory)


if __name__ == "__main__":
    main()
