"""Show what a GPU would run in a step, on a machine without one: launches, their code, and how long they should take.

    python scripts/inspect_gpu_step.py --shape qwen3-0.6b --gpu h100 --bucket decode_8 --max-model-len 8192
    python scripts/inspect_gpu_step.py --model DIR --gpu h200 --bucket tokens_2048 --context 8192 --kv-cache-dtype int8
    python scripts/inspect_gpu_step.py --shape qwen3-8b --bucket decode_32 --measured kernels.json --picture step.png
    python scripts/inspect_gpu_step.py --shape qwen3-0.6b --gpu h100 --bucket decode_1 --cuda-graphs programmatic

The step is compiled as the engine compiles it, for tensors without data, so a model of any size takes little memory.
Every Triton kernel is compiled for the GPU's architecture. Times are estimates (gpu_step/estimate.py says how).
``--measured`` sets beside them what ``bench_kernels.py --json`` measured of the same step on a GPU.
"""

import argparse
import dataclasses
import importlib.util
import json
import re
import warnings
from pathlib import Path
from typing import Any

import bench.own_checkout
from bench.tables import add_json_flag, check_target, text_table
from bench.workloads import SHAPES, engine_parser

from compiled_llm.api.command_line import engine_config, errors_end
from compiled_llm.api.config import EngineConfig, EngineLimits
from compiled_llm.gpu_step.estimate import GAP_SECONDS
from compiled_llm.gpu_step.fake_step import generate_step, pretend
from compiled_llm.gpu_step.gpus import GPUS
from compiled_llm.gpu_step.inspection import Inspection, Row, compile_step, first_layers, inspect
from compiled_llm.gpu_step.measured import Measured, match, read_measured
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.config_file import parse_config, read_config
from compiled_llm.scheduling.bucket import buckets_of
from compiled_llm.system.gpu_packages import check_triton
from compiled_llm.worker.runner import STEP_DEFAULTS


def parse_arguments() -> argparse.Namespace:
    parser = engine_parser(__doc__)
    parser.add_argument("--gpu", choices=GPUS, default="h100")
    parser.add_argument("--bucket", default="decode_8", metavar="NAME", help="decode_<size> or tokens_<size>")
    parser.add_argument("--context", type=int, default=1024, metavar="INT", help="keys of each request")
    parser.add_argument("--layers", type=int, default=4, metavar="INT", help="layers to generate; others count alike")
    parser.add_argument("--measured", type=Path, metavar="FILE", help="of bench_kernels.py --json, of the same step")
    parser.add_argument("--picture", type=Path, metavar="FILE.png", help="draw a layer; needs matplotlib")
    add_json_flag(parser)
    return parser.parse_checked(check_files, context=1, layers=2)


def check_files(args: argparse.Namespace) -> None:
    """``ValueError`` for what could not be compiled, read or written in the end."""
    check_triton("inspect_gpu_step.py")
    check_target("--json", args.json)
    check_target("--picture", args.picture)
    if args.picture and args.picture.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--picture must end in .png, .svg or .pdf, given {str(args.picture)!r}")
    if args.picture and importlib.util.find_spec("matplotlib") is None:
        raise ValueError("--picture needs matplotlib: pip install matplotlib, or compiled-llm[plot]")
    if args.measured:
        args.measured = read_measured(args.measured, measured_step(args))


def measured_step(args: argparse.Namespace) -> dict[str, Any]:
    """The same step in the words of bench_kernels.py, which measures decodes."""
    match = re.fullmatch(r"decode_([1-9]\d*)", args.bucket)
    if match is None:
        raise ValueError(f"--measured: bench_kernels.py measures decodes, so --bucket must be one, given {args.bucket}")
    return {
        "shape": str(args.model or args.shape),
        "batch_size": int(match[1]),
        "context": args.context,
        "dtype": dtype_of(args, read_model(args)),
        "kv_cache_dtype": args.kv_cache_dtype,
    }


def dtype_of(args: argparse.Namespace, model: ModelConfig) -> str:
    """Of weights and activations."""
    return model.dtype if args.dtype == "auto" else args.dtype


def read_model(args: argparse.Namespace) -> ModelConfig:
    """The checkpoint's or the shape's."""
    if args.model is not None:
        return read_config(Path(args.model), args.model_impl, args.dtype)
    return parse_config(SHAPES[args.shape])


def with_bucket(engine: EngineConfig, model: ModelConfig, name: str) -> EngineConfig:
    """``engine`` on a GPU, and with the bucket ``name`` among its own."""
    match = re.fullmatch(r"(decode|tokens)_([1-9]\d*)", name)
    if match is None:
        raise ValueError(f"--bucket must be decode_<size> or tokens_<size>, given {name!r}")
    engine = dataclasses.replace(engine, device="cuda", model=None)
    limits = EngineLimits.resolve(engine, model.max_position_embeddings, STEP_DEFAULTS["cuda"])
    if name in {bucket.name for bucket in buckets_of(limits)}:
        return engine
    field = {"decode": "bucket_sizes", "tokens": "token_bucket_sizes"}[match[1]]
    sizes = tuple(sorted({*(getattr(engine, field) or ()), int(match[2])}))
    return dataclasses.replace(engine, **{field: sizes})


def printed(inspection: Inspection, measured: Measured | None = None) -> str:
    """Tables of a layer's launches and of those around the layers, and what they make together."""
    first, last = inspection.spans[0], inspection.spans[-1]
    parts = {
        "before the first layer's attention": slice(0, first.start),
        f"a layer, from its attention to the next: {last.stop - last.start} launches": last,
        "from the last layer's attention on": slice(last.stop, len(inspection.rows)),
    }
    lines = []
    for title, part in parts.items():
        rows = [_cells(inspection.rows[place], measured, place) for place in range(part.start, part.stop)]
        lines.append(f"{title}\n{text_table(rows)}\n")
    lines.append(
        f"{inspection.gpu.name}, {inspection.step.bucket.name}, {inspection.step.dtype}, "
        f"{inspection.contexts.num_keys} keys a request: "
        f"{inspection.num_launches} launches in {inspection.num_layers} layers, estimated "
        f"{inspection.seconds() * 1e3:.3f} ms ({GAP_SECONDS * 1e6:.1f} us between launches), "
        f"{inspection.bandwidth_share:.0%} of the bandwidth\n"
        f"launches from layer to layer: {' '.join(map(str, inspection.launches_per_layer))}\n"
        f"launches that may start while the one before still runs, which the estimate leaves out: "
        f"{inspection.num_programmatic}\n"
        f"inputs without a static address: {len(inspection.dynamic_inputs)}; reasons to skip the CUDA graph: "
        f"{'; '.join(inspection.skip_reasons) or 'none'}"
    )
    return "\n".join(lines) + ("" if measured is None else _printed_measured(measured, inspection))


def _printed_measured(measured: Measured, inspection: Inspection) -> str:
    """All of the step as it was measured, and what stands in no row."""
    busy, gaps = measured.busy_us / 1e3, measured.all_gaps_us / 1e3
    ratio = (busy + gaps) / (inspection.seconds() * 1e3)
    lines = [
        f"\nmeasured on {measured.gpu}: {busy:.3f} ms in launches and {gaps:.3f} ms between them, {ratio:.2f} of the "
        f"estimate; launches that are expected and were not found: {', '.join(measured.not_run) or 'none'}"
    ]
    if measured.unmatched:
        rows = [{"launch": one.name[:70], "launches": one.launches, "us of all": one.us} for one in measured.unmatched]
        lines.append(f"measured and not expected\n{text_table(rows)}")
    return "\n".join(lines)


def _cells(row: Row, measured: Measured | None, place: int) -> dict[str, Any]:
    values = row.as_json()
    flight = f"{values['in_flight'] / 1024:.1f} of {values['wanted'] / 1024:.1f}" if "in_flight" in values else ""
    loop = values.get("loop") or {}
    return {
        "launch": row.name[:48],
        "kind": values["kind"],
        "read KB": values["read"] / 1024,
        "written KB": values["written"] / 1024,
        "MFLOP": values["flops"] / 1e6,
        "us": values["us"],
        "bound by": values["bound_by"],
        **({} if measured is None else _measured_cells(measured, place, values["us"])),
        "programs": values.get("programs"),
        "an SM": values.get("programs_per_sm"),
        "registers": values.get("registers"),
        "shared": values.get("shared"),
        "spilled": values.get("spilled"),
        "load B": values.get("load_bytes"),
        "KB in flight": flight,
        "code": values.get("instructions"),
        "loop: " + "/".join(kind[:3] for kind in _CLASSES): "/".join(str(loop[kind]) for kind in _CLASSES if loop),
    }


def _measured_cells(measured: Measured, place: int, estimated: float) -> dict[str, Any]:
    us = measured.us[place]
    ratio = us / estimated if us is not None and estimated else None
    return {"measured us": us, "gap us": measured.gap_us[place], "/estimate": ratio}


_CLASSES = ("memory", "integer", "float", "tensor", "conversion", "exchange", "control")


def main() -> None:
    args = parse_arguments()
    with errors_end("inspect_gpu_step.py"):
        gpu, model = GPUS[args.gpu], read_model(args)
        engine = with_bucket(engine_config(args), model, args.bucket)
        pretend(gpu)
        made = compile_step(generate_step(engine, first_layers(model, args.layers), args.bucket), gpu)
        inspection = inspect(made, model.num_layers, args.context)
    measured = match(inspection, args.measured) if args.measured else None
    print(printed(inspection, measured))
    if args.json is not None:
        besides = {} if measured is None else {"measured": measured.as_json()}
        args.json.write_text(json.dumps(inspection.as_json() | besides, indent=1) + "\n")
    if args.picture is not None:
        from compiled_llm.gpu_step.picture import draw

        draw(inspection, args.picture, measured)


if __name__ == "__main__":
    for message in ("Accessing the data pointer of FakeTensor", "dynamo_pgo force disabled"):
        warnings.filterwarnings("ignore", message=message)
    main()
