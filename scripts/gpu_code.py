"""Gather what a GPU's steps were compiled to: Inductor's programs, the machine code of Triton's kernels, tuned tiles.

    python scripts/gpu_code.py --output results/code

Three folders: ``programs`` has the Python that Inductor wrote for whole graphs, ``sass`` the machine code of each
kernel as cuobjdump prints it, with its registers, shared memory and stack on the first line, ``tiles`` the tiles that
were tuned for GPUs. The engine's own kernels come first, then the newest, until ``--megabytes`` of text are full; what
is left out is counted. Exit status: 0, or 2 if nothing is there.
"""

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from own_checkout import ROOT

from compiled_llm.api.command_line import FlagParser
from compiled_llm.ops import native
from compiled_llm.system.gpu_packages import check_triton

_FIRST = re.compile(r"^(?!triton_)")  # kernels by their own names; Inductor's begin so


def newest(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)


def programs(cache: Path) -> list[Path]:
    """Inductor's modules of whole graphs."""
    return newest(path for path in cache.rglob("*.py") if "def call(" in path.read_text(errors="replace"))


def kernels(cache: Path) -> list[Path]:
    """Compiled Triton kernels, the newest of each name, the engine's own first."""
    found: dict[str, Path] = {}
    for path in newest(cache.rglob("*.cubin")):
        found.setdefault(path.stem, path)
    return sorted(found.values(), key=lambda path: _FIRST.match(path.stem) is None)


def sass_of(cubin: Path, cuobjdump: Path) -> str:
    """What it needs, and its instructions."""
    outputs = [
        subprocess.run([cuobjdump, flag, cubin], capture_output=True, text=True, timeout=60, check=True).stdout
        for flag in ("--dump-resource-usage", "--dump-sass")
    ]
    needs = next((line.strip() for line in outputs[0].splitlines() if "REG:" in line), "")
    return f"{needs}\n{outputs[1]}"


def gather(cache: Path, output: Path, cuobjdump: Path, room: int) -> dict[str, int]:
    """Write all of it below ``output``, ``room`` bytes at most; counts of files, and of those left out."""
    for name in ("programs", "sass", "tiles"):
        shutil.rmtree(output / name, ignore_errors=True)
        (output / name).mkdir(parents=True)
    counts = {"programs": 0, "sass": 0, "tiles": 0, "left out": 0}

    def keep(folder: str, name: str, text: str) -> None:
        nonlocal room
        if len(text) > room:
            counts["left out"] += 1
            return
        room -= len(text)
        counts[folder] += 1
        (output / folder / name).write_text(text)

    tiles = ROOT / "ops" / "tiles"
    for path in sorted(tiles.rglob("*.json")):
        keep("tiles", "-".join(path.relative_to(tiles).parts), path.read_text())
    for path in kernels(cache):
        try:
            keep("sass", f"{path.stem}.sass", sass_of(path, cuobjdump))
        except (OSError, subprocess.SubprocessError) as error:
            counts["left out"] += 1
            print(f"{path.stem}: {type(error).__name__}: {error}", file=sys.stderr)
    for path in programs(cache):
        keep("programs", path.name, path.read_text(errors="replace"))
    return counts


def main() -> int:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--megabytes", type=int, default=64, help="of text, before it is packed (default: 64)")
    args = parser.parse_checked(lambda args: check_triton("gpu_code.py"), megabytes=1)
    import triton

    cuobjdump = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    cache = native.cache_directory()
    counts = gather(cache, args.output, cuobjdump, args.megabytes << 20)
    print(f"{', '.join(f'{count} {name}' for name, count in counts.items())} of {cache}")
    return 0 if counts["programs"] or counts["sass"] else 2


if __name__ == "__main__":
    sys.exit(main())
