"""Make the tables of docs/gpu_step.md: what a GPU's step should take. Estimates: nothing runs on a GPU here.

    python scripts/gpu_step_tables.py

Three models, decodes of 1 to 256 requests and a chunk of a prompt, three contexts, three kinds of KV cache, two GPUs.
The code of each (model, bucket, kind of cache) is generated once, for the first layers of the model; GPUs that run the
same code and all contexts are estimated from it. Results go to docs/results/gpu-estimates/NAME.jsonl, a line each, and
the page is written from them. Lines that this very code has made are kept: a run that was cut off goes on, and one
after a change of a kernel makes all of them anew, each with the commit that it was made at.
"""

import argparse
import concurrent.futures
import hashlib
import importlib.metadata
import itertools
import json
import multiprocessing
import subprocess
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from own_checkout import ROOT
from gpu_step_page import BUCKETS, FOLDER, KV_DTYPES, MEASURED, MODELS, NOW, PAGE, page, read_lines
from tqdm import tqdm

from compiled_llm.api.command_line import FlagParser
from compiled_llm.api.config import EngineConfig
from compiled_llm.checkpoint.quantization import linears_of
from compiled_llm.checkpoint.shapes import SHAPES
from compiled_llm.gpu_step.fake_step import DEVICE, generate_step, pretend, with_bucket
from compiled_llm.gpu_step.gpus import GPUS, Gpu
from compiled_llm.gpu_step.inspection import CompiledStep, compile_step, first_layers, inspect
from compiled_llm.models.config import ModelConfig
from compiled_llm.models.config_file import parse_config
from compiled_llm.models.registry import family_of
from compiled_llm.models.weights import tensors
from compiled_llm.ops.attention import kv_quant
from compiled_llm.ops.attention.tiles import path_of
from compiled_llm.step.kv_cache import layer_dtypes
from compiled_llm.system.gpu_packages import check_triton

CONTEXTS = (1024, 8192, 32768)
GPU_NAMES = ("h100", "h200")
_LAYERS = 2  # that are generated
_MEMORY_SHARE = 0.9  # of a GPU's memory that weights and KV cache may take
# What decides the lines: these folders and files.
_SOURCES = ("models", "ops", *(f"compiled_llm/{room}" for room in ("step", "compiling", "worker", "gpu_step")))
_FILES = ("scripts/gpu_step_tables.py", "compiled_llm/checkpoint/shapes.py")


class Case(NamedTuple):
    """What code is generated for; the names are those of a line."""

    model: str
    bucket: str
    kv_cache_dtype: str


def gpu_groups() -> list[tuple[str, ...]]:
    """GPUs of the same code together: unless one of them has tiles of its own."""
    first, *others = GPU_NAMES
    alike = all(GPUS[name].runs_code_of(GPUS[first]) for name in others)
    tuned = any(path_of(GPUS[name].name).is_file() for name in GPU_NAMES)
    return [GPU_NAMES] if alike and not tuned else [(name,) for name in GPU_NAMES]


def begin(gpu: str) -> None:
    """What a process does before its first case."""
    for message in ("Accessing the data pointer of FakeTensor", "dynamo_pgo force disabled"):
        warnings.filterwarnings("ignore", message=message)
    torch.set_num_threads(1)
    pretend(GPUS[gpu])


def estimates(case: Case, gpus: tuple[str, ...]) -> dict[str, Any]:
    """A line's values for ``gpus``. The process takes the first of them for its own."""
    torch.compiler.reset()
    model = parse_config(SHAPES[case.model])
    engine = EngineConfig(max_model_len=CONTEXTS[-1], kv_cache_dtype=case.kv_cache_dtype)
    engine = with_bucket(engine, model, case.bucket)
    made = compile_step(generate_step(engine, first_layers(model, _LAYERS), case.bucket), GPUS[gpus[0]])
    memory = weight_bytes(engine, model), kv_bytes(engine, model)
    first = inspect(made, model.num_layers, CONTEXTS[0])
    return {
        "launches_per_layer": first.launches_per_layer[-1],
        "launches": first.num_launches,
        "layer": [row.name for row in first.rows[first.spans[-1]]],
        "spilled": sorted({row.launch.name for row in first.rows if row.compiled and row.compiled.spilled}),
        "estimates": [
            estimate(made, model, GPUS[name], keys, *memory) | {"gpu": name}
            for name in gpus
            for keys in keys_of(case.bucket)
        ],
    }


def keys_of(bucket: str) -> tuple[int, ...]:
    """Of a request: a chunk sees itself at least."""
    kind, size = bucket.split("_")
    return tuple(max(context, int(size)) if kind == "tokens" else context for context in CONTEXTS)


def estimate(
    made: CompiledStep, model: ModelConfig, gpu: Gpu, keys: int, weights: int, of_key: int
) -> dict[str, Any]:  # fmt: skip
    """A line's values for one GPU and context. ``weights``: all bytes of them; ``of_key``: of a key and its value."""
    inspection = inspect(made, model.num_layers, keys, gpu)
    layer = inspection.rows[inspection.spans[-1]]
    seconds = inspection.seconds()
    return {
        "keys": keys,
        "step_us": round(seconds * 1e6, 1),
        "bytes": inspection.num_bytes,
        "bandwidth_share": round(inspection.bandwidth_share, 4),
        "matrix_share": round(inspection.flops / seconds / gpu.bf16, 4),
        "attention_us": round(sum(row.estimate.seconds for row in layer if row.launch.is_attention) * 1e6, 3),
        "layer_us": [round(row.estimate.seconds * 1e6, 2) for row in layer],
        "bound_by": [row.estimate.bound_by for row in layer],
        "fits": weights + inspection.contexts.num_requests * keys * of_key <= _MEMORY_SHARE * gpu.memory_bytes,
    }


def weight_bytes(engine: EngineConfig, model: ModelConfig) -> int:
    kind = linears_of(engine, model, DEVICE, torch.bfloat16)
    return sum(tensor.nbytes for tensor in tensors(family_of(model).describe(model, torch.bfloat16, kind).weights))


def kv_bytes(engine: EngineConfig, model: ModelConfig) -> int:
    """Of a token in all layers."""
    dtypes = layer_dtypes(engine, torch.bfloat16, model)
    scale = torch.float32.itemsize
    of_head = [model.head_dim * one.itemsize + (scale if kv_quant.is_quantised(one) else 0) for one in dtypes]
    return 2 * model.num_kv_heads * sum(of_head)


def digest() -> str:
    """Of all that decides what is generated and estimated."""
    hashed = hashlib.sha256()
    files = [path for folder in _SOURCES for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".json")]
    for path in sorted(files + [ROOT / name for name in _FILES]):
        hashed.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    versions = [f"{name} {importlib.metadata.version(name)}" for name in ("torch", "triton")]
    hashed.update(repr((versions, CONTEXTS, GPU_NAMES, _LAYERS)).encode())
    return hashed.hexdigest()[:16]


def commit() -> str:
    """The checkout's, with "-dirty" where files differ from it; "unknown" outside of git."""
    command = ["git", "describe", "--always", "--dirty", "--exclude", "*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    places = {name: place for place, name in enumerate((*MODELS, *BUCKETS, *KV_DTYPES))}
    ordered = sorted(lines, key=lambda line: [places[line[field]] for field in Case._fields])
    path.write_text("".join(json.dumps(line) + "\n" for line in ordered))


def make(path: Path, cases: list[Case], processes: int) -> list[str]:
    """Write the lines of ``cases`` to ``path``, those that this code has made left as they are; errors.

    A line of other code stays until it is made anew.
    """
    made_by = {"source": digest(), "commit": commit()}
    lines = {Case(*(line[field] for field in Case._fields)): line for line in read_lines(path)}
    missing = [case for case in cases if case not in lines or lines[case]["source"] != made_by["source"]]
    errors: list[str] = []
    with tqdm(total=len(missing), disable=None, leave=False) as progress:
        for case, values in run(missing, processes):
            progress.update()
            if isinstance(values, str):
                errors.append(f"{' '.join(case)}: {values}")
                continue
            lines[case] = {**case._asdict(), **made_by, **values}
            write_lines(path, lines.values())
    write_lines(path, lines.values())
    return errors


def run(cases: list[Case], processes: int) -> Iterable[tuple[Case, dict[str, Any] | str]]:
    """Each case with its values, or with what went wrong, as they are done."""
    groups = gpu_groups()
    parts: dict[Case, list[dict[str, Any]]] = {}
    for group in groups:
        with concurrent.futures.ProcessPoolExecutor(
            processes, multiprocessing.get_context("spawn"), begin, (group[0],)
        ) as pool:
            futures = {pool.submit(estimates, case, group): case for case in cases}
            for future in concurrent.futures.as_completed(futures):
                case = futures[future]
                if future.exception() is not None:
                    yield case, repr(future.exception())
                    continue
                parts.setdefault(case, []).append(future.result())
                if len(parts[case]) == len(groups):
                    joined = [one for part in parts[case] for one in part["estimates"]]
                    yield case, parts[case][0] | {"estimates": joined}


def parse_arguments() -> argparse.Namespace:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default=NOW, help="of the file of lines")
    parser.add_argument("--folder", type=Path, default=FOLDER, metavar="DIR", help="of these files")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--processes", type=int, default=2, metavar="INT", help="cases at once")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="to write")
    return parser.parse_checked(lambda args: check_triton("gpu_step_tables.py"), processes=1)


def main() -> int:
    args = parse_arguments()
    cases = [Case(*names) for names in itertools.product(args.models, BUCKETS, KV_DTYPES)]
    errors = make(args.folder / f"{args.name}.jsonl", cases, args.processes)
    now, measured = (read_lines(args.folder / f"{name}.jsonl") for name in (NOW, MEASURED))
    args.page.write_text(page(now, measured))
    for error in errors:
        print(error, file=sys.stderr)
    print(f"{len(cases) - len(errors)} of {len(cases)} cases in {args.folder}, page {args.page}")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
