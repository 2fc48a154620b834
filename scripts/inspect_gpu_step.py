"""Show what a GPU would run in a step, on a machine without one: launches, their code, and how long they should take.

    python scripts/inspect_gpu_step.py --shape qwen3-0.6b --gpu h100 --bucket decode_8 --max-model-len 8192
    python scripts/inspect_gpu_step.py --model DIR --gpu h200 --bucket tokens_2048 --context 8192 --kv-cache-dtype int8

The step is compiled as the engine compiles it, for tensors without data, so a model of any size takes little memory.
Every Triton kernel is compiled for the GPU's architecture. Times are estimates (report/gpu_step/estimate.py says how).
"""

import argparse
import dataclasses
import json
import re
import warnings
from pathlib import Path
from typing import Any

from bench.tables import add_json_flag, check_target, text_table
from bench.workloads import SHAPES, engine_parser

from compiled_llm.command_line import engine_config, errors_end
from compiled_llm.config import EngineConfig, EngineLimits
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.config_file import parse_config, read_config
from compiled_llm.report.gpu_step.estimate import GAP_SECONDS
from compiled_llm.report.gpu_step.fake_step import generate_step, pretend
from compiled_llm.report.gpu_step.gpus import GPUS
from compiled_llm.report.gpu_step.inspection import Inspection, Row, first_layers, inspect
from compiled_llm.scheduling.bucket import buckets_of
from compiled_llm.worker.runner import STEP_DEFAULTS


def parse_arguments() -> argparse.Namespace:
    parser = engine_parser(__doc__)
    parser.add_argument("--gpu", choices=GPUS, default="h100")
    parser.add_argument("--bucket", default="decode_8", metavar="NAME", help="decode_<size> or tokens_<size>")
    parser.add_argument("--context", type=int, default=1024, metavar="INT", help="keys of each request")
    parser.add_argument("--layers", type=int, default=4, metavar="INT", help="layers to generate; others count alike")
    add_json_flag(parser)
    return parser.parse_checked(lambda args: check_target("--json", args.json), context=1, layers=2)


def read_model(args: argparse.Namespace) -> ModelConfig:
    """The checkpoint's, or a shape's in bfloat16."""
    if args.model is not None:
        return read_config(Path(args.model), args.model_impl, args.dtype)
    return parse_config({"dtype": "bfloat16", **SHAPES[args.shape]})


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


def printed(inspection: Inspection) -> str:
    """Tables of a layer's launches and of those around the layers, and what they make together."""
    first, last = inspection.spans[0], inspection.spans[-1]
    parts = {
        "before the first layer's attention": inspection.rows[: first.start],
        f"a layer, from its attention to the next: {last.stop - last.start} launches": inspection.rows[last],
        "from the last layer's attention on": inspection.rows[last.stop :],
    }
    lines = [f"{title}\n{text_table(list(map(_cells, rows)))}\n" for title, rows in parts.items()]
    share = inspection.num_bytes() / inspection.seconds() / inspection.gpu.bandwidth
    lines.append(
        f"{inspection.gpu.name}, {inspection.step.bucket.name}, {inspection.contexts.num_keys} keys a request: "
        f"{inspection.num_launches()} launches in {inspection.num_layers} layers, estimated "
        f"{inspection.seconds() * 1e3:.3f} ms ({GAP_SECONDS * 1e6:.1f} us between launches), {share:.0%} of the "
        f"bandwidth\nlaunches from layer to layer: {' '.join(map(str, inspection.launches_per_layer))}\n"
        f"inputs without a static address: {len(inspection.dynamic_inputs)}; reasons to skip the CUDA graph: "
        f"{'; '.join(inspection.skip_reasons) or 'none'}"
    )
    return "\n".join(lines)


def _cells(row: Row) -> dict[str, Any]:
    values = row.as_json()
    flight = f"{values['in_flight'] / 1024:.1f} of {values['wanted'] / 1024:.1f}" if "in_flight" in values else ""
    loop = values.get("loop") or {}
    name = values["op"] and f"{values['op']}: "
    return {
        "launch": (name + values["name"])[:48],
        "kind": values["kind"],
        "read KB": values["read"] / 1024,
        "written KB": values["written"] / 1024,
        "MFLOP": values["flops"] / 1e6,
        "us": values["us"],
        "bound by": values["bound_by"],
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


_CLASSES = ("memory", "integer", "float", "tensor", "conversion", "exchange", "control")


def main() -> None:
    args = parse_arguments()
    with errors_end("inspect_gpu_step.py"):
        gpu, model = GPUS[args.gpu], read_model(args)
        engine = with_bucket(engine_config(args), model, args.bucket)
        pretend(gpu)
        step = generate_step(engine, first_layers(model, args.layers), args.bucket)
        inspection = inspect(step, model.num_layers, gpu, args.context)
    print(printed(inspection))
    if args.json is not None:
        args.json.write_text(json.dumps(inspection.as_json(), indent=1) + "\n")


if __name__ == "__main__":
    for message in ("Accessing the data pointer of FakeTensor", "dynamo_pgo force disabled"):
        warnings.filterwarnings("ignore", message=message)
    main()
