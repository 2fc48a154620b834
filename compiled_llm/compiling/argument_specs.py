"""Specs of a compiled function's arguments: their shapes, strides and dtypes, without their contents.

A function compiled ahead of time has no guards, so its arguments are compared with their specs before each call.
Arguments are nested tuples (NamedTuples among them) of tensors, None and numbers.
"""

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.ops.torch_private import (
    DynamicSize,
    TensorGuards,
    dynamic_sizes,
    mark_dynamic_size,
    mark_static_address,
    static_address_kind,
)


class TensorSpec(NamedTuple):
    """A tensor as the compiler sees it.

    Attributes:
        shape: a ``DynamicSize`` where the size may be another in each call.
        stride: in elements. None: the tensor is contiguous, and a size behind the first may be another in each call.
        device: such as "cpu" or "cuda:0".
        static_address: how it was marked to stay at its address: "guarded", "unguarded", or None if it was not.
    """

    shape: tuple[int | DynamicSize, ...]
    stride: tuple[int, ...] | None
    dtype: torch.dtype
    device: str
    static_address: str | None

    def __str__(self) -> str:
        sizes = ", ".join(f"{s.name}, as {s.example}" if isinstance(s, DynamicSize) else str(s) for s in self.shape)
        fixed = "" if self.static_address is None else f", at one address ({self.static_address})"
        order = "contiguous" if self.stride is None else f"of strides {self.stride}"
        return f"{str(self.dtype).removeprefix('torch.')}[{sizes}] {order} on {self.device}{fixed}"

    def make(self, dynamic: Mapping[str, int] = MappingProxyType({})) -> Tensor:
        """An uninitialised tensor of this kind, marked like the original. It takes no memory until it is written.

        Its dynamic sizes are those of ``dynamic``, by name, and the examples.
        """
        sizes = [dynamic.get(s.name, s.example) if isinstance(s, DynamicSize) else s for s in self.shape]
        tensor = torch.empty(sizes, dtype=self.dtype, device=self.device)
        if self.stride is not None:
            tensor = torch.empty_strided(sizes, self.stride, dtype=self.dtype, device=self.device)
        if self.static_address is not None:
            mark_static_address(tensor, guard=self.static_address == "guarded")
        for dimension, size in enumerate(self.shape):
            if isinstance(size, DynamicSize):
                mark_dynamic_size(tensor, dimension, size)
        return tensor


class SameTensor(NamedTuple):
    """The same object as an earlier tensor: tied weights, which are one input of the code. ``number`` counts from 0."""

    number: int

    def __str__(self) -> str:
        return f"the same tensor as number {self.number}"


def spec_of(tensor: Tensor) -> TensorSpec:
    """The spec of one tensor; dynamic are the sizes that ``mark_dynamic_size`` marked."""
    dynamic = dynamic_sizes(tensor)
    shape = tuple(dynamic.get(dimension, size) for dimension, size in enumerate(tensor.shape))
    stride = None if any(dimension > 0 for dimension in dynamic) and tensor.is_contiguous() else tuple(tensor.stride())
    return TensorSpec(shape, stride, tensor.dtype, str(tensor.device), static_address_kind(tensor))


def described_specs(args: tuple, names: Sequence[str]) -> dict[str, str]:
    """The specs of a function's arguments in words, by where they are, as "weights.layers[0].norm".

    Arguments of equal ``specs_of``, and no others, are described alike. ``names``: those of the arguments.
    """
    found: dict[str, str] = {}

    def describe(place: str, spec: Any, value: Any) -> None:
        if isinstance(value, tuple):
            found[place] = f"{spec[0]} of {len(value)}"
            fields = [f".{name}" for name in getattr(value, "_fields", ())] or [f"[{n}]" for n in range(len(value))]
            for field, part, item in zip(fields, spec[1:], value, strict=True):
                describe(f"{place}{field}", part, item)
        else:
            found[place] = str(spec) if isinstance(spec, TensorSpec | SameTensor) else repr(spec)

    specs = specs_of(args)[1:]
    for index, (spec, value) in enumerate(zip(specs, args, strict=True)):
        describe(names[index] if index < len(names) else f"argument {index}", spec, value)
    return found


def specs_of(value: Any) -> Any:
    """The same nested tuples, each with its type's name first, and a spec or ``SameTensor`` in place of each tensor."""
    indices: dict[int, int] = {}  # id of a tensor -> its index

    def spec(value: Any) -> Any:
        if isinstance(value, tuple):
            return (type(value).__name__, *map(spec, value))
        if not isinstance(value, Tensor):
            return value
        if id(value) in indices:
            return SameTensor(indices[id(value)])
        indices[id(value)] = len(indices)
        return spec_of(value)

    return spec(value)


def examples_of(value: Any, dynamic: Mapping[str, int] = MappingProxyType({})) -> Any:
    """The same nested tuples with other tensors, of the same specs. A tensor that occurs twice stays one.

    ``dynamic``: as ``TensorSpec.make`` takes it.
    """
    made: dict[int, Tensor] = {}  # by the id of a tensor

    def example(value: Any) -> Any:
        if isinstance(value, tuple):
            items = [example(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if not isinstance(value, Tensor):
            return value
        if id(value) not in made:
            made[id(value)] = spec_of(value).make(dynamic)
        return made[id(value)]

    examples = example(value)
    _check_strides(list(made.values()))
    return examples


def _check_strides(examples: Sequence[Tensor]) -> None:
    """Assert that no example of a dynamic size is a stride that follows from no sizes, as a KV cache has one.

    To the compiler such a stride is a number that comes with each call, as dynamic sizes are. It may take numbers that
    are equal in the examples for one; torch 2.13 keeps these apart.
    """
    own = {
        stride
        for tensor in examples
        if dynamic_sizes(tensor)
        for dimension, stride in enumerate(tensor.stride())
        if stride != math.prod(tensor.shape[dimension + 1 :])
    }
    for tensor in examples:
        for dimension, size in dynamic_sizes(tensor).items():
            given = tensor.shape[dimension]
            assert given not in own, f"{given} is a stride, and the example of the dynamic size {size.name!r}"


_MOST_SEEN = 64  # arguments of other sizes
_LONG = 0.1  # seconds of a call: to be bound to its arguments would make it no faster, and keeps memory


class Seen:
    """Arguments that were compared, and whether they are still what they were then. ``tensors``: in them, each once."""

    def __init__(self, args: tuple, tensors: list[Tensor]) -> None:
        self._args: Any = args
        self._binds = False  # the next call
        self._was_bound = self._ran_bound = False
        self._again: Any = None
        self._watch(tensors)

    def _watch(self, tensors: list[Tensor]) -> None:
        self._tensors = tensors
        sizes: Any = [list(tensor.shape) for tensor in tensors]
        strides: Any = [list(tensor.stride()) for tensor in tensors]
        self._unchanged = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check

    def has(self, args: tuple) -> bool:
        return same_objects(self._args, args) and self._unchanged(*self._tensors)

    def call(self, function: Callable) -> Any:
        """What ``function`` gives for them.

        The second time it is bound to them, if it has ``ReadyFunction.bind`` and did not take long.
        """
        if self._again is None:
            if self._binds and hasattr(function, "bind"):
                self._binds, self._was_bound = False, True
                result, self._again = function.bind(*self._args)
                return result
            started = time.perf_counter()
            result = function(*self._args)
            self._binds = not self._was_bound and time.perf_counter() - started < _LONG
            return result
        result = self._again()
        if not self._ran_bound:
            self._ran_bound = True
            held = {id(tensor) for tensor in self._again.held()}
            self._watch([tensor for tensor in self._tensors if id(tensor) not in held])
        return result


class ArgumentCheck:
    """Compares the arguments of later calls with the specs of the first.

    Objects that were compared before are not compared again, unless one was changed in place, which torch checks. So a
    step whose weights, cache and buffers are the same objects costs some twenty microseconds with hundreds of tensors.
    The last arguments of each combination of dynamic sizes are kept for that, of 64 of them.

    Attributes:
        last: the arguments that were compared last and did not differ.
    """

    last: Seen | None

    def __init__(self, args: tuple) -> None:
        self._specs = specs_of(args)
        self._state = _state()  # compared as it is, and named where it differs
        self._places = _dynamic_places(self._specs)
        self.forget()

    def forget(self) -> None:
        """Keep no arguments any more."""
        self._seen: dict[tuple[int, ...], Seen] = {}
        self.last = None

    def difference(self, args: tuple) -> str | None:
        """What differs, in words; None when nothing does."""
        if _state() != self._state:
            was, now = (_named(state) for state in (self._state, _state()))
            name = next(name for name in was if was[name] != now[name])
            return f"{name} was {was[name]} and is {now[name]}"
        try:
            sizes = tuple(_at(args, place).shape[dimension] for place, dimension in self._places)
        except (AttributeError, IndexError, TypeError):  # other arguments altogether: what differs is said below
            sizes = ()
        known = self._seen.pop(sizes, None)  # and comes behind all others, of which the first is left out
        if known is not None and known.has(args):
            self.last = self._seen[sizes] = known
            return None
        tensors: dict[int, tuple[int, Tensor]] = {}
        found = _difference(self._specs, args, {}, tensors)
        if found is not None:
            return f"argument{found}"
        if len(self._seen) >= _MOST_SEEN:
            del self._seen[next(iter(self._seen))]
        self.last = self._seen[sizes] = Seen(args, [tensor for _, tensor in tensors.values()])
        return None


def _dynamic_places(specs: Any) -> list[tuple[tuple[int, ...], int]]:
    """Where to find each dynamic size in arguments of these ``specs``: the indices of a tensor, and its dimension."""
    places: dict[str, tuple[tuple[int, ...], int]] = {}

    def look(spec: Any, place: tuple[int, ...]) -> None:
        if isinstance(spec, TensorSpec):
            for dimension, size in enumerate(spec.shape):
                if isinstance(size, DynamicSize):
                    places.setdefault(size.name, (place, dimension))
        elif isinstance(spec, tuple) and not isinstance(spec, SameTensor):
            for index, part in enumerate(spec[1:]):  # the first is a type's name
                look(part, (*place, index))

    look(specs, ())
    return list(places.values())


def _at(value: Any, place: tuple[int, ...]) -> Any:
    for index in place:
        value = value[index]
    return value


def same_objects(one: Any, other: Any) -> bool:
    """Whether nested tuples of the same types hold the same objects; the tuples themselves may differ."""
    if one is other:
        return True
    if not isinstance(other, tuple) or type(other) is not type(one) or len(other) != len(one):
        return False
    return all(map(same_objects, one, other))


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors of nested tuples in their order, each as often as it occurs."""
    if isinstance(value, tuple):
        return [tensor for item in value for tensor in tensors_in(item)]
    return [value] if isinstance(value, Tensor) else []


_device = functools.cache(torch.device)  # which compares faster than its name


def _difference(spec: Any, value: Any, sizes: dict[str, int], tensors: dict[int, tuple[int, Tensor]]) -> str | None:
    """What differs, as it is said behind the name of ``value``.

    Collects the dynamic ``sizes`` by name, and all ``tensors`` by their id, each with its number, from 0. Arguments of
    new sizes are compared while their step waits: that takes a microsecond or two a tensor.
    """
    if isinstance(spec, SameTensor):
        same = id(value) in tensors and tensors[id(value)][0] == spec.number
        return None if same else " was the same tensor as an earlier one, and is not"
    if isinstance(spec, TensorSpec):
        if not isinstance(value, Tensor):
            return f" was a tensor and is {value!r}"
        if id(value) in tensors:
            return " was a tensor of its own and is the same as an earlier one"
        tensors[id(value)] = len(tensors), value
        shape = value.shape
        if shape != spec.shape:  # always where one of them is dynamic
            expected = _expected_shape(spec.shape, tuple(shape), sizes)
            if expected != shape:
                return f" was of shape {expected} and is {tuple(shape)}"
        if spec.stride is None:
            if not value.is_contiguous():
                return f" was contiguous and is of strides {value.stride()}"
        elif value.stride() != spec.stride and math.prod(shape) > 1:
            return f" was of strides {spec.stride} and is {value.stride()}"
        if value.dtype is not spec.dtype or value.device != _device(spec.device):
            return f" was {spec.dtype} on {spec.device} and is {value.dtype} on {value.device}"
        return " requires gradients" if value.requires_grad else None
    if isinstance(spec, tuple):
        if not isinstance(value, tuple) or type(value).__name__ != spec[0] or len(value) != len(spec) - 1:
            return f" was a {spec[0]} of {len(spec) - 1} and is {type(value).__name__}"
        for index, item in enumerate(value):
            found = _difference(spec[index + 1], item, sizes, tensors)
            if found is not None:
                return f"[{index}]{found}"
        return None
    return None if type(value) is type(spec) and value == spec else f" was {spec!r} and is {value!r}"


def _expected_shape(
    spec: tuple[int | DynamicSize, ...], shape: tuple[int, ...], sizes: dict[str, int]
) -> tuple[int | str, ...]:
    """What ``shape`` must be. ``sizes``: the dynamic sizes of the tensors before it; new ones are added."""
    if len(shape) != len(spec):
        return tuple(size.name if isinstance(size, DynamicSize) else size for size in spec)
    return tuple(
        sizes.setdefault(size.name, given) if isinstance(size, DynamicSize) else size
        for size, given in zip(spec, shape, strict=True)
    )


def _state() -> tuple[Any, ...]:
    """torch's state that goes into compiled code."""
    autocast = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else "off"
    return torch.get_num_threads(), torch.get_default_dtype(), autocast, torch.are_deterministic_algorithms_enabled()


def _named(state: tuple[Any, ...]) -> dict[str, Any]:
    """``_state`` as JSON values by readable name."""
    threads, dtype, autocast, is_deterministic = state
    return {
        "torch's number of threads": threads,
        "the default dtype": str(dtype),
        "autocast": str(autocast),
        "deterministic algorithms": is_deterministic,
    }


def settings() -> dict[str, Any]:
    """torch's state that goes into compiled code, besides its number of threads: JSON values by readable name."""
    _, *others = _named(_state()).items()
    return dict(others)
