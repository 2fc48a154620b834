"""Show what a GPU would run in a step, on a machine without one: launches, their code, and how long they should take.

    compiled-llm report gpu-step --shape qwen3-0.6b --gpu h100 --bucket decode_8 --max-model-len 8192
    compiled-llm report gpu-step --model DIR --gpu h200 --bucket tokens_2048 --context 8192 --kv-cache-dtype int8
    compiled-llm report gpu-step --shape qwen3-8b --bucket decode_32 --measured kernels.json --picture step.png
    compiled-llm report gpu-step --shape qwen3-0.6b --gpu h100 --bucket decode_1 --cuda-graphs programmatic
    compiled-llm report gpu-step --shape llama-3.1-8b --gpu h100 --bucket decode_32 --cpu-offload-gb 6

The step is compiled as the engine compiles it, for tensors without data, so a model of any size takes little memory.
Every Triton kernel is compiled for the GPU's architecture. Times are estimates (gpu_step/estimate.py says how).
``--measured`` sets beside them what ``compiled-llm bench kernels --json`` measured of the same step on a GPU.

Exit status: 0, or 2 for bad arguments.
"""

import argparse
import json
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_llm.api.command_line import FlagParser, engine_config, errors_end
from compiled_llm.api.tables import add_json_flag, picture_file
from compiled_llm.checkpoint.shapes import SHAPES, engine_parser
from compiled_llm.gpu_step.gpus import GPUS
from compiled_llm.system.gpu_packages import check_triton

if TYPE_CHECKING:  # it loads torch, which takes seconds
    from compiled_llm.models.config import ModelConfig


def parser(program: str) -> FlagParser:
    made = engine_parser(program, "Show what a GPU would run in a step, on a machine without one.")
    add = made.add_argument
    add("--gpu", choices=GPUS, default="h100", help="whose code and numbers (default: h100)")
    add("--bucket", default="decode_8", metavar="NAME", help="decode_<size> or tokens_<size> (default: decode_8)")
    add("--context", type=int, default=1024, metavar="N", help="keys of each request (default: 1024)")
    layers = "layers to generate, others count alike (default: 4); all of them with --cpu-offload-gb"
    add("--layers", type=int, default=4, metavar="N", help=layers)
    measured = "what compiled-llm bench kernels --json measured of this step"
    add("--measured", type=Path, metavar="FILE", help=measured)
    add("--picture", type=picture_file, metavar="FILE.png", help="draw a layer; needs matplotlib")
    add_json_flag(made)
    return made


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    args = parser(program).parse_checked(lambda args: check_triton(program), arguments, context=1, layers=2)

    from compiled_llm.gpu_step.fake_step import generate_step, pretend, with_bucket
    from compiled_llm.gpu_step.inspection import compile_step, first_layers, inspect
    from compiled_llm.gpu_step.measured import match, read_measured
    from compiled_llm.gpu_step.text import text_of

    for message in ("Accessing the data pointer of FakeTensor", "dynamo_pgo force disabled"):
        warnings.filterwarnings("ignore", message=message)
    with errors_end(program):
        gpu, model = GPUS[args.gpu], _read_model(args)
        kernels = read_measured(args.measured, _measured_step(args, model)) if args.measured else None
        engine = with_bucket(engine_config(args), model, args.bucket)
        pretend(gpu)
        # Where some layers' weights lie in host memory, the others are not like them.
        generated = model if engine.cpu_offload_gb else first_layers(model, args.layers)
        made = compile_step(generate_step(engine, generated, args.bucket), gpu)
        inspection = inspect(made, model.num_layers, args.context)
    measured = match(inspection, kernels) if kernels else None
    print(text_of(inspection, measured))
    if args.json is not None:
        besides = {} if measured is None else {"measured": measured.as_json()}
        args.json.write_text(json.dumps(inspection.as_json() | besides, indent=1) + "\n")
    if args.picture is not None:
        from compiled_llm.gpu_step.picture import draw

        draw(inspection, args.picture, measured)
    return 0


def _read_model(args: argparse.Namespace) -> "ModelConfig":
    """The checkpoint's or the shape's."""
    from compiled_llm.models.config_file import parse_config, read_config

    if args.model is not None:
        return read_config(Path(args.model), args.model_impl, args.dtype)
    return parse_config(SHAPES[args.shape])


def _measured_step(args: argparse.Namespace, model: "ModelConfig") -> dict[str, Any]:
    """The same step in the words of ``compiled-llm bench kernels``, which measures decodes."""
    match = re.fullmatch(r"decode_([1-9]\d*)", args.bucket)
    if match is None:
        raise ValueError(f"--measured: kernels are measured in decodes, so --bucket must be one, given {args.bucket}")
    return {
        "shape": str(args.model or args.shape),
        "batch_size": int(match[1]),
        "context": args.context,
        "dtype": model.dtype if args.dtype == "auto" else args.dtype,
        "kv_cache_dtype": args.kv_cache_dtype,
    }
