"""Sums and joins over the ranks of a ``RankGroup``: reference, schema, registration.

Every rank calls the same op with tensors of the same shapes, and gets the same bits. Sums are in an order that depends
neither on who comes first nor on how the work is cut. T rows, D columns.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from compiled_llm.ops.library import define_op, like_first, on_gpu
from compiled_llm.ops.parallel.rank_group import RankGroup, exchange

TREE_LEAVES = 8
"""Parts that ``join_parts`` sums. So up to as many ranks have the same bits."""


def all_reduce(x: Tensor, group: RankGroup) -> Tensor:
    """The sum of all ranks' ``x``, in the order of ranks, in float32, rounded once.

    Args:
        x: ``[T, D]`` contiguous float32, bfloat16 or float16.

    Returns:
        ``[T, D]`` in the dtype of ``x``.

    Raises:
        ValueError: a tensor of another shape, dtype or layout. RuntimeError: another rank has failed. So all ops here.
    """
    return torch.ops.compiled_llm.all_reduce(x, *group)


def all_gather(x: Tensor, group: RankGroup, size: int) -> Tensor:
    """The columns of all ranks, rank after rank.

    Args:
        x: ``[T, n]`` contiguous, of any dtype.
        size: the number of ranks.

    Returns:
        ``[T, size * n]`` in the dtype of ``x``.
    """
    return torch.ops.compiled_llm.all_gather(x, *group, size)


def join_parts(parts: Tensor, group: RankGroup, size: int, dtype: torch.dtype) -> Tensor:
    """The sum of 8 parts, of which each rank has its share in order; the same bits for 1, 2, 4 and 8 ranks.

    The sum is a binary tree of neighbours, ``((p0 + p1) + (p2 + p3)) + ((p4 + p5) + (p6 + p7))``: each rank sums its
    own lower levels (tree-based invariant kernels, arXiv:2511.17826). Rounded once.

    Args:
        parts: ``[P, T, D]`` contiguous float32, P * size = 8.
        size: the number of ranks.
        dtype: of the result: float32, bfloat16 or float16.

    Returns:
        ``[T, D]``.
    """
    return torch.ops.compiled_llm.join_parts(parts, *group, size, str(dtype).removeprefix("torch."))


def least(value: int, group: RankGroup) -> int:
    """The least of all ranks' values. Each rank waits here for the others."""
    size = int(group.place[1])
    return int(all_gather(torch.tensor([[value]]), group, size).min())


def all_reduce_reference(x: Tensor, place: Tensor, memory: Tensor) -> Tensor:
    """The op in plain torch."""
    if int(place[1]) == 1:
        return x.clone()
    first, *others = exchange(x.flatten(), place, memory)
    total = first.float()
    for other in others:
        total += other.float()
    return total.to(x.dtype).view(x.shape)


def all_gather_reference(x: Tensor, place: Tensor, memory: Tensor, size: int) -> Tensor:
    """The op in plain torch."""
    if size == 1:
        return x.clone()
    return torch.cat([piece.view(x.shape) for piece in exchange(x.flatten(), place, memory)], dim=1)


def join_parts_reference(parts: Tensor, place: Tensor, memory: Tensor, size: int, dtype: str) -> Tensor:
    """The op in plain torch."""
    if len(parts) * size != TREE_LEAVES:
        raise ValueError(f"the parts of all ranks must be {TREE_LEAVES}, got {len(parts)} for {size} ranks")
    total = tree_of(parts.unbind())
    if size > 1:
        total = tree_of([piece.view(total.shape) for piece in exchange(total.flatten(), place, memory)])
    return total.to(getattr(torch, dtype), copy=True)


def tree_of(parts: Sequence[Tensor]) -> Tensor:
    """The sum of 1, 2, 4 or 8 parts in float32 as a binary tree of neighbours."""
    while len(parts) > 1:
        parts = [first + second for first, second in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


define_op(
    "all_reduce(Tensor x, Tensor place, Tensor(a!) memory) -> Tensor",
    reference=all_reduce_reference,
    fake=like_first,
    cpu="parallel_cpu",
    gpu=on_gpu("parallel.triton_reductions:all_reduce"),
)
define_op(
    "all_gather(Tensor x, Tensor place, Tensor(a!) memory, int size) -> Tensor",
    reference=all_gather_reference,
    fake=lambda x, place, memory, size: x.new_empty(x.shape[0], x.shape[1] * size),
    cpu="parallel_cpu",
    gpu=on_gpu("parallel.triton_reductions:all_gather"),
)
define_op(
    "join_parts(Tensor parts, Tensor place, Tensor(a!) memory, int size, str dtype) -> Tensor",
    reference=join_parts_reference,
    fake=lambda parts, place, memory, size, dtype: parts.new_empty(parts.shape[1:], dtype=getattr(torch, dtype)),
    cpu="parallel_cpu",
    gpu=on_gpu("parallel.triton_reductions:join_parts"),
)
