"""What a published layout of quantised linear layers has to provide, and what these layouts share.

N out_features, K in_features, G groups of a row, as in ops/linear/quantized_weight.py.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from compiled_llm.ops.linear.quantized_weight import QuantizedRows, WeightFormat

_MOST_INPUTS = 1 << 24  # in a group; no layer has more
_MOST_EXPONENT = 252  # of the scales of fp4: 6 * 2 ** (252 - 127) is finite in float32
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class StoredPart(NamedTuple):
    """What a checkpoint has, or may have, under a name.

    Attributes:
        shapes, dtypes: any of these; -1 in a shape stands for any size.
        required: whether it must be there.
        used: whether ``decode`` reads it; the others are allowed and left.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...] = FLOATS
    required: bool = True
    used: bool = True


class Scheme(Protocol):
    """How the linear layers of a checkpoint are kept, and how they are computed.

    Attributes:
        form: how the kernels keep the weights.
        activations: "model": they stay in the model's dtype; "int8": they are quantised;
            "int8_groups": each group of a row.
        static_activations: whether the checkpoint has one scale for all activations, the tensor ``input_scale``.
        ordered: whether inputs may have an order of their own.
        in_pieces: name of the tensor of which ``decode`` gets rows alone; None: it gets whole tensors.
    """

    @property
    def form(self) -> WeightFormat: ...

    @property
    def activations(self) -> str: ...

    @property
    def static_activations(self) -> bool: ...

    @property
    def ordered(self) -> bool: ...

    @property
    def in_pieces(self) -> str | None: ...

    def stored(self, out_features: int, in_features: int) -> dict[str, StoredPart]:
        """The tensors of a layer, by what follows the layer's name and a dot.

        Raises:
            ValueError: layers of this size cannot be kept so.
        """

    def kept(self, dtypes: Mapping[str, torch.dtype], model: torch.dtype) -> WeightFormat:
        """``form``, its scales and zero points in the fewest bytes that are exact where a layer's tensors are such."""

    def order(self, tensors: Mapping[str, Tensor]) -> Tensor | None:
        """The input that each column of the decoded codes is for, ``[K]`` int32; None: its own.

        Raises:
            ValueError: it is no order of the inputs in whole groups.
        """

    def decode(self, tensors: Mapping[str, Tensor], first: int, count: int) -> QuantizedRows:
        """Rows ``first`` to ``first + count``, the columns in ``order``.

        Args:
            tensors: those of ``stored`` that the checkpoint has and that are used. Of the tensor ``in_pieces`` only
                these rows, of others all.

        Raises:
            ValueError: values that no layer has, such as a scale that is NaN.
        """


def kept_group(size: int, where: str) -> tuple[int, int]:
    """Group size of a checkpoint -> (that of the kernels, how many of the kernels' groups one of these makes)."""
    if size == -1:
        return 0, 1
    if 0 < size <= _MOST_INPUTS and size % 128 == 0:
        return 128, size // 128
    if 0 < size < 128 and size % 16 == 0:
        return size, 1
    raise ValueError(
        f"config.json: {where} must be -1, a multiple of 16 below 128, or one of 128 up to 2^24, given {size!r:.100}. "
        "Quantise the model again with such groups"
    )


def usual_dtypes(stored: Mapping[str, StoredPart], dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Of the tensors ``Scheme.stored``, as checkpoints of models in ``dtype`` usually have them."""
    return {name: dtype if dtype in part.dtypes else part.dtypes[0] for name, part in stored.items()}


def repeat_groups(of_groups: Tensor, times: int, num_groups: int) -> Tensor:
    """``[n, G]`` with each column as often as the kernels have groups in it, cut to ``num_groups``."""
    return of_groups if times == 1 else of_groups.repeat_interleave(times, 1)[:, :num_groups]


def checked_scales(scales: Tensor, name: str) -> Tensor:
    """Scales in float32. ``ValueError`` where one is not finite."""
    scales = scales.float()
    if not scales.isfinite().all():
        raise ValueError(f"{name} must hold finite numbers, found NaN or infinite ones: the file is damaged")
    return scales


def checked_zero(zeros: Tensor, expected: int, name: str) -> None:
    """``ValueError`` unless all of a symmetric layer's zero points are what symmetric codes have."""
    if not (zeros == expected).all():
        raise ValueError(
            f"{name} must be {expected} everywhere, as config.json says that the weights are symmetric, found "
            f"{int(zeros.min())} to {int(zeros.max())}"
        )


def group_order(g_idx: Tensor, group_size: int, name: str) -> Tensor | None:
    """Group of each input, ``[K]`` -> the inputs group by group, ``[K]`` int32; None where they lie so."""
    inputs = len(g_idx)
    size = group_size if group_size > 0 else inputs
    expected = torch.arange(inputs, device=g_idx.device) // size
    order = torch.argsort(g_idx, stable=True)
    if not torch.equal(g_idx[order].long(), expected):
        raise ValueError(
            f"{name} must place {size} inputs in each of {-(-inputs // size)} groups, numbered from 0; found groups "
            f"{int(g_idx.min())} to {int(g_idx.max())}, not all of that size"
        )
    return None if torch.equal(g_idx.long(), expected) else order.to(torch.int32)


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """``[n, w]`` int32 -> ``[n, w * 32 / bits]`` uint8, the lowest bits of a word first."""
    held = words.contiguous().view(torch.uint8)
    return held if bits == 8 else unpack_nibbles(held)


def unpack_nibbles(held: Tensor) -> Tensor:
    """``[n, b]`` bytes -> ``[n, 2 b]`` uint8 from 0 to 15, the lower four bits first."""
    held = held.view(torch.uint8)
    return torch.stack([held & 15, held >> 4], -1).flatten(1)


def signed(codes: Tensor, bits: int) -> Tensor:
    """Codes from 0 on, uint8 -> int8 around 0."""
    return (codes ^ 0x80).view(torch.int8) if bits == 8 else codes.view(torch.int8) - (1 << bits - 1)


def check_whole_groups(in_features: int, size: int) -> None:
    """``ValueError`` unless rows are whole groups."""
    if in_features % size:
        raise ValueError(f"in_features must be a multiple of {size} where weights are fp4, found {in_features}")


def power_of_two_scales(exponents: Tensor, name: str) -> Tensor:
    """e8m0 codes -> float32. ``ValueError`` for 255, which is NaN (OCP MX v1.0, 5.4.1), and what makes 6 infinite."""
    if (exponents > _MOST_EXPONENT).any():
        raise ValueError(
            f"{name} must be at most {_MOST_EXPONENT}, found {int(exponents.max())}: weights would be infinite or NaN, "
            "so the file is damaged"
        )
    return torch.exp2(exponents.float() - 127)
