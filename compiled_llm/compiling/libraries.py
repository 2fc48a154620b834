"""Where torch keeps the libraries of compiled code, and which of them this process has loaded."""

import os
import tempfile
from pathlib import Path

from compiled_llm.ops.native import cache_directory
from compiled_llm.ops.torch_private import default_cache_dir
from compiled_llm.ops.trusted_paths import check_trusted, make_directory
from compiled_llm.ops.user_warnings import warn


def use_own_cache_directory() -> None:
    """Keep compiled code in the user's own cache directory, unless ``TORCHINDUCTOR_CACHE_DIR`` names another.

    torch's default is a directory under /tmp whose name other users can guess. torch writes it into the environment
    when it is imported, so a default found there is no choice of the user's. ``ValueError`` if others may write to the
    user's own directory or to the one named.
    """
    own = cache_directory()
    check_trusted(own)
    given = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if given is None or (given != str(own / "inductor") and given == default_cache_dir()):
        if os.access(own, os.W_OK):
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(own / "inductor")
        else:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="compiled_llm_")
            warn(f"{own} may not be written to: compiled code goes to a temporary directory")
    inductor = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    make_directory(inductor)
    os.environ.setdefault("TRITON_CACHE_DIR", str(inductor / "triton"))  # the same for Inductor's kernels and for ours
    if own not in inductor.parents:
        check_trusted(inductor, "TORCHINDUCTOR_CACHE_DIR")


def loaded_libraries(root: Path) -> set[Path]:
    """Shared libraries below ``root`` that this process has loaded, as Linux lists them."""
    # A library that was deleted and built again stays marked as deleted.
    maps = [line.removesuffix(" (deleted)") for line in Path("/proc/self/maps").read_text().splitlines()]
    mapped = {Path(line.split(maxsplit=5)[5]) for line in maps if line.endswith(".so")}
    return {file for file in mapped if root in file.parents and file.exists()}
