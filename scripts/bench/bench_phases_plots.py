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
    figure_of(part, record["parts"][part], f"{Path(record['model']).name}, {record['dtype']}").savefig(
        directory / f"{part}.png"
    )


def figure_of(part: str, result: Row, subject: str) -> Any:
    """The matplotlib figure of a part. ``subject``: what was measured, for the title."""
    from matplotlib.figure import Figure

    titles = {
        "phases": "Prefill against decode",
        "steps": "Each decode step of one generation",
        "batch": "Batch size, throughput and latency",
        "batching": f"Static and continuous batching on the same {result.get('seats')} seats",
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


def _lines(axes: Any, rows: list[Row], x: str, y: str, **style: Any) -> None:
    """A line for each side."""
    for side in SIDES:
        points = [(row[x], row[y]) for row in rows if row["side"] == side]
        axes.plot(*zip(*points, strict=True), color=COLOURS[side], marker=MARKERS[side], label=side, **style)


def _log_x(axes: Any, values: list[int]) -> None:
    """A logarithmic x axis whose ticks are the values themselves."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_ticks(values, labels=[str(value) for value in values])
    axes.xaxis.set_ticks([], minor=True)


def _phases(figure: Any, result: Row) -> None:
    left, right = figure.subplots(1, 2)
    rows = result["rows"]
    lengths = sorted({row["prompt_len"] for row in rows})
    _lines(left, rows, "prompt_len", "ttft_ms")
    _lines(left, rows, "prompt_len", "token_ms", linestyle="--", markerfacecolor="white")
    _log_x(left, lengths)
    left.set_yscale("log")
    left.set(xlabel="prompt, tokens", ylabel="milliseconds")
    left.grid(alpha=0.3)
    handles = left.get_legend_handles_labels()[0]
    names = [f"{side}: {what}" for what in ("first token (prefill)", "a decoded token") for side in SIDES]
    left.legend(handles, names, fontsize=8)
    for offset, side in zip((-0.2, 0.2), SIDES, strict=True):
        own = [row for row in rows if row["side"] == side]
        seconds = [(row["ttft_ms"] / 1e3, row["ttft_ms"] / 1e3 * (1 / row["prefill_share"] - 1)) for row in own]
        places = [index + offset for index in range(len(own))]
        right.bar(places, [a for a, _ in seconds], 0.36, color=COLOURS["prefill"], hatch="//", edgecolor="white")
        right.bar(
            places, [b for _, b in seconds], 0.36, bottom=[a for a, _ in seconds], color=COLOURS[side], label=side
        )
        for place, row, (a, b) in zip(places, own, seconds, strict=True):
            right.text(place, a + b, f"{row['prefill_share']:.0%}", ha="center", va="bottom", fontsize=8)
    right.bar([0], [0], color=COLOURS["prefill"], hatch="//", edgecolor="white", label="prefill (its share on top)")
    right.set_xticks(range(len(lengths)), labels=[str(length) for length in lengths])
    right.set(xlabel="prompt, tokens", ylabel=f"seconds for a request\nwith {result['output_len']} tokens out")
    right.legend(fontsize=8)
    right.margins(y=0.2)


def _steps(figure: Any, result: Row) -> None:
    axes = figure.subplots()
    medians = {row["side"]: row["median_ms"] for row in result["rows"]}
    for side in SIDES:
        series = result["series"][side]
        contexts = [result["prompt_len"] + 1 + step for step in range(len(series["ms"]))]
        label = f"{side}: median {medians[side]:.3g} ms"
        axes.plot(contexts, series["ms"], color=COLOURS[side], linewidth=1.2, marker=MARKERS[side], ms=2.5, label=label)
        first = series["first_ever_ms"]
        axes.plot(contexts[: len(first)], first[: len(contexts)], color=COLOURS[side], linestyle=":", linewidth=1)
    axes.plot([], [], color="black", linestyle=":", linewidth=1, label="the first steps of a process")
    axes.set_yscale("log")
    axes.set(xlabel="context of the step, tokens", ylabel="milliseconds a step")
    axes.grid(alpha=0.3, which="both")
    axes.legend(fontsize=8, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1))


def _batch(figure: Any, result: Row) -> None:
    rows = result["rows"]
    sizes = sorted({row["batch"] for row in rows})
    left, middle, right = figure.subplots(1, 3)
    _lines(left, rows, "batch", "tokens_per_s")
    for side in SIDES:
        first = next(row for row in rows if row["side"] == side)
        ideal = [first["tokens_per_s"] * size / first["batch"] for size in sizes]
        left.plot(sizes, ideal, color=COLOURS[side], linestyle=":", linewidth=1)
    left.plot([], [], color="black", linestyle=":", linewidth=1, label="ideal: larger batches for free")
    left.set_yscale("log")
    left.set(xlabel="batch size", ylabel="tokens/s, all requests together", title="throughput")
    _lines(middle, rows, "batch", "token_ms")
    middle.set_ylim(0)
    middle.set(xlabel="batch size", ylabel="milliseconds a token", title="latency")
    for axes in (left, middle):
        _log_x(axes, sizes)
        axes.grid(alpha=0.3)
    left.legend(fontsize=8)
    _lines(right, rows, "tokens_per_s_each", "tokens_per_s")
    for row in rows:
        place = (row["tokens_per_s_each"], row["tokens_per_s"])
        right.annotate(str(row["batch"]), place, (4, 4), textcoords="offset points", fontsize=7)
    right.set(xlabel="tokens/s of each request", ylabel="tokens/s, all together", title="the trade, at batch sizes")
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
        axes.axvline(row["seconds"], color="black", linewidth=0.8, linestyle="--")
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
    axes.plot([ridge, ridge], [0, peak], color=COLOURS["limit"], linestyle=":", linewidth=1)
    axes.annotate(
        f"{peak:.4g} GFLOP/s: {limits['instruction']}",
        (high, peak),
        (-2, 4),
        textcoords="offset points",
        ha="right",
        fontsize=8,
    )
    axes.annotate(f"ridge: {ridge:.3g} FLOP/byte", (ridge, peak), (4, -14), textcoords="offset points", fontsize=8)
    middle = low**0.3 * ridge**0.7
    text = f"memory: {bandwidth:.3g} GB/s"
    axes.annotate(text, (middle, middle * bandwidth), (-6, 4), textcoords="offset points", ha="right", fontsize=8)
    for side in SIDES:
        for phase, filled in (("decode", True), ("prefill", False)):
            points = [row for row in result["rows"] if row["side"] == side and row["phase"] == phase]
            style = {"color": COLOURS[side], "marker": MARKERS[side], "linewidth": 0.8}
            axes.plot(
                [row["flop_per_byte"] for row in points],
                [row["gflop_per_s"] for row in points],
                label=f"{side}: {phase}",
                markerfacecolor=COLOURS[side] if filled else "white",
                **style,
            )
            # Sizes of decode are written below the points, those of prefill above, so that they do not overlap.
            offset, align = ((4, -9), "left") if phase == "decode" else ((0, 6), "center")
            for row in points if side == "engine" else []:
                text, place = str(row["size"]), (row["flop_per_byte"], row["gflop_per_s"])
                axes.annotate(text, place, offset, textcoords="offset points", fontsize=7, ha=align)
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte, minimum of the step", ylabel="GFLOP/s")
    axes.set_ylim(min(row["gflop_per_s"] for row in result["rows"]) / 2, peak * 2)
    axes.set_xlim(low, high)
    axes.grid(alpha=0.3)
    title = "at the points: requests in decode, tokens in prefill"
    axes.legend(fontsize=8, title=title, title_fontsize=8, loc="lower right", framealpha=1)


def _memory(figure: Any, result: Row) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(1, 2))
    rows, lengths = result["rows"], result["request_lens"]
    colours = ["#0072B2", "#56B4E9", "#009E73", "#D55E00"]
    names = [row["kv_cache"] for row in rows]
    bars = left.bar(names, [row["bytes_per_token"] / 1024 for row in rows], color=colours)
    left.bar_label(bars, fmt="%.4g", fontsize=8)
    left.set(ylabel="KiB a token, all layers")
    left.tick_params(axis="x", labelrotation=20)
    for number, row in enumerate(rows):
        places = [index + (number - 1.5) * 0.2 for index in range(len(lengths))]
        counts = [row[f"fit_{length}"] for length in lengths]
        bars = right.bar(places, counts, 0.19, color=colours[number])
        right.bar_label(bars, fontsize=6)
    right.set_yscale("symlog", linthresh=1)
    right.set_ylim(0, 2 * max(row[f"fit_{length}"] for row in rows for length in lengths))  # room for the numbers
    right.set_xticks(range(len(lengths)), labels=[str(length) for length in lengths])
    gib = result["kv_memory_bytes"] / 2**30
    right.set(xlabel="tokens of a request, prompt and output", ylabel=f"requests at once in {gib:g} GiB")


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
