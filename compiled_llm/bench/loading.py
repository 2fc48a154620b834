"""Times the reading of a model's weights against a plain read of the same files, and measures what memory it takes.

    compiled-llm bench loading --shape qwen3-0.6b
    compiled-llm bench loading --model DIR --dtype bfloat16
    compiled-llm bench loading --cold

Each round reads the files into ordinary memory, as ``cat`` would, and then loads the weights into their layers, so that
other load on the machine affects both. Both come from the page cache; with ``--cold`` the files are dropped from it
before each, and both wait for the disk. The peak is of this process, over what it held before the load.

The first round counts apart: a virtual machine's memory that nobody has used yet has to be fetched from its host.
"""

import dataclasses
import functools
import os
import statistics
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser, errors_end
from compiled_llm.api.config import EngineConfig
from compiled_llm.bench.harness import DTYPES, finish, in_turns, median_ratio, seconds_of
from compiled_llm.bench.start import write_checkpoint
from compiled_llm.checkpoint import loader
from compiled_llm.checkpoint.quantization import plain_kind, published
from compiled_llm.checkpoint.shapes import SHAPES
from compiled_llm.models.config_file import read_config
from compiled_llm.models.linears.quantizing import SCHEMES, Quantizing
from compiled_llm.models.weights import tensors
from compiled_llm.worker.memory import growth_while

MAX_POSITIONS = 4096  # of the tables of rotary embeddings, which are made and not read


def parser(program: str) -> FlagParser:
    made = FlagParser(prog=program, description="The reading of a model's weights beside a plain read of its files.")
    made.add_argument("--model", type=Path, metavar="DIR", help="default: random weights of --shape")
    made.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b", help="(default: qwen3-0.6b)")
    made.add_argument("--dtype", default="auto", choices=DTYPES, help="(default: the model's)")
    made.add_argument("--quantization", choices=SCHEMES, help="of linear layers and the head, as they are read")
    made.add_argument("--cold", action="store_true", help="from the disk: the page cache forgets the files each time")
    made.add_argument("--rounds", type=int, default=5, help="after the first, which counts apart (default: 5)")
    tables.add_json_flag(made)
    return made


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
    config = read_config(directory)
    config = dataclasses.replace(config, max_position_embeddings=min(config.max_position_embeddings, MAX_POSITIONS))
    dtype, device = getattr(torch, config.dtype if dtype_name == "auto" else dtype_name), torch.device("cpu")
    linears: Any = plain_kind(EngineConfig(device="cpu"), config, device, dtype)
    if quantization is not None:
        linears = Quantizing(linears, dtype, SCHEMES[quantization], SCHEMES[quantization])
    linears = published(config, linears)
    sizes, peaks = [0], list[float]()

    def load() -> float:
        kept: list[Any] = []
        taken: list[float] = []
        weights = functools.partial(loader.load_weights, directory, config, dtype, device, linears)
        growth = growth_while(lambda: taken.append(seconds_of(lambda: kept.append(weights()))))
        sizes[0] = sum(tensor.nbytes for tensor in tensors(kept[0]))
        peaks.extend([] if growth is None else [growth / sizes[0]])
        return taken[0]

    def from_files(run: Callable[[], float]) -> float:
        if cold:
            forget(directory)
        return run()

    runs = {
        "read": lambda: from_files(lambda: seconds_of(lambda: plain_read(directory))),
        "load": lambda: from_files(load),
    }
    times = in_turns(runs, rounds=rounds + 1, warm_up=0)
    read, loads = times["read"], times["load"]
    return {
        "dtype": str(dtype)[6:],
        "quantization": quantization,
        "from": "disk" if cold else "page cache",
        "file_bytes": sum(path.stat().st_size for path in directory.glob("*.safetensors")),
        "weight_bytes": sizes[0],
        "first_read_seconds": read[0],
        "first_load_seconds": loads[0],
        "read_seconds": statistics.median(read[1:]),
        "load_seconds": statistics.median(loads[1:]),
        "load_over_read": median_ratio(loads[1:], read[1:]),
        "peak_over_weights": max(peaks) if peaks else None,
    }


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    args = parser(program).parse_checked(None, arguments, rounds=1)
    with errors_end(program), tempfile.TemporaryDirectory() as scratch:
        directory = args.model or Path(scratch)
        if args.model is None:
            write_checkpoint(directory, args.shape)
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
    finish("loading", result, args.json)
    return 0
