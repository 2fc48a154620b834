"""The text of docs/gpu_step.md, from the lines that gpu_step_tables.py makes."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from compiled_llm.gpu_step.estimate import (
    BANDWIDTH_SHARE,
    COLD_SECONDS,
    GAP_SECONDS,
    L2_SECONDS,
    MATRIX_SHARE,
    START_SECONDS,
    STEP_SECONDS,
    TRIP_SECONDS,
)

ROOT = Path(__file__).resolve().parents[1]
FOLDER, PAGE = ROOT / "docs" / "results" / "gpu-estimates", ROOT / "docs" / "gpu_step.md"
NOW, MEASURED = "now", "measured"

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


def page(now: Lines, measured: Lines) -> str:
    parts = [
        _head(now),
        "## Beside a GPU\n",
        _measured(measured),
        "## Launches\n",
        "From a layer's attention to the next layer's, and of the whole step, with every kind of KV cache"
        " unless it says otherwise. With [adapters](lora.md) decodes of up to 32 have the same ones,"
        " larger ones of dense models one more a layer.\n",
        _launches(now),
        "## Steps\n",
        "Milliseconds, and the share of the data sheet's bandwidth; of a chunk, the share of the bf16 matrix rate."
        " A dash: weights and KV cache do not fit into the GPU's memory.\n",
    ]
    for model, title in MODELS.items():
        for gpu, gpu_title in GPUS.items():
            parts += [f"### {title}, {gpu_title}\n", _steps(now, model, gpu)]
    parts += [
        "## Attention over quantised caches\n",
        "A layer's attention, with the write to the cache, relative to its time over a cache in bf16 at the same"
        " context. By bytes it is 0.52.\n",
        _attention(now),
    ]
    return "\n".join(parts)


def _commits(lines: Lines) -> str:
    return ", ".join(dict.fromkeys(f"`{line['commit']}`" for line in lines)) or "none"


def _head(now: Lines) -> str:
    cases = [(MODELS[line["model"]], KV_DTYPES[line["kv_cache_dtype"]], line["spilled"]) for line in now]
    spilled = list(dict.fromkeys(f"{name} ({model}, {kv})" for model, kv, names in cases for name in names))
    return f"""# A GPU's step, estimated

What a step should take, from the code that a GPU would run, on a machine without one. `scripts/gpu_step_tables.py`
writes this page. It generates the code of each step as the engine does for an H100, compiles its Triton kernels for it
(an H200 runs the same code), counts bytes, operations and instructions, and estimates from them;
[`results/gpu-estimates`](results/gpu-estimates) has the results, of commit {_commits(now)}.
`compiled-llm report gpu-step` shows every launch of one such step; `--measured` adds the times of a GPU.
Kernels that spill registers: {", ".join(spilled) or "none"}.

A launch takes {START_SECONDS * 1e6:.1f} us to start and to end, and {COLD_SECONDS * 1e9:.1f} ns for each instruction of
its code, which no cache has yet. Between these it takes the longest of four times: its bytes, at {BANDWIDTH_SHARE:.0%}
of the bandwidth; its instructions at one a cycle and scheduler; its matrix operations at {MATRIX_SHARE:.0%} of the
rate; and the trips through the main loop of the program that has most, {TRIP_SECONDS * 1e9:.0f} ns each, and
{STEP_SECONDS * 1e9:.0f} ns for each matrix instruction that waits for the one before. Where a last program joins what
others computed, its instructions for that and {L2_SECONDS * 1e6:.1f} us for each round trip come after it, and
{GAP_SECONDS * 1e6:.1f} us later the next launch begins. These constants are fitted to launches on an H200.

Each part of a kernel counts as often as it runs: the main loop, what is done once a task, and by the functions that its
instructions come from the new key (once a request), joining (in the last program of a request) and the sums of a norm.
Not counted are caches (what one launch wrote and the next one reads counts as memory), conflicts of shared memory,
programs of unequal lengths, the host, and clocks that fall under load. A product of cuBLAS counts as whole tiles of 64
rows or more; each token chooses its experts at random and evenly. All requests of a decode have the same context; a
chunk is one request's, the last 2,048 tokens of its context.
"""


def _measured(lines: Lines) -> str:
    """Steps, then the launches of each, as they ran and as they are estimated."""
    if not lines:
        return "Nothing was measured yet: `scripts/gpu_step_measured.py`.\n"
    steps = [
        [
            f"{MODELS[line['model']]}, {BUCKETS[line['bucket']]}{', exact' if line['exact'] else ''}",
            f"{line['layers']}",
            f"{line['step_us'] / 1e3:.2f}",
            f"{line['estimated_step_us'] / 1e3:.2f}",
            f"{line['estimated_step_us'] / line['step_us']:.2f}",
            f"{line['median_error']:.0%}",
        ]
        for line in lines
    ]
    head = ("step", "layers", "measured ms", "estimated ms", "ratio", "median error of its launches")
    parts = [
        f"Steps that ran on one {lines[0]['gpu']} (torch {lines[0]['torch']}) at 1k keys a request, engine of commit"
        f" {_commits(lines)}, by `scripts/gpu_step_measured.py`. The estimate knows none of these steps; that engine"
        " cut 1,034 keys into splits of 1,024 and of 10, which it does no more.\n",
        table(head, steps),
        "The launches of a layer, microseconds:\n",
    ]
    rows = [
        [
            f"{MODELS[line['model']]}, {BUCKETS[line['bucket']]}{', exact' if line['exact'] else ''}",
            f"`{row['name']}`",
            f"{row['megabytes']:.1f}",
            f"{row['us']:.1f}",
            f"{row['estimate_us']:.1f}",
        ]
        for line in lines
        for row in line["rows"]
        if row["in_layer"]
    ]
    return "\n".join([*parts, table(("step", "launch", "MB", "measured", "estimated"), rows)])


def _launches(now: Lines) -> str:
    def shown(lines: Lines, model: str, bucket: str, field: str) -> str | None:
        found = [find(lines, model, bucket, kv) for kv in KV_DTYPES]
        values = {title: one[field] for title, one in zip(KV_DTYPES.values(), found, strict=True) if one}
        if len(set(values.values())) < 2:
            return str(*set(values.values())) or None
        return ", ".join(f"{title} {value}" for title, value in values.items())

    rows = [
        [model_title, title, *(shown(now, model, bucket, field) or "" for field in ("launches_per_layer", "launches"))]
        for model, model_title in MODELS.items()
        for bucket, title in BUCKETS.items()
    ]
    return table(("model", "step", "launches a layer", "launches a step"), rows)


def _steps(now: Lines, model: str, gpu: str) -> str:
    rows = []
    for bucket, title in BUCKETS.items():
        share = "bandwidth_share" if bucket in _DECODES else "matrix_share"
        for place, keys in enumerate(contexts_of(bucket)):
            cells = [title, keys]
            for kv in KV_DTYPES:
                one = (estimates(now, model, bucket, kv, gpu) or [None] * 3)[place]
                cells += ["", ""] if one is None else [_milliseconds(one), _percent(one, share)]
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


def _attention(now: Lines) -> str:
    rows = [
        [
            model_title,
            title,
            keys,
            *(_digits(to_bf16(now, model, bucket, kv, gpu, place)) for gpu in GPUS for kv in ("int8", "fp8")),
        ]
        for model, model_title in MODELS.items()
        for bucket, title in BUCKETS.items()
        for place, keys in enumerate(contexts_of(bucket))
    ]
    columns = [f"{gpu} {kv}" for gpu in GPUS.values() for kv in ("int8", "fp8")]
    return table(("model", "step", "context", *columns), rows)


def _digits(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"
