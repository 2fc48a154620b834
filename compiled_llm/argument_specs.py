"""What a compiled function knows of its arguments: their shapes, strides and dtypes, without their contents.

A function compiled ahead of time runs on whatever it is given, so its arguments are compared with these before each
call. Arguments are nested tuples (NamedTuples among them) of tensors, None and numbers.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor


class TensorSpec(NamedTuple):
    """A tensor as the compiler sees it. ``shape`` has -1 for a dynamic size; all dynamic sizes are one number."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: str
    static_address: str | None  # "guarded", "unguarded", or None: not marked

    def make(self, dynamic_size: int) -> Tensor:
        """An empty tensor of this kind. Its memory is never touched, so it costs none until somebody writes."""
        sizes = [dynamic_size if size < 0 else size for size in self.shape]
        tensor = torch.empty_strided(sizes, self.stride, dtype=self.dtype, device=self.device)
        if self.static_address is not None:
            torch._dynamo.mark_static_address(tensor, guard=self.static_address == "guarded")
        for dimension, size in enumerate(self.shape):
            if size < 0:
                torch._dynamo.mark_dynamic(tensor, dimension)
        return tensor


def spec_of(tensor: Tensor) -> TensorSpec:
    """The spec of one tensor; dynamic sizes are those that ``torch._dynamo.mark_dynamic`` marked."""
    dynamic = getattr(tensor, "_dynamo_dynamic_indices", ())
    shape = tuple(-1 if dimension in dynamic else size for dimension, size in enumerate(tensor.shape))
    marked = getattr(tensor, "_dynamo_static_input_type", None)
    return TensorSpec(shape, tuple(tensor.stride()), tensor.dtype, str(tensor.device), marked)


def specs_of(value: Any) -> Any:
    """The same nested tuples with a spec in place of each tensor."""
    if isinstance(value, Tensor):
        return spec_of(value)
    if isinstance(value, tuple):
        items = [specs_of(item) for item in value]
        return (type(value).__name__, *items)
    return value


class ArgumentCheck:
    """Tells whether later arguments are of the kind of the first.

    What was seen at the last call is known by identity, so that a step whose weights, cache and buffers are the same
    objects costs a few comparisons.
    """

    def __init__(self, args: tuple) -> None:
        self._specs = specs_of(args)
        self._seen: Any = args
        self._state = _state()

    def difference(self, args: tuple) -> str | None:
        """What differs, in words; None when nothing does."""
        state = _state()
        if state != self._state:
            return next(
                f"{name} was {was} and is {now}"
                for (name, was), now in zip(self._state.items(), state.values(), strict=True)
                if was != now
            )
        if not _same(self._seen, args):
            sizes: set[int] = set()
            found = _difference("argument", self._specs, args, sizes)
            if found is None and len(sizes) > 1:
                found = f"dynamic sizes were equal and are {sorted(sizes)}"
            if found is None and sizes and min(sizes) < 2:
                found = f"a dynamic size was above 1 and is {min(sizes)}"
            if found is not None:
                return found
            self._seen = args
        return None


def _same(seen: Any, value: Any) -> bool:
    """Whether these are the same objects; tuples are looked into, since NamedTuples are made anew."""
    if value is seen:
        return True
    if not isinstance(value, tuple) or type(value) is not type(seen) or len(value) != len(seen):
        return False
    return all(_same(old, new) for old, new in zip(seen, value, strict=True))


def _difference(name: str, spec: Any, value: Any, sizes: set[int]) -> str | None:
    if isinstance(spec, TensorSpec):
        if not isinstance(value, Tensor):
            return f"{name} was a tensor and is {value!r}"
        shape = tuple(value.shape)
        if len(shape) != len(spec.shape) or any(a not in (b, -1) for a, b in zip(spec.shape, shape, strict=True)):
            return f"{name} was of shape {spec.shape} and is {shape}"
        sizes.update(size for size, known in zip(shape, spec.shape, strict=True) if known < 0)
        if math.prod(shape) > 1 and tuple(value.stride()) != spec.stride:
            return f"{name} was of strides {spec.stride} and is {tuple(value.stride())}"
        if value.dtype != spec.dtype or str(value.device) != spec.device:
            return f"{name} was {spec.dtype} on {spec.device} and is {value.dtype} on {value.device}"
        return f"{name} requires gradients" if value.requires_grad else None
    if isinstance(spec, tuple):
        if not isinstance(value, tuple) or (type(value).__name__, len(value)) != (spec[0], len(spec) - 1):
            return f"{name} was a {spec[0]} of {len(spec) - 1} and is {type(value).__name__}"
        for index, (part, item) in enumerate(zip(spec[1:], value, strict=True)):
            found = _difference(f"{name}[{index}]", part, item, sizes)
            if found is not None:
                return found
        return None
    return None if type(value) is type(spec) and value == spec else f"{name} was {spec!r} and is {value!r}"


def _state() -> dict[str, Any]:
    """What of torch's state goes into compiled code."""
    return {
        "torch's number of threads": torch.get_num_threads(),
        "the default dtype": torch.get_default_dtype(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }
