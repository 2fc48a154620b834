"""What a GPU needs besides torch, and a CPU does not: what cannot go on without it says so at once, with the remedy."""

import importlib.util


def check_triton(what: str) -> None:
    """``ValueError`` that names ``what`` if Triton is not installed, as in an installation for CPUs."""
    if importlib.util.find_spec("triton") is None:
        raise ValueError(
            f"{what} needs Triton, which installations for CPUs leave out: pip install 'compiled-llm[gpu]', or in a "
            "checkout pip install -e '.[gpu]'"
        )
