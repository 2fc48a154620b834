"""Times the reading of a model's weights against a plain read of the same files, and measures what memory it takes.

    python scripts/bench/bench_load.py --shape qwen3-0.6b
    python scripts/bench/bench_load.py --model DIR --dtype bfloat16
    python scripts/bench/bench_load.py --cold

Each round reads the files into ordinary memory, as ``cat`` would, and then loads the weights into their layers, so that
other load on the machine affects both. Both come from the page cache; with ``--cold`` the files are dropped from it
before each, and both wait for the disk. The peak is of this process, over what it held before the load.

The first round counts apart: a virtual machine's memory that nobody has used yet has to be fetched from its host.
"""

import argparse
import dataclasses
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import own_checkout
import tables
import torch
from bench_start import write_checkpoint
from workloads import SHAPES

from compiled_llm.api.command_line import FlagParser, errors_end
from compiled_llm.checkpoint import loader
from compiled_llm.checkpoint.quantization import published
from compiled_llm.models.config_file import read_config
from compiled_llm.models.linears.kinds import linear_kind
from compiled_llm.models.linears.quantizing import SCHEMES, Quantizing
from compiled_llm.models.weights import tensors
from compiled_llm.system import hardware as machine
from compiled_llm.worker.memory import growth_while

MXFP4 = {"quant_method": "mxfp4"}
MAX_POSITIONS = 4096  # of the tables of rotary embeddings, which are made and not read


def parse_arguments() -> argparse.Namespace:
    parser = FlagParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, metavar="DIR", help="default: random weights of --shape")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--mxfp4", action="store_true", help="the experts of --shape in MXFP4, as gpt-oss has them")
    parser.add_argument("--dtype", default="auto", choices=tables.DTYPES)
    parser.add_argument(
        "--quantization", choices=sorted(SCHEMES), help="of linear layers and the head, as they are read"
    )
    parser.add_argument("--cold", action="store_true", help="from the disk: the page cache forgets the files each time")
    parser.add_argument("--rounds", type=int, default=5, help="after the first, which counts apart")
    tables.add_json_flag(parser)

    def check(args: argparse.Namespace) -> None:
        tables.check_target("--json", args.json)
        if args.mxfp4 and args.model is not None:
            raise ValueError("--mxfp4 is of the random weights of --shape: a model's files are what they are")

    return parser.parse_checked(check, rounds=1)


def plain_read(directory: Path) -> None:
    """Read all weights into memory, on one thread."""
    contents = []
    for path in sorted(directory.glob("*.safetensors")):
        content = torch.empty(path.stat().st_size, dtype=torch.uint8)
        left = memoryview(content.numpy().data)
        with open(path, "rb", buffering=0) as file:
            while left and (count := file.readinto(left)):
                left = left[count:]
        contents.append(content)


def forget(directory: Path) -> None:
    """Drop the files from the page cache, once they are written."""
    for path in directory.glob("*.safetensors"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(
    directory: Path, dtype_name: str, rounds: int, *, quantization: str | None = None, cold: bool = False
) -> dict[str, Any]:
    prepare = forget if cold else lambda directory: None
    config = read_config(directory)
    config = dataclasses.replace(config, max_position_embeddings=min(config.max_position_embeddings, MAX_POSITIONS))
    dtype, device = getattr(torch, config.dtype if dtype_name == "auto" else dtype_name), torch.device("cpu")
    linears = linear_kind(device, dtype)
    if quantization is not None:
        linears = Quantizing(linears, dtype, SCHEMES[quantization], SCHEMES[quantization])
    linears = published(config, linears)
    kept: list[Any] = []
    plain: list[float] = []
    loads: list[float] = []

    def load() -> None:
        started = time.perf_counter()
        kept.append(loader.load_weights(directory, config, dtype, device, linears))
        loads.append(time.perf_counter() - started)

    peaks, size = [], 0
    for _ in range(rounds + 1):
        prepare(directory)
        started = time.perf_counter()
        plain_read(directory)
        plain.append(time.perf_counter() - started)
        prepare(directory)
        growth = growth_while(load)
        size = sum(tensor.nbytes for tensor in tensors(kept.pop()))
        peaks.append(None if growth is None else growth / size)
    known = [peak for peak in peaks if peak is not None]
    return {
        "dtype": str(dtype)[6:],
        "quantization": quantization,
        "from": "disk" if cold else "page cache",
        "file_bytes": sum(path.stat().st_size for path in directory.glob("*.safetensors")),
        "weight_bytes": size,
        "first_read_seconds": plain[0],
        "first_load_seconds": loads[0],
        "read_seconds": statistics.median(plain[1:]),
        "load_seconds": statistics.median(loads[1:]),
        "load_over_read": statistics.median(b / a for a, b in zip(plain[1:], loads[1:], strict=True)),
        "peak_over_weights": max(known) if known else None,
    }


def main() -> None:
    args = parse_arguments()
    with errors_end("bench_load"), tempfile.TemporaryDirectory() as scratch:
        directory = args.model
        if directory is None:
            directory = Path(scratch)
            write_checkpoint(directory, args.shape, **({"quantization_config": MXFP4} if args.mxfp4 else {}))
        result = measure(directory, args.dtype, args.rounds, quantization=args.quantization, cold=args.cold)
    peak = result["peak_over_weights"]
    rows = {
        "file": f"{result['file_bytes'] / 1e9:.3f} GB, from the {result['from']}",
        "weights": f"{result['weight_bytes'] / 1e9:.3f} GB in {result['quantization'] or result['dtype']}",
        "plain read": f"{result['read_seconds']:.3f} s ({result['first_read_seconds']:.3f} s the first time)",
        "load": f"{result['load_seconds']:.3f} s ({result['first_load_seconds']:.3f} s the first time)",
        "load over plain read": f"{result['load_over_read']:.2f}",
        "peak over weights": "not known here" if peak is None else f"{peak:.3f}",
    }
    tables.print_table("Loading weights", rows)
    tables.finish({**result, "machine": machine.describe(torch.device("cpu"))}, args.json)


if __name__ == "__main__":
    main()
