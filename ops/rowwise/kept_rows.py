"""Some rows of a tensor that is kept as a whole: schema and registration. On a GPU one launch in the place of two."""

import torch
from torch import Tensor

from compiled_llm.ops.library import LIBRARY

LIBRARY.define("keep_rows(Tensor x, Tensor indices, Tensor(a!) kept) -> Tensor")


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


@torch.library.register_fake("compiled_llm::keep_rows", lib=LIBRARY)
def _fake(x: Tensor, indices: Tensor, kept: Tensor) -> Tensor:
    return x.new_empty(indices.shape[0], x.shape[1])


def _cuda(*args) -> Tensor:
    from compiled_llm.ops.rowwise import triton_kept_rows  # the first call on a GPU loads Triton, not the import

    return triton_kept_rows.keep_rows(*args)


LIBRARY.impl("keep_rows", keep_rows_reference, "CompositeExplicitAutograd")
LIBRARY.impl("keep_rows", _cuda, "CUDA")
