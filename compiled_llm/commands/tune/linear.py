"""Find fast products and tiles for linear layers on this GPU and write them where the kernels look for them.

    compiled-llm tune linear                                      # all quantised kinds, the layers of Qwen3-8B
    compiled-llm tune linear --kind int4 --group-size 128 --layer 6144x4096    # the file keeps the others
    compiled-llm tune linear --kind int8_w8a8 --layer 1536x2048 --experts 128
    compiled-llm tune linear --kind bfloat16                      # plain weights: what takes in norms and gates

``--seconds`` is divided among the ranges of rows; tiles closest to those in use are tried first.
``compiled_llm/tuning/linear.py`` says how quantised layers are compared, ``products.py`` beside it how plain ones are.

In Triton's interpreter (``TRITON_INTERPRET=1``, with ``--output``) the command runs on a CPU. That checks the command:
such times mean nothing.

Exit status: 0; 1 if tiles in use give a row other bits than others do; 2 without a CUDA GPU.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from compiled_llm.api.command_line import FlagParser, errors_end
from compiled_llm.api.config import GROUP_SIZES, QUANTIZATIONS
from compiled_llm.system.gpu_packages import check_triton

_PLAIN = "bfloat16"
_KINDS = (*QUANTIZATIONS, "int8_w8a8_rows")  # the last one is what checkpoints have
_QWEN3_8B = [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)]
_ROWS = [16, 64, 256, 2048]


def parser(program: str) -> FlagParser:
    made = FlagParser(prog=program, description="Find fast products and tiles for linear layers on this GPU.")
    add = made.add_argument
    kinds = f"how weights are kept (default: all but {_PLAIN})"
    add("--kind", nargs="+", choices=(*_KINDS, _PLAIN), default=list(_KINDS), help=kinds)
    add("--group-size", type=int, choices=GROUP_SIZES, help="inputs with one scale, of int4 (default: 32)")
    layers = "sizes of layers (default: those of Qwen3-8B)"
    add("--layer", type=_sizes, nargs="+", default=_QWEN3_8B, metavar="OUTPUTSxINPUTS", help=layers)
    add("--experts", type=int, default=0, metavar="N", help="each layer is that of so many experts (default: 0)")
    add("--rows", nargs="+", type=int, default=_ROWS, metavar="N", help="ends of the ranges; of an expert's rows")
    add("--seconds", type=float, default=1200, help="for all together (default: 1200)")
    add("--output", type=Path, metavar="FILE", help="to write (default: the one that the kernels read)")
    return made


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""

    def check(args: argparse.Namespace) -> None:
        check_triton(program)
        if args.rows != sorted(set(args.rows)):
            raise ValueError(f"--rows must rise, given {' '.join(map(str, args.rows))}")
        if _PLAIN in args.kind and (args.experts or (args.output and len(args.kind) > 1)):
            given = " ".join(args.kind)
            raise ValueError(f"--kind {_PLAIN} has no --experts, and an --output of its own, given {given}")

    flags = parser(program)
    args = flags.parse_checked(check, arguments, experts=0, rows=1, seconds=0)

    import torch  # which takes seconds
    from triton import knobs

    from compiled_llm.system import hardware
    from compiled_llm.tuning import linear, products
    from compiled_llm.tuning.search import Gpu, InUseError

    gpu = Gpu.present()
    jobs = [
        linear.job_of(kind, sizes, args.experts, args.group_size)
        for kind in args.kind
        if kind != _PLAIN
        for sizes in args.layer
    ]
    plain = [one for sizes in args.layer if _PLAIN in args.kind for one in products.products(*sizes)]
    if plain and args.rows[0] > products.MAX_ROWS:
        flags.error(f"--rows must begin with up to {products.MAX_ROWS} for --kind {_PLAIN}, given {args.rows[0]}")
    if gpu.device != "cuda" and not (knobs.runtime.interpret and args.output):
        print(f"{program}: no CUDA GPU here (torch.cuda.is_available() is False); nothing to tune", file=sys.stderr)
        return 2
    with errors_end(program, (InUseError,), status=1):
        written = linear.tune_files(jobs, plain, args.rows, gpu, args.seconds, args.output)
    print(f"written: {', '.join(map(str, written))}")
    facts = hardware.describe(torch.device(gpu.device))
    print(json.dumps({"benchmark": "tune_linear", "tiles": str(written[-1]), "machine": facts}))
    return 0


def _sizes(text: str) -> tuple[int, int]:
    """``"6144x4096"`` -> its two numbers, for argparse."""
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"must be OUTPUTSxINPUTS, as 6144x4096, given {text!r}")
    outputs, inputs = text.split("x")
    return int(outputs), int(inputs)
