"""Layers whose weights lie in host memory, and come to the device for each step (``cpu_offload_gb``).

Whole layers lie there, spread evenly over the model, so that one comes while those before it compute. Two buffers on
the device take them in turns. A layer's weights begin to come as soon as the last layer that had its buffer has been
computed; the first two come as the step begins. So nothing is left over from an earlier step, and every step (one of a
few layers less, too) has the same fetches in the same places: before the norms that layers begin with.

Families and kinds of linear layer know nothing of it: such a layer is one of its kind, over the buffers.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.models.config import ModelConfig
from compiled_llm.models.layers.residual import FetchingNorm
from compiled_llm.models.linears.adapted import AnyAdapted
from compiled_llm.models.linears.heads import HeadLinear
from compiled_llm.models.linears.protocol import (
    AroundKind,
    GroupedLinear,
    Linear,
    LinearKind,
    StoredLinear,
    Take,
)
from compiled_llm.models.stages import number_in, numbers_of

_BUFFERS = 2  # one is read while the other is filled
_ALIGNMENT = 512  # bytes, of tensors in pinned memory
_LEAST = _BUFFERS + 1  # layers: fewer take as much of the device in buffers as by themselves


def with_weights(layer: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A layer with ``change`` of each tensor that is offloaded: matrices of its linear layers, those of experts too.

    What is small stays (norms, biases), and what is written to: counters, adapters' slots.
    """
    return _changed(layer, change, of_linear=False)


def _changed(value: Any, change: Callable[[Tensor], Tensor], of_linear: bool) -> Any:
    if isinstance(value, Tensor):
        return change(value) if of_linear and value.dim() > 1 else value
    if isinstance(value, AnyAdapted):
        return value._replace(plain=_changed(value.plain, change, True))
    if not isinstance(value, tuple):
        return value
    of_linear = of_linear or isinstance(value, Linear | GroupedLinear)
    made = [_changed(item, change, of_linear) for item in value]
    return type(value)(*made) if hasattr(value, "_fields") else tuple(made)


def sizes_of_layer(layer: Any) -> list[int]:
    """Bytes of each tensor of a layer that is offloaded."""
    found: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor.nbytes)
        return tensor

    with_weights(layer, note)
    return found


def bytes_of_layer(layer: Any) -> int:
    """Those of a layer that are offloaded."""
    return sum(sizes_of_layer(layer))


def spread(count: int, num_layers: int) -> tuple[int, ...]:
    """So many of the layers, each the last of as many layers as the others, or one more or less."""
    return tuple((number + 1) * num_layers // count - 1 for number in range(count))


def chosen_layers(weights: Any, gib: float, architecture: str) -> tuple[int, ...]:
    """The layers to offload, at least ``gib`` GiB of weights; of a model whose ``weights`` may be descriptions.

    Raises:
        ValueError: the model has less, or its layers do not begin with a norm.
    """
    sizes = [bytes_of_layer(layer) for layer in weights.layers]
    if not all(hasattr(layer, "input_norm") for layer in weights.layers):
        raise ValueError(
            f"cpu_offload_gb must be 0 for {architecture}, whose layers do not begin with a norm that fetches could be "
            f"put before, given {gib:g}"
        )
    for count in range(_LEAST, len(sizes) + 1):
        found = spread(count, len(sizes))
        if sum(sizes[number] for number in found) >= gib * 2**30:
            return found
    most = sum(sizes) / 2**30 if len(sizes) >= _LEAST else 0.0
    raise ValueError(
        f"cpu_offload_gb must be at most {most:.6g} for {architecture} (the weights of all its {len(sizes)} layers, of "
        f"which {_LEAST} or more are offloaded), given {gib:g}"
    )


@dataclasses.dataclass(frozen=True)
class Offloading(AroundKind):
    """A ``LinearKind`` that makes layers of the kind ``plain``, and puts the weights of some into host memory.

    Attributes:
        layers: their places in the model.
        numbers: the same as they are in the names of tensors.
        put: copies a tensor into host memory.
    """

    plain: LinearKind
    layers: tuple[int, ...]
    numbers: frozenset[int]
    put: Callable[[Tensor], Tensor]

    @classmethod
    def of(
        cls, plain: LinearKind, config: ModelConfig, layers: tuple[int, ...], put: Callable[[Tensor], Tensor]
    ) -> "Offloading":
        return cls(plain, layers, numbers_of(config, layers), put)

    def take(self, take: Take, parts: Sequence[StoredLinear]) -> Linear:
        return self._put(take, parts[0], self.plain.take(take, parts))

    def take_table(self, take: Take, part: StoredLinear) -> Linear:
        return self.plain.take_table(take, part)

    def take_experts(self, take: Take, experts: Sequence[Sequence[StoredLinear]], top_k: int) -> GroupedLinear:
        return self._put(take, experts[0][0], self.plain.take_experts(take, experts, top_k))

    def take_heads(
        self, take: Take, parts: Sequence[StoredLinear], num_heads: int, first: int
    ) -> tuple[HeadLinear, HeadLinear]:
        return self._put(take, parts[0], self.plain.take_heads(take, parts, num_heads, first))

    def _put(self, take: Take, part: StoredLinear, made: Any) -> Any:
        stays = part.role != "layer" or number_in(part.name) not in self.numbers
        return made if stays or take.device.type == "meta" else with_weights(made, self.put)


class OffloadedBytes(NamedTuple):
    """Of a model's weights: ``host``, those in host memory; ``buffers``, what they come to on the device."""

    host: int
    buffers: int


def with_fetches(weights: Any, layers: tuple[int, ...], device: torch.device) -> tuple[Any, OffloadedBytes]:
    """``weights`` of which ``layers`` lie in host memory, as a step takes them: over buffers on ``device``.

    A tensor of a layer has the buffer of those like it in every second of ``layers``.
    """
    made, buffers, host_bytes = list(weights.layers), dict[Any, Tensor](), 0
    begun: list[list[tuple[Tensor, Tensor]]] = [[] for _ in made]
    awaited: list[tuple[Tensor, ...]] = [() for _ in made]
    for turn, number in enumerate(layers):
        pairs: list[tuple[Tensor, Tensor]] = []
        made[number] = with_weights(made[number], _Turn(turn % _BUFFERS, buffers, pairs, device))
        # When its buffers are free: the layer that had them before has been computed then.
        begun[0 if turn < _BUFFERS else layers[turn - _BUFFERS] + 1] += pairs
        awaited[number] = tuple(buffer for _, buffer in pairs)
        host_bytes += sum(host.nbytes for host, _ in pairs)
    for number, layer in enumerate(made):
        if begun[number] or awaited[number]:
            norm = FetchingNorm(layer.input_norm, tuple(begun[number]), awaited[number])
            made[number] = layer._replace(input_norm=norm)
    sizes = OffloadedBytes(host_bytes, sum(buffer.nbytes for buffer in buffers.values()))
    return weights._replace(layers=tuple(made)), sizes


class _Turn:
    """Gives each tensor of a layer its buffer, and notes both."""

    def __init__(
        self, turn: int, buffers: dict[Any, Tensor], pairs: list[tuple[Tensor, Tensor]], device: torch.device
    ) -> None:
        self._turn, self._buffers, self._pairs, self._device = turn, buffers, pairs, device
        self._alike: Counter[Any] = Counter()  # tensors of the layer so far, by what decides their buffer

    def __call__(self, host: Tensor) -> Tensor:
        kind = self._turn, host.dtype, tuple(host.shape), tuple(host.stride())
        key = *kind, self._alike[kind]
        self._alike[kind] += 1
        if key not in self._buffers:
            self._buffers[key] = torch.empty_strided(host.shape, host.stride(), dtype=host.dtype, device=self._device)
        self._pairs.append((host, self._buffers[key]))
        return self._buffers[key]


class PinnedMemory:
    """Host memory that the device copies from while it computes: large pieces, in which tensors lie side by side.

    torch rounds pinned memory up to powers of two; the pieces are such, so none of that is lost.

    Args:
        sizes: bytes of the tensors to come, about; the last pieces are no larger than what these leave.
        piece_bytes: of a piece, a power of two; larger tensors have larger ones.
        pinned: False where there is no GPU.
    """

    def __init__(self, sizes: Iterable[int], piece_bytes: int = 2**31, pinned: bool = True) -> None:
        sizes = tuple(sizes)
        self._sizes, self._piece_bytes, self._pinned = sizes, piece_bytes, pinned
        self._left = sum(map(_aligned, sizes))
        self._pieces: list[Tensor] = []
        self._room: list[tuple[int, int]] = []  # of each piece: its bytes, and those in use

    @property
    def nbytes(self) -> int:
        """Of all pieces."""
        return sum(piece.nbytes for piece in self._pieces)

    @property
    def foreseen_nbytes(self) -> int:
        """The same of ``sizes``, before any of the tensors has come."""
        planned = PinnedMemory(self._sizes, self._piece_bytes)
        for size in self._sizes:
            planned._place(size)
        return sum(nbytes for nbytes, _ in planned._room)

    def put(self, tensor: Tensor) -> Tensor:
        """A copy of ``tensor``, which has no gaps, with its strides."""
        size = tensor.nbytes
        span = 1 + sum((count - 1) * stride for count, stride in zip(tensor.shape, tensor.stride(), strict=True))
        assert span * tensor.itemsize == size, f"a weight with gaps: {tensor.shape}, {tensor.stride()}"
        number, start = self._place(size)
        if number == len(self._pieces):
            nbytes, _ = self._room[number]
            self._pieces.append(torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pinned))
        place = self._pieces[number][start : start + size]
        copy = place.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
        return copy.copy_(tensor)

    def close(self) -> None:
        """Let the pieces go: each is free once no tensor in it is in use."""
        self._pieces.clear()
        self._room.clear()

    def _place(self, size: int) -> tuple[int, int]:
        """For so many bytes: the first piece with room for them, and where they begin in it."""
        number = next((n for n, (nbytes, used) in enumerate(self._room) if used + size <= nbytes), len(self._room))
        if number == len(self._room):
            least = max(size, min(self._piece_bytes, self._left))
            self._room.append((1 << (least - 1).bit_length(), 0))
        nbytes, start = self._room[number]
        self._room[number] = nbytes, start + _aligned(size)
        self._left -= _aligned(size)
        return number, start


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
