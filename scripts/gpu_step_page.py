"""The text of docs/gpu_step.md, from the lines that gpu_step_tables.py makes."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from compiled_llm.report.gpu_step.estimate import (
    BANDWIDTH_SHARE,
    GAP_SECONDS,
    L2_SECONDS,
    LATENCY_SECONDS,
    MATRIX_SHARE,
)

ROOT = Path(__file__).resolve().parents[1]
FOLDER, PAGE = ROOT / "docs" / "results" / "gpu-estimates", ROOT / "docs" / "gpu_step.md"
NOW, BEFORE = "now", "before"

MODELS = {"qwen3-0.6b": "Qwen3-0.6B", "llama-3.1-8b": "Llama-3.1-8B", "qwen3-30b-a3b": "Qwen3-30B-A3B"}
BUCKETS = {
    "decode_1": "decode, 1",
    "decode_8": "decode, 8",
    "decode_32": "decode, 32",
    "decode_256": "decode, 256",
    "tokens_2048": "chunk of 2,048",
}
KV_DTYPES = {"auto": "bf16", "int8": "int8", "fp8": "fp8"}
GPUS = {"h100": "H100", "h200": "H200"}
_DECODES = [bucket for bucket in BUCKETS if bucket.startswith("decode")]

Line = dict[str, Any]
Lines = Sequence[Line]
Read = Callable[[Lines], float | None]  # a value of lines, None where they lack it


def read_lines(path: Path) -> list[Line]:
    """None where there is no such file yet."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def find(lines: Lines, model: str, bucket: str, kv: str) -> Line | None:
    wanted = model, bucket, kv
    return next((one for one in lines if (one["model"], one["bucket"], one["kv_cache_dtype"]) == wanted), None)


def estimates(lines: Lines, model: str, bucket: str, kv: str, gpu: str) -> list[Any]:
    """By their number of keys, the fewest first."""
    line = find(lines, model, bucket, kv)
    return [] if line is None else [one for one in line["estimates"] if one["gpu"] == gpu]


def contexts_of(bucket: str) -> tuple[str, ...]:
    """A chunk's shortest context is itself."""
    return ("1k" if bucket in _DECODES else "2k", "8k", "32k")


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)) + "\n"


def pair(before: Any, now: Any) -> str:
    """Both, or one of them where they are the same or the other is not there."""
    if now is None or before is None or before == now:
        return str(now if now is not None else "")
    return f"{before} → {now}"


def page(now: Lines, before: Lines) -> str:
    parts = [
        _head(now, before),
        "## What was to be reached\n",
        _goals(now, before),
        "## Launches that begin earlier\n",
        'With `cuda_graphs="programmatic"` the launches of a layer of few rows may begin while the one before still'
        " runs, and ask for weights before they wait for it. What that saves is not known without a GPU, and in no"
        " estimate here. These goals of bandwidth that are not reached would be if the time between two launches, taken"
        f" as {GAP_SECONDS * 1e6:.1f} us, were this:\n",
        _gaps(now),
        "## Launches\n",
        "From a layer's attention to the next layer's, and of the whole step, with every kind of KV cache"
        " unless it says otherwise.\n",
        _launches(now, before),
        "## Steps\n",
        "Milliseconds, and the share of the data sheet's bandwidth; of a chunk, the share of the bf16 matrix rate."
        " A dash: weights and KV cache do not fit into the GPU's memory.\n",
    ]
    for model, title in MODELS.items():
        for gpu, gpu_title in GPUS.items():
            parts += [f"### {title}, {gpu_title}\n", _steps(now, before, model, gpu)]
    parts += [
        "## A token of context over quantised caches\n",
        "How much longer a layer's attention takes for a token more of context, from one context to the next, relative"
        " to a cache in bf16. By bytes it is 0.52.\n",
        _slopes(now, before),
        "## Attention over quantised caches\n",
        "A layer's attention, with the write to the cache, relative to its time over a cache in bf16 at the same"
        " context. By bytes it is 0.52.\n",
        _attention(now, before),
    ]
    return "\n".join(parts)


def _commits(lines: Lines) -> str:
    return ", ".join(dict.fromkeys(f"`{line['commit']}`" for line in lines)) or "none"


def _head(now: Lines, before: Lines) -> str:
    cases = [(MODELS[line["model"]], KV_DTYPES[line["kv_cache_dtype"]], line["spilled"]) for line in now]
    spilled = list(dict.fromkeys(f"{name} ({model}, {kv})" for model, kv, names in cases for name in names))
    return f"""# A GPU's step, estimated

**Estimates: nothing here ran on a GPU.** `python scripts/gpu_step_tables.py` writes this page. It generates the code of
each step as the engine does for an H100, compiles its Triton kernels for it (an H200 runs the same code), counts bytes,
operations and instructions, and estimates from them; [`results/gpu-estimates`](results/gpu-estimates) has the results.
`scripts/inspect_gpu_step.py` shows every launch of one such step, and with `--measured` the times of a GPU beside them.

Left of an arrow is how it was before launches were joined (commit {_commits(before)}: the last one before, with today's
inspection copied over it so that its kernels could be seen), right of it how it is now (commit {_commits(now)}). One
value: both are the same. Kernels that spill registers now: {", ".join(spilled) or "none"}.

A launch takes the longest of three times: its bytes at {BANDWIDTH_SHARE:.0%} of the bandwidth (less where too few are
in flight for a latency of {LATENCY_SECONDS * 1e6:.1f} us), its instructions at one a cycle and scheduler, its matrix
operations at {MATRIX_SHARE:.0%} of the rate. Where a last program joins what others computed, its instructions for that
and {L2_SECONDS * 1e6:.1f} us for each round trip come after it, and then {GAP_SECONDS * 1e6:.1f} us to the next launch.
So a step is about the least that good kernels take.

Each part of a kernel counts as often as it runs: the main loop, what is done once a task, and by the functions that its
instructions come from the new key (once a request), joining (in the last program of a request) and the sums of a norm.
No program can be faster than its own instructions at one a cycle and warp: that of the most counts. Slow ways of
divisions and roots, which ordinary numbers do not take, are not counted.
{_older(now, before)}
Not known, or not counted as it is:

- caches: what one launch wrote and the next one reads counts as memory;
- waiting: for the first bytes of a launch (the gap has some of it), for results of instructions, for shared memory;
- the tail of the last wave of programs, and programs of unequal lengths; the host; clocks that fall under load;
- what cuBLAS chooses: a product of its own counts as whole tiles of 64 rows or more at full rate;
- who runs what in the kernels of experts: all instructions outside of the main loop count for every program there;
- experts: each token chooses them at random and evenly, so as many of them are read as can be expected.

All requests of a decode have the same context. A chunk is one request's, the last 2,048 tokens of its context.
"""


def _older(now: Lines, before: Lines) -> str:
    """Which estimates are of before parts were counted."""
    sides = {"left of an arrow": before, "right of it": now}
    older = [side for side, lines in sides.items() if any(not line.get("counts_parts") for line in lines)]
    if not older:
        return ""
    return f"""
**Not yet so {" and ".join(older)}**: these estimates are older,
and count all instructions outside of the main loop for every task.
"""


def _launches(now: Lines, before: Lines) -> str:
    def shown(lines: Lines, model: str, bucket: str, field: str) -> str | None:
        found = [find(lines, model, bucket, kv) for kv in KV_DTYPES]
        values = {title: one[field] for title, one in zip(KV_DTYPES.values(), found, strict=True) if one}
        if len(set(values.values())) < 2:
            return str(*set(values.values())) or None
        return ", ".join(f"{title} {value}" for title, value in values.items())

    rows = [
        [
            model_title,
            title,
            *(
                pair(shown(before, model, bucket, field), shown(now, model, bucket, field))
                for field in ("launches_per_layer", "launches")
            ),
        ]
        for model, model_title in MODELS.items()
        for bucket, title in BUCKETS.items()
    ]
    return table(("model", "step", "launches a layer", "launches a step"), rows)


def _steps(now: Lines, before: Lines, model: str, gpu: str) -> str:
    rows = []
    for bucket, title in BUCKETS.items():
        share = "bandwidth_share" if bucket in _DECODES else "matrix_share"
        for place, keys in enumerate(contexts_of(bucket)):
            cells = [title, keys]
            for kv in KV_DTYPES:
                both = [(estimates(lines, model, bucket, kv, gpu) or [None] * 3)[place] for lines in (before, now)]
                cells.append(pair(*(one and _milliseconds(one) for one in both)))
                cells.append(pair(*(one and _percent(one, share) for one in both)))
            rows.append(cells)
    columns = [f"{title} {what}" for title in KV_DTYPES.values() for what in ("ms", "share")]
    return table(("step", "context", *columns), rows)


def _milliseconds(estimate: Line) -> str:
    ms = estimate["step_us"] / 1e3
    return (f"{ms:.3g}" if ms < 100 else f"{ms:.0f}") if estimate["fits"] else "-"


def _percent(estimate: Line, field: str) -> str:
    return f"{estimate[field]:.0%}" if estimate["fits"] else "-"


def to_bf16(lines: Lines, model: str, bucket: str, kv: str, gpu: str, place: int) -> float | None:
    """A layer's attention over a quantised cache, relative to one in bf16 at the same context."""
    own, bf16 = (estimates(lines, model, bucket, kind, gpu) for kind in (kv, "auto"))
    return own[place]["attention_us"] / bf16[place]["attention_us"] if own and bf16 else None


def _attention(now: Lines, before: Lines) -> str:
    rows = [
        [
            model_title,
            title,
            keys,
            *(
                pair(*(_digits(to_bf16(lines, model, bucket, kv, gpu, place)) for lines in (before, now)))
                for gpu in GPUS
                for kv in ("int8", "fp8")
            ),
        ]
        for model, model_title in MODELS.items()
        for bucket, title in BUCKETS.items()
        for place, keys in enumerate(contexts_of(bucket))
    ]
    columns = [f"{gpu} {kv}" for gpu in GPUS.values() for kv in ("int8", "fp8")]
    return table(("model", "step", "context", *columns), rows)


def token_to_bf16(lines: Lines, model: str, bucket: str, kv: str, gpu: str, place: int) -> float | None:
    """A token of context between this context and the next, over a quantised cache relative to one in bf16."""
    own, bf16 = (estimates(lines, model, bucket, kind, gpu) for kind in (kv, "auto"))
    if not own or not bf16:
        return None
    more = [one[place + 1]["attention_us"] - one[place]["attention_us"] for one in (own, bf16)]
    return more[0] / more[1]


def _slopes(now: Lines, before: Lines) -> str:
    rows = [
        [
            model_title,
            title,
            f"{contexts_of(bucket)[place]} to {contexts_of(bucket)[place + 1]}",
            *(
                pair(*(_digits(token_to_bf16(lines, model, bucket, kv, gpu, place)) for lines in (before, now)))
                for gpu in GPUS
                for kv in ("int8", "fp8")
            ),
        ]
        for model, model_title in MODELS.items()
        for bucket, title in BUCKETS.items()
        for place in (0, 1)
    ]
    columns = [f"{gpu} {kv}" for gpu in GPUS.values() for kv in ("int8", "fp8")]
    return table(("model", "step", "context", *columns), rows)


def _digits(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


def _goals(now: Lines, before: Lines) -> str:
    """The worst value of each goal's cases, and whether that is good enough."""
    rows = []
    for title, limit, at_most, read in _goal_list():
        values = [worst(lines, read, at_most) for lines in (before, now)]
        style = (lambda value: f"{value:.0%}") if not at_most else (lambda value: f"{value:.3g}")
        if values[1] is None:
            reached = "not estimated"
        else:
            reached = "yes" if (values[1] <= limit if at_most else values[1] >= limit) else "no"
        shown = [None if value is None else style(value) for value in values]
        asked = f"at {'most' if at_most else 'least'} {style(limit)}"
        rows.append([title, asked, pair(*shown), reached])
    return table(("the worst of", "asked", "estimated", "reached"), rows)


def worst(lines: Lines, read: list[Read], at_most: bool) -> float | None:
    values = [value for one in read if (value := one(lines)) is not None]
    return (max if at_most else min)(values) if values else None


SHARES = {"llama-3.1-8b": 0.85, "qwen3-0.6b": 0.6}  # of the bandwidth, that one request is to reach


def _gaps(now: Lines) -> str:
    """The time between launches that each goal of bandwidth needs that is not reached."""
    rows = []
    for model, wanted in SHARES.items():
        for place, context in enumerate(contexts_of("decode_1")):
            for gpu, gpu_title in GPUS.items():
                line, found = find(now, model, "decode_1", "auto"), estimates(now, model, "decode_1", "auto", gpu)
                if line is None or not found or found[place]["bandwidth_share"] >= wanted:
                    continue
                too_much = found[place]["step_us"] * (1 - found[place]["bandwidth_share"] / wanted)
                gap = GAP_SECONDS * 1e6 - too_much / line["launches"]
                rows.append(
                    [f"{MODELS[model]}, {gpu_title}, one request of {context}", f"{wanted:.0%}", f"{gap:.2f} us"]
                )
    return table(("step", "asked", "between launches"), rows) if rows else "None.\n"


def _goal_list() -> list[tuple[str, float, bool, list[Read]]]:
    """Title, limit, whether it is the most that may be, and the values of which the worst counts."""

    def launches(model: str, buckets: Sequence[str]) -> list[Read]:
        def read(bucket: str, kv: str) -> Read:
            return lambda lines: one["launches_per_layer"] if (one := find(lines, model, bucket, kv)) else None

        return [read(bucket, kv) for bucket in buckets for kv in KV_DTYPES]

    def share(model: str, gpu: str, place: int) -> Read:
        def read(lines: Lines) -> float | None:
            found = estimates(lines, model, "decode_1", "auto", gpu)
            return found[place]["bandwidth_share"] if found else None

        return read

    def attention(model: str, bucket: str, kv: str, gpu: str, place: int) -> Read:
        return lambda lines: to_bf16(lines, model, bucket, kv, gpu, place)

    def token(model: str, bucket: str, kv: str, gpu: str, place: int) -> Read:
        return lambda lines: token_to_bf16(lines, model, bucket, kv, gpu, place)

    goals: list[tuple[str, float, bool, list[Read]]] = [
        (f"{title}: launches a layer in decodes {of}", 7, True, launches(model, buckets))
        for model, title in MODELS.items()
        for of, buckets in (("of 1 to 32", _DECODES[:-1]), ("of 256", _DECODES[-1:]))
    ]
    for model, limit in SHARES.items():
        for place, context in enumerate(contexts_of("decode_1")):
            for gpu, gpu_title in GPUS.items():
                title = f"{MODELS[model]}, {gpu_title}, one request of {context}, bf16: bandwidth"
                goals.append((title, limit, False, [share(model, gpu, place)]))
    for model, title in MODELS.items():
        for place, span in enumerate(("1k to 8k", "8k to 32k")):
            for kv in ("int8", "fp8"):
                reads = [token(model, bucket, kv, gpu, place) for bucket in _DECODES for gpu in GPUS]
                goals.append((f"{title}, {span}: a token of context over {kv} to bf16", 0.58, True, reads))
    for model, title in MODELS.items():
        for place, context in enumerate(contexts_of("decode_1")):
            for kv in ("int8", "fp8"):
                reads = [attention(model, bucket, kv, gpu, place) for bucket in _DECODES for gpu in GPUS]
                goals.append((f"{title}, contexts of {context}: attention over {kv} to bf16", 0.58, True, reads))
    return goals
