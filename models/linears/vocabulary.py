"""An embedding and a head of which each of several ranks has the rows of some tokens.

A rank looks up the tokens that it has, and the sum over the ranks has the rows of all. Of logits it gives those of its
tokens: the likeliest of all is joined of one token of each rank. What else is chosen of all logits, or all of these, is
told by ranks that have whole chunks of tokens (``OwnTokens``), or all logits are gathered.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.models.linears.protocol import Linear
from compiled_llm.ops.parallel.rank_group import RankGroup
from compiled_llm.ops.parallel.reductions import all_gather, all_reduce, join_parts
from compiled_llm.ops.sampling.rank_sampling import VOCABULARY_CHUNK
from compiled_llm.ops.sampling.reference import NO_TOKEN


class Ranks(NamedTuple):
    """The ranks that share a layer.

    Attributes:
        exact: as ``Shard.exact``.
    """

    group: RankGroup
    size: int
    exact: bool

    def sum_of(self, products: Sequence[Tensor]) -> Tensor:
        """The sum ``[T, D]`` of all ranks' ``products``: one of each; or, if exact, equal shares of ``PARTS``."""
        if not self.exact:
            return all_reduce(products[0], self.group)
        return join_parts(torch.stack([y.float() for y in products]), self.group, self.size, products[0].dtype)

    def gathered(self, x: Tensor) -> Tensor:
        """The columns of all ranks ``[T, size * n]``."""
        return all_gather(x.contiguous(), self.group, self.size)


class OwnTokens(NamedTuple):
    """Which tokens' logits a rank has, where these are whole chunks: tensors, so that one graph serves all ranks."""

    first: Tensor  # [1] int64
    group: RankGroup


class VocabularyRows(NamedTuple):
    """An embedding or a head, or both, of which a rank has the rows of some tokens."""

    plain: Linear  # [ceil(V / size), D]; those past the end repeat the last
    first: Tensor  # [1] int64: the rank's first token
    ranks: Ranks
    out_features: int  # V

    @property
    def in_features(self) -> int:
        return self.plain.in_features

    @property
    def nbytes(self) -> int:
        return self.plain.nbytes

    @property
    def cpu_ops(self) -> tuple[str, ...]:
        return (*self.plain.cpu_ops, "parallel_cpu")

    @property
    def own_tokens(self) -> OwnTokens | None:
        """None: ranks have no whole chunks, so what is made of their logits needs all of them."""
        whole = self.plain.out_features % VOCABULARY_CHUNK == 0
        return OwnTokens(self.first, self.ranks.group) if whole else None

    def apply(self, x: Tensor) -> Tensor:
        return self.gathered(self.plain.apply(x))

    def gathered(self, own: Tensor) -> Tensor:
        """The logits of all tokens ``[T, V]``, of the rank's ``[T, n]``."""
        y = self.ranks.gathered(own)
        if y.shape[1] == self.out_features:
            return y
        # Not ``contiguous``: a single row would keep the stride of the longer one, and functions are compiled for one.
        return y[:, : self.out_features].clone(memory_format=torch.contiguous_format)

    def join_greedy(self, own: Tensor, tokens: Tensor) -> None:
        """Of the rank's logits ``[T, n]`` and the likeliest of its tokens ``[T]`` int64: that of all in their place."""
        largest = own.amax(1).double()
        of_ranks = self.ranks.gathered(torch.stack((largest, (tokens.clamp(min=0) + self.first).double()), 1))
        values, ids = of_ranks[:, ::2], of_ranks[:, 1::2]
        best = values.amax(1)
        # The lowest id of equally likely ones. Rows past the vocabulary repeat its last one, which comes first.
        first = torch.where(values == best[:, None], ids, self.out_features).amin(1)
        tokens.copy_(torch.where(best.isfinite(), first.long(), NO_TOKEN))

    def rows(self, ids: Tensor) -> Tensor:
        count = self.plain.out_features
        own = ids - self.first
        y = self.plain.rows(own.clamp(0, count - 1))
        # All others give zeros, so the sum is exact.
        return all_reduce(torch.where(((own >= 0) & (own < count))[:, None], y, 0), self.ranks.group)


class OwnLogits(NamedTuple):
    """A ``VocabularyRows`` that gives the logits of the rank's tokens ``[T, n]`` alone."""

    of: VocabularyRows

    @property
    def out_features(self) -> int:
        return self.of.plain.out_features

    @property
    def in_features(self) -> int:
        return self.of.in_features

    @property
    def nbytes(self) -> int:
        return self.of.nbytes

    @property
    def cpu_ops(self) -> tuple[str, ...]:
        return self.of.cpu_ops

    def apply(self, x: Tensor) -> Tensor:
        return self.of.plain.apply(x)

    def rows(self, ids: Tensor) -> Tensor:
        return self.of.rows(ids)


def shared_head(weights: Any) -> VocabularyRows | None:
    """The head of a model's weights, where each of several ranks has the rows of some tokens."""
    head = weights.head
    return head if isinstance(head, VocabularyRows) and head.ranks.size > 1 else None
