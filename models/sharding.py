"""What one of several ranks has of a model: tensor parallelism, layer by layer.

A layer is cut by its outputs, in whole units such as heads, or by its inputs, or each rank has all of it. Behind one
that is cut by its inputs the ranks' outputs are summed; those of the others a rank keeps to itself (Shoeybi et al.,
2019, arXiv:1909.08053). Where there are more ranks than units, as of keys and values, several have the same unit.
"""

import dataclasses
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from compiled_llm.ops.sampling.rank_sampling import VOCABULARY_CHUNK


class Section(NamedTuple):
    """Neighbouring outputs or inputs of a layer.

    Attributes:
        size: how many.
        units: of one size, in them: a rank has whole ones. 1, where ``repeats``: each rank has all of the section.
        name: of the units, in messages: a field of ``config.json``.
        repeats: whether several ranks may have the same unit.
    """

    size: int
    units: int
    name: str
    repeats: bool = False

    @property
    def outputs(self) -> "Cut":
        """The cut of a layer all of whose outputs are this."""
        return Cut(outputs=(self,))

    @property
    def inputs(self) -> "Cut":
        """The same of its inputs."""
        return Cut(inputs=(self,))


class Cut(NamedTuple):
    """How ranks share a layer, or a tensor: by its outputs (its rows), by its inputs, or by neither: each has all."""

    outputs: tuple[Section, ...] = ()
    inputs: tuple[Section, ...] = ()


REPLICATED = Cut()


def by_outputs(*sections: Section) -> Cut:
    """The outputs, in the model's order, are ``sections``."""
    return Cut(outputs=sections)


def of_heads(config: Any, size: int) -> Section:
    """Of query heads."""
    return Section(size, config.num_heads, "num_attention_heads")


def of_kv_heads(config: Any, size: int) -> Section:
    """Of heads of keys and values."""
    return Section(size, config.num_kv_heads, "num_key_value_heads", repeats=True)


def of_elements(size: int, name: str = "intermediate_size") -> Section:
    """Of single elements, as between the two layers of an MLP."""
    return Section(size, size, name)


def of_all(size: int) -> Section:
    """Which each rank has."""
    return Section(size, 1, "", repeats=True)


PARTS = 8  # of the sum of a layer that is cut by its inputs, with ``Shard.exact``


@dataclasses.dataclass(frozen=True)
class Shard:
    """A rank of ``size``.

    Attributes:
        exact: whether such sums are those of ``PARTS`` parts whatever the number of ranks, and so have the same bits.
        whole_experts: whether a rank has whole experts, and not its part of each.
    """

    rank: int
    size: int
    exact: bool = False
    whole_experts: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank must be from 0 to {self.size - 1}, given {self.rank}")
        if self.exact and PARTS % self.size:
            raise ValueError(
                f"tensor_parallel_size must be 1, 2, 4 or {PARTS} with tensor_parallel_exact=True, whose sums have "
                f"{PARTS} parts, given {self.size}. Choose one of them, or tensor_parallel_exact=False"
            )

    def units(self, section: Section) -> tuple[int, int]:
        """The first of a section's units that the rank has, and how many it has.

        Raises:
            ValueError: ranks cannot have equally many.
        """
        if section.units % self.size == 0:
            count = section.units // self.size
            return self.rank * count, count
        if section.repeats and self.size % section.units == 0:
            return self.rank // (self.size // section.units), 1
        allowed = "divide, or be a multiple of," if section.repeats else "divide"
        sizes = [n for n in range(1, section.units + 1) if section.units % n == 0]
        raise ValueError(
            f"tensor_parallel_size must {allowed} {section.name}={section.units}, given {self.size}. Choose one of "
            f"{', '.join(map(str, sizes[:12]))}"
        )

    def own(self, sections: tuple[Section, ...]) -> Tensor:
        """Which of the elements of ``sections`` the rank has, ``[n]`` int64, ascending."""
        found, start = [], 0
        for section in sections:
            (first, count), width = self.units(section), section.size // section.units
            found.append(torch.arange(start + first * width, start + (first + count) * width))
            start += section.size
        return torch.cat(found)

    def own_rows(self, num_rows: int) -> Tensor:
        """Which rows of a vocabulary of ``num_rows`` the rank has: equally many; past the end the last one again.

        Of a vocabulary with as many chunks as there are ranks these are whole chunks, as sampling over ranks needs.
        """
        unit = VOCABULARY_CHUNK if num_rows >= VOCABULARY_CHUNK * self.size else 1
        count = -(-num_rows // self.size // unit) * unit
        return torch.arange(self.rank * count, (self.rank + 1) * count).clamp(max=num_rows - 1)


# Fields of families' configs that count what ranks share, by what config.json calls them, and whether they repeat.
_COUNTS = {
    "num_heads": ("num_attention_heads", False),
    "num_kv_heads": ("num_key_value_heads", True),
    "num_global_kv_heads": ("num_global_key_value_heads", True),
    "linear_num_key_heads": ("linear_num_key_heads", True),
    "linear_num_value_heads": ("linear_num_value_heads", False),
    "mamba_n_heads": ("mamba_n_heads", False),
    "mamba_num_heads": ("mamba_num_heads", False),
    "mamba_n_groups": ("mamba_n_groups", True),
    "n_groups": ("n_groups", True),
}

C = TypeVar("C")


def rank_config(config: C, shard: Shard) -> C:
    """``config`` with the heads that a rank has: for ``Family.layers``, ``forward`` and ``head``.

    ``Family.take`` gets the whole config: names and shapes are the checkpoint's.

    Raises:
        ValueError: the ranks cannot have equally many.
    """
    own = {
        field: shard.units(Section(getattr(config, field), getattr(config, field), *named))[1]
        for field, named in _COUNTS.items()
        if hasattr(config, field)
    }
    return dataclasses.replace(config, **own, num_ranks=shard.size)  # type: ignore[type-var]
