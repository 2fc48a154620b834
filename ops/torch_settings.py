"""torch's settings, which belong to the user's program: while the engine works they are the engine's own.

Most belong to a thread: default device, autocast, grad mode, inference mode and, by and large, the number of threads.
The default dtype, deterministic algorithms and the precision of float32 products belong to the process. They are
written only where the program has changed them; then what its other threads compute during a step has the engine's.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from compiled_llm.ops.torch_private_settings import (
    deterministic_algorithms,
    float32_products,
    has_function_modes,
    is_autocast_on,
    put_back_function_modes,
    set_deterministic_algorithms,
    set_float32_products,
    set_grad,
    take_function_modes,
)

_AUTOCAST_DEVICES = ("cpu", "cuda")


@contextlib.contextmanager
def own_settings(num_threads: int | None = None) -> Iterator[None]:
    """torch's own defaults without gradients, for this thread and what belongs to the process; afterwards as before.

    It may be nested, and other threads may be in it. Where the program has changed nothing it took 5 to 7 us, on a
    busy Xeon.

    Args:
        num_threads: that ops run on meanwhile. None: as they are; what sets them inside does so until the end.
    """
    threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
    inference = torch.inference_mode(False) if torch.is_inference_mode_enabled() else None
    autocast = [name for name in _AUTOCAST_DEVICES if torch.is_autocast_enabled(name)] if is_autocast_on() else []
    modes = take_function_modes() if has_function_modes() else None
    _process.enter()
    try:
        if num_threads is not None and num_threads != threads:
            torch.set_num_threads(num_threads)
        if inference is not None:
            inference.__enter__()
        if torch.is_grad_enabled():
            set_grad(False)
        for name in autocast:
            torch.set_autocast_enabled(name, False)
        yield
    finally:
        for name in autocast:
            torch.set_autocast_enabled(name, True)
        if inference is not None:
            inference.__exit__(None, None, None)
        if torch.is_grad_enabled() != grad:
            set_grad(grad)
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
        _process.leave()
        if modes is not None:
            put_back_function_modes(modes)


class _Setting(NamedTuple):
    """One of the process. ``own``: the values that the engine may have; the first is set where it is another."""

    get: Callable[[], Any]
    set: Callable[[Any], None]
    own: tuple[Any, ...]


_SETTINGS = (
    _Setting(torch.get_default_dtype, torch.set_default_dtype, (torch.float32,)),
    _Setting(deterministic_algorithms, set_deterministic_algorithms, (None,)),
    _Setting(float32_products, set_float32_products, (None,)),
)


class _ProcessSettings:
    """The settings of the process while any thread is within ``own_settings``.

    The last one to leave puts back what it was. What the program has set meanwhile, in another thread, stays.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._before: dict[_Setting, Any] = {}

    def enter(self) -> None:
        with self._lock:
            self._count += 1
            for setting in _SETTINGS:
                if (now := setting[0]()) not in setting[2]:  # by their places, which is faster
                    self._before[setting] = now
                    setting.set(setting.own[0])

    def leave(self) -> None:
        with self._lock:
            self._count -= 1
            if self._count == 0 and self._before:
                for setting, value in self._before.items():
                    if setting.get() in setting.own:
                        setting.set(value)
                self._before.clear()

    def begin_fork(self) -> None:
        """In a fork of the process, where no thread is within: it has the settings of the program."""
        self._lock = threading.Lock()
        if self._count:
            self._count = 1
            self.leave()


_process = _ProcessSettings()  # there is one process, and torch's settings are its global state
os.register_at_fork(after_in_child=_process.begin_fork)
