"""What the attention ops take, in three parts: how queries and keys are turned, where keys are, and how they are seen.

Names, shapes and dtypes of tensors are those of the ops (``rotary_attention.py``, ``paged_attention.py``).
"""

from typing import NamedTuple, Protocol

from torch import Tensor


class Turn(NamedTuple):
    """What is done to a layer's queries, keys and values before queries attend."""

    cos_sin: Tensor
    q_norm: Tensor | None
    k_norm: Tensor | None
    v_norm: Tensor | None
    query_scale: Tensor | None
    eps: float


class Keys(NamedTuple):
    """Where a layer's keys and values are, and where those of this step go."""

    k_cache: Tensor
    v_cache: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    slot_mapping: Tensor
    block_table: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor


class AttentionKind(Protocol):
    """What a layer's attention is like: how its queries see keys."""

    @property
    def num_heads(self) -> int: ...

    @property
    def scale(self) -> float:
        """``sm_scale`` of the ops."""

    @property
    def masked_window(self) -> int:
        """``window`` of the ops."""

    @property
    def soft_cap(self) -> float: ...

    @property
    def max_query_len(self) -> int: ...

    @property
    def exact(self) -> bool: ...
