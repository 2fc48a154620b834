"""Files that take the place of another one when they are whole, under names that nobody else gives to a file.

NAME.0123456789abcdef.SUFFIX stands beside NAME, with other digits each time. So a file that somebody else put beside an
output is never overwritten, nor taken for what a run left that was killed.
"""

import contextlib
import os
import re
import secrets
from pathlib import Path

_DIGITS = 16


def create_beside(target: Path, suffix: str, mode: int) -> tuple[int, Path]:
    """A new file to be written to at its end, and what earlier runs left of theirs removed.

    Args:
        target: the file whose place it is to take. The run has its lock: no other one is about to replace it.
        suffix: says what the file is for.
        mode: its permissions, but for those that the process's mask takes away.

    Returns:
        Its descriptor and its path.

    Raises:
        OSError: it cannot be created.
    """
    left = re.compile(rf"{re.escape(target.name)}\.[0-9a-f]{{{_DIGITS}}}\.{re.escape(suffix)}")
    for name in os.listdir(target.parent):
        if left.fullmatch(name):
            with contextlib.suppress(OSError):  # it costs room on the disk, and nothing else
                os.unlink(target.parent / name)
    path = target.with_name(f"{target.name}.{secrets.token_hex(_DIGITS // 2)}.{suffix}")
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_EXCL, mode), path
