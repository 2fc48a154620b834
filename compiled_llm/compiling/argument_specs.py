"""What a compiled function knows of its arguments: their shapes, strides and dtypes, without their contents.

A function compiled ahead of time runs on whatever it is given, so its arguments are compared with these before each
call. Arguments are nested tuples (NamedTuples among them) of tensors, None and numbers.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards


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


class Again(NamedTuple):
    """The very tensor that stands at ``place``, counted from 0: tied weights, which are one input of the code."""

    place: int


def spec_of(tensor: Tensor) -> TensorSpec:
    """The spec of one tensor; dynamic sizes are those that ``torch._dynamo.mark_dynamic`` marked."""
    dynamic = getattr(tensor, "_dynamo_dynamic_indices", ())
    shape = tuple(-1 if dimension in dynamic else size for dimension, size in enumerate(tensor.shape))
    marked = getattr(tensor, "_dynamo_static_input_type", None)
    return TensorSpec(shape, tuple(tensor.stride()), tensor.dtype, str(tensor.device), marked)


def specs_of(value: Any) -> Any:
    """The same nested tuples with a spec in place of each tensor, or an ``Again`` where it stood before."""
    return _specs(value, {})


def _specs(value: Any, places: dict[int, int]) -> Any:
    if isinstance(value, Tensor):
        if id(value) in places:
            return Again(places[id(value)])
        places[id(value)] = len(places)
        return spec_of(value)
    if isinstance(value, tuple):
        items = [_specs(item, places) for item in value]
        return (type(value).__name__, *items)
    return value


class ArgumentCheck:
    """Tells whether later arguments are of the kind of the first.

    What was seen at the last call is known by identity, so that a step whose weights, cache and buffers are the same
    objects costs some twenty microseconds with hundreds of tensors: torch looks whether one was resized in place.
    """

    def __init__(self, args: tuple) -> None:
        self._specs = specs_of(args)
        self._state = _state()
        self._remember(args)

    def _remember(self, args: tuple) -> None:
        self._seen: Any = args
        self._tensors = list({id(tensor): tensor for tensor in _tensors(args)}.values())  # each once, as torch wants
        sizes: Any = [list(tensor.shape) for tensor in self._tensors]
        strides: Any = [list(tensor.stride()) for tensor in self._tensors]
        guards = TensorGuards(*self._tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        self._as_they_were = guards.check

    def difference(self, args: tuple) -> str | None:
        """What differs, in words; None when nothing does."""
        state = _state()
        if state != self._state:
            return next(
                f"{name} was {was} and is {now}"
                for (name, was), now in zip(self._state.items(), state.values(), strict=True)
                if was != now
            )
        if not (_same(self._seen, args) and self._as_they_were(*self._tensors)):
            sizes: set[int] = set()
            found = _difference("argument", self._specs, args, sizes, {})
            if found is None and len(sizes) > 1:
                found = f"dynamic sizes were equal and are {sorted(sizes)}"
            if found is None and sizes and min(sizes) < 2:
                found = f"a dynamic size was above 1 and is {min(sizes)}"
            if found is not None:
                return found
            self._remember(args)
        return None


def _same(seen: Any, value: Any) -> bool:
    """Whether these are the same objects; tuples are looked into, since NamedTuples are made anew."""
    if value is seen:
        return True
    if not isinstance(value, tuple) or type(value) is not type(seen) or len(value) != len(seen):
        return False
    return all(_same(old, new) for old, new in zip(seen, value, strict=True))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return [value] if isinstance(value, Tensor) else []


def _difference(name: str, spec: Any, value: Any, sizes: set[int], places: dict[int, int]) -> str | None:
    """What differs. ``sizes`` collects the dynamic ones, ``places`` where each tensor stood first, by its id."""
    if isinstance(spec, Again):
        same = isinstance(value, Tensor) and places.get(id(value)) == spec.place
        return None if same else f"{name} was a tensor that stood before, and is not"
    if isinstance(spec, TensorSpec):
        if not isinstance(value, Tensor):
            return f"{name} was a tensor and is {value!r}"
        if id(value) in places:
            return f"{name} was a tensor of its own and is one that stood before"
        places[id(value)] = len(places)
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
            found = _difference(f"{name}[{index}]", part, item, sizes, places)
            if found is not None:
                return found
        return None
    return None if type(value) is type(spec) and value == spec else f"{name} was {spec!r} and is {value!r}"


def _state() -> dict[str, Any]:
    return {"torch's number of threads": torch.get_num_threads(), **settings()}


def settings() -> dict[str, Any]:
    """What of torch's state besides its threads goes into compiled code: JSON values by readable name."""
    return {
        "the default dtype": str(torch.get_default_dtype()),
        "autocast": str(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else "off",
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
    }
