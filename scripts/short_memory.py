"""Run a command with little memory: in a control group of its own, which is removed afterwards.

    python scripts/short_memory.py --mib 800 -- compiled-llm generate "Once" --model DIR --weights-path KEPT

The group is below this process's own, of version 1 or 2 of control groups, and needs the right to make one (root, or a
group that was delegated). It counts the page cache as well, and nothing in it is swapped out.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import own_checkout

from compiled_llm.api.command_line import FlagParser
from compiled_llm.system.resources import memory_groups


@contextlib.contextmanager
def group_of(size: int) -> Iterator[Path]:
    """A new control group that may have ``size`` bytes of memory; its processes have ended when it is left.

    Raises:
        OSError: it cannot be made.
    """
    for own in memory_groups():
        is_v1 = (own / "memory.limit_in_bytes").exists()
        if not is_v1 and not (own / "cgroup.subtree_control").exists():
            continue
        made = own / f"compiled-llm-{os.getpid()}"
        made.mkdir()
        try:
            (made / ("memory.limit_in_bytes" if is_v1 else "memory.max")).write_text(str(size))
            with contextlib.suppress(OSError):  # a machine without swap space
                (made / ("memory.swappiness" if is_v1 else "memory.swap.max")).write_text("0")
            yield made
        finally:
            made.rmdir()
        return
    raise OSError("no control group of this process counts memory")


def run(command: Sequence[str], size: int) -> int:
    """Exit status of a command that has ``size`` bytes of memory."""
    with group_of(size) as group:
        return subprocess.run(
            command, preexec_fn=lambda: (group / "cgroup.procs").write_text(str(os.getpid())), check=False
        ).returncode


def main() -> int:
    parser = FlagParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, required=True, help="memory, MiB")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args()
    return run(args.command, args.mib << 20)


if __name__ == "__main__":
    sys.exit(main())
