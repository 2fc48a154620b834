"""The estimates of docs/gpu_step.md beside what a GPU took for the same steps.

    python scripts/gpu_step_measured.py docs/results/gpu/h200-2026-11-26

Each ``kernels-*-manual.json`` in the folder (of results before 2026-11-27: ``kernels-*.json``) is a decode that
``gpu_validate.py`` measured, kernel by kernel, with ordinary launches: others overlap. The same step is
generated and estimated here, and every launch that ran is set beside its estimate. Lines go to
docs/results/gpu-estimates/measured.jsonl, from which gpu_step_tables.py writes its page. It should run with the torch
and the Triton that ran on the GPU: others make other code.
"""

import argparse
import json
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

import own_checkout
import torch
from gpu_step_page import FOLDER, MEASURED
from gpu_step_tables import commit
from tqdm import tqdm

from compiled_llm.api.command_line import FlagParser
from compiled_llm.api.config import EngineConfig
from compiled_llm.checkpoint.shapes import SHAPES
from compiled_llm.gpu_step.fake_step import generate_step, pretend, with_bucket
from compiled_llm.gpu_step.gpus import GPUS
from compiled_llm.gpu_step.inspection import Inspection, compile_step, first_layers, inspect
from compiled_llm.gpu_step.measured import Measured, match
from compiled_llm.models.config_file import parse_config
from compiled_llm.system.gpu_packages import check_triton

OUTPUT = FOLDER / f"{MEASURED}.jsonl"
_LAYERS = 3  # that are generated: Inductor may end a layer with one launch more than the next


def line_of(path: Path) -> dict[str, Any]:
    """The step of a ``kernels-*.json``, as it was measured and as it is estimated. Microseconds."""
    result = json.loads(path.read_text())["result"]
    gpu = next(gpu for gpu in GPUS.values() if gpu.name == result["machine"]["gpu"])
    pretend(gpu)
    model = parse_config(SHAPES[result["shape"]])
    if result["layers"]:
        model = first_layers(model, result["layers"])
    bucket, keys = f"decode_{result['batch_size']}", round(result.get("mean_keys", result["context"]))
    engine = EngineConfig(
        max_model_len=model.max_position_embeddings,
        kv_cache_dtype=result["kv_cache_dtype"],
        exact=result["exact"],
        cuda_graphs="manual",
    )
    engine = with_bucket(engine, model, bucket)
    torch.compiler.reset()
    made = compile_step(generate_step(engine, first_layers(model, _LAYERS), bucket), gpu)
    inspection = inspect(made, model.num_layers, keys, gpu)
    facts = {"model": result["shape"], "bucket": bucket, "keys": keys, "layers": model.num_layers, "gpu": gpu.name}
    facts |= {name: result[name] for name in ("kv_cache_dtype", "exact", "step_us", "busy_us", "gap_us")}
    facts["commit"] = commit()
    facts |= {name: result["machine"][name] for name in ("torch", "triton") if name in result["machine"]}
    return facts | beside(inspection, match(inspection, result))


def beside(inspection: Inspection, measured: Measured) -> dict[str, Any]:
    """Each launch of the step beside its estimate, those of a layer and those around the layers."""
    span = inspection.spans[-1]
    rows = [
        {
            "name": row.name,
            "in_layer": span.start <= place < span.stop,
            "megabytes": round((row.work.read + row.work.written) / 1e6, 2),
            "estimate_us": round(row.estimate.seconds * 1e6, 2),
            "us": round(us, 2),
        }
        for place, (row, us) in enumerate(zip(inspection.rows, measured.us, strict=True))
        if us is not None
    ]
    return {
        "estimated_step_us": round(inspection.seconds() * 1e6, 1),
        "median_error": round(statistics.median(abs(row["estimate_us"] / row["us"] - 1) for row in rows), 3),
        "not_run": list(measured.not_run),
        "unmatched_us": round(sum(one.us for one in measured.unmatched), 1),
        "rows": rows,
    }


def main() -> int:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="with kernels-*.json")
    parser.add_argument("--output", type=Path, default=OUTPUT, metavar="FILE.jsonl")
    args = parser.parse_checked(lambda args: check_triton("gpu_step_measured.py"))
    paths = sorted(args.folder.glob("kernels-*-manual.json")) or sorted(
        path for path in args.folder.glob("kernels-*.json") if "-programmatic" not in path.name
    )
    if not paths:
        print(f"gpu_step_measured: error: no kernels-*.json in {args.folder}", file=sys.stderr)
        return 2
    for message in ("Accessing the data pointer of FakeTensor", "dynamo_pgo force disabled"):
        warnings.filterwarnings("ignore", message=message)
    torch.set_num_threads(1)
    lines = []
    for path in tqdm(paths, disable=None, leave=False):
        try:
            lines.append(line_of(path))
        except ValueError as error:
            print(f"left out: {path.name}: {error}", file=sys.stderr)
    args.output.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for line in lines:
        times = f"measured {line['step_us']:.0f} us, estimated {line['estimated_step_us']:.0f} us"
        print(f"{line['model']} {line['bucket']}: {times}, median error of launches {line['median_error']:.0%}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
