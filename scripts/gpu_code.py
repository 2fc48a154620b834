"""Gather what a GPU's steps were compiled to: Inductor's programs, the machine code of Triton's kernels, tuned tiles.

    python scripts/gpu_code.py --output results/code

Three folders: ``programs`` has the Python that Inductor wrote for whole graphs, ``kernels`` the machine code of each
Triton kernel, which the ``nvdisasm`` and ``cuobjdump`` of Triton print on any machine, ``tiles`` the tiles that were
tuned for GPUs. The engine's own kernels come first, then the newest, until ``--megabytes`` are full; what is left out
is counted. Exit status: 0, or 2 if nothing is there.
"""

import argparse
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

from own_checkout import ROOT

from compiled_llm.api.command_line import FlagParser
from compiled_llm.ops import native


def newest(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: path.stat().st_mtime, reverse=True)


def programs(cache: Path) -> list[Path]:
    """Inductor's modules of whole graphs."""
    return newest(path for path in cache.rglob("*.py") if "def call(" in path.read_text(errors="replace"))


def kernels(cache: Path) -> list[Path]:
    """Compiled Triton kernels, the newest of each name, the engine's own first: Inductor's begin with "triton_"."""
    found: dict[str, Path] = {}
    for path in newest(cache.rglob("*.cubin")):
        found.setdefault(path.stem, path)
    return sorted(found.values(), key=lambda path: path.stem.startswith("triton_"))


def gather(cache: Path, output: Path, room: int) -> dict[str, int]:
    """Copy all of it below ``output``, ``room`` bytes at most; counts of files, and of those left out."""
    tiles = ROOT / "ops" / "tiles"
    wanted = [("tiles", "-".join(path.relative_to(tiles).parts), path) for path in sorted(tiles.rglob("*.json"))]
    wanted += [("kernels", path.name, path) for path in kernels(cache)]
    wanted += [("programs", path.name, path) for path in programs(cache)]
    counts = {"programs": 0, "kernels": 0, "tiles": 0, "left out": 0}
    shutil.rmtree(output, ignore_errors=True)
    for folder, name, path in wanted:
        size = path.stat().st_size
        if size > room:
            counts["left out"] += 1
            continue
        room -= size
        counts[folder] += 1
        (output / folder).mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, output / folder / name)
    return counts


def main() -> int:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="what is in it goes")
    parser.add_argument("--megabytes", type=int, default=64, help="before it is packed (default: 64)")
    args = parser.parse_checked(None, megabytes=1)
    cache = native.cache_directory()
    counts = gather(cache, args.output, args.megabytes << 20)
    print(f"{', '.join(f'{count} {name}' for name, count in counts.items())} of {cache}")
    return 0 if counts["programs"] or counts["kernels"] else 2


if __name__ == "__main__":
    sys.exit(main())
