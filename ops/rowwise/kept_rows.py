"""Some rows of a tensor that is kept as a whole: schema and registration. On a GPU one launch in the place of two."""

import torch
from torch import Tensor

from compiled_llm.ops.library import define_op, on_gpu


def keep_rows(x: Tensor, indices: Tensor, kept: Tensor) -> Tensor:
    """Copy ``x`` to the first rows of ``kept``, and give the rows ``indices`` of ``x``.

    Args:
        x: ``[T, D]`` contiguous.
        indices: ``[R]`` int32 or int64, from 0 to ``T - 1``.
        kept: ``[T, D]`` contiguous, or with more rows; dtype of ``x``.

    Returns:
        ``[R, D]``, contiguous.
    """
    if x.is_cuda:
        return torch.ops.compiled_llm.keep_rows(x, indices, kept)
    return keep_rows_reference(x, indices, kept)


def keep_rows_reference(x: Tensor, indices: Tensor, kept: Tensor) -> Tensor:
    """The op in plain torch; what a CPU computes, compiled."""
    kept[: x.shape[0]] = x
    return torch.index_select(x, 0, indices)


define_op(
    "keep_rows(Tensor x, Tensor indices, Tensor(a!) kept) -> Tensor",
    reference=keep_rows_reference,
    fake=lambda x, indices, kept: x.new_empty(indices.shape[0], x.shape[1]),
    gpu=on_gpu("rowwise.triton_kept_rows:keep_rows"),
)
