"""Find fast tiles for the attention kernels on this GPU and write them where the kernels look for them.

    compiled-llm tune attention                                       # bfloat16 and int8 caches of usual models
    compiled-llm tune attention --head-dim 256 --kv-cache-dtype fp8   # one more shape: the file keeps the others
    compiled-llm tune attention --seconds 1200 --output /tmp/tiles.json

``--seconds`` is divided among the shapes; candidates closest to the tiles in use are tried first, so a short search
tries only these. ``compiled_llm/tuning/attention.py`` says how they are compared.

Exit status: 0; 1 if the tiles in use do not run; 2 without a CUDA GPU.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from compiled_llm.api.command_line import FlagParser, errors_end
from compiled_llm.api.config_pairs import QUANTISED_DTYPES
from compiled_llm.system.gpu_packages import check_triton


def parser(program: str) -> FlagParser:
    made = FlagParser(prog=program, description="Find fast tiles for the attention kernels on this GPU.")
    add = made.add_argument
    add("--head-dim", type=int, nargs="+", default=[64, 128], metavar="N", help="elements of a head (default: 64 128)")
    dtypes = "of the cache (default: auto int8)"
    add("--kv-cache-dtype", nargs="+", choices=("auto", *QUANTISED_DTYPES), default=["auto", "int8"], help=dtypes)
    add("--seconds", type=float, default=600, help="for all shapes together (default: 600)")
    add("--output", type=Path, metavar="FILE", help="to write (default: the one that the kernels read)")
    return made


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    args = parser(program).parse_checked(lambda args: check_triton(program), arguments, head_dim=1, seconds=0)

    import torch  # which takes seconds

    from compiled_llm.ops.attention.tiles import path_of
    from compiled_llm.system import hardware
    from compiled_llm.tuning.attention import tune_file
    from compiled_llm.tuning.search import Gpu, InUseError

    gpu = Gpu.present()
    if gpu.device != "cuda":
        print(f"{program}: no CUDA GPU here (torch.cuda.is_available() is False); nothing to tune", file=sys.stderr)
        return 2
    path = args.output or path_of(gpu.name)
    with errors_end(program), errors_end(program, (InUseError,), status=1):
        tune_file(path, gpu, args.head_dim, args.kv_cache_dtype, args.seconds)
    print(f"written: {path}")
    facts = hardware.describe(torch.device("cuda", torch.cuda.current_device()))
    print(json.dumps({"benchmark": "tune_attention", "tiles": str(path), "machine": facts}))
    return 0
