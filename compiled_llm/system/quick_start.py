"""What makes a program start sooner whose user waits for its first answer: a third of the time that imports take."""

import atexit
import contextlib
import gc
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

# What torch's import ends with: shapes of what ops would return, in Python. Tensors of the device "meta" and compilers
# have them worked out, and steps that run uncompiled or load what was compiled have neither.
_SHAPES = "torch._meta_registrations"


@contextlib.contextmanager
def quick_start() -> Iterator[None]:
    """Within it torch is imported without these functions, and nobody looks for garbage among what is imported.

    They are imported before anything else of torch, or transformers, that is imported later: a compiler, for example.
    """
    gc.disable()
    try:
        if "torch" not in sys.modules:
            _import_torch()
        yield
    finally:
        gc.freeze()  # what was imported and made until now lives to the end
        gc.enable()
        atexit.register(_unfreeze)


def _unfreeze() -> None:
    """Triton's library, which transformers imports where it reads a model for the first time, would tell of leaks."""
    if "triton" in sys.modules:
        gc.unfreeze()


def _import_torch() -> None:
    sys.modules[_SHAPES] = ModuleType(_SHAPES)
    try:
        torch: Any = importlib.import_module("torch")
        importlib.import_module("torch.utils._device")  # for torch.get_default_device, which needs no shapes
    finally:
        del sys.modules[_SHAPES]
    del torch._meta_registrations
    sys.meta_path.insert(0, _Later())


class _Later:
    """A finder of modules that finds none, and imports what was left out before the first that needs it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] in ("torch", "transformers"):
            with contextlib.suppress(ValueError):  # another thread was faster
                sys.meta_path.remove(self)
            importlib.import_module("torch._meta_registrations")
