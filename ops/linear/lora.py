"""Low-rank changes of a linear layer, another one for each row: layout, reference, schema, registration.

    y[t] += B[s] @ (A[s] @ x[t]) * scale[s]        s = slots[t] - 1; a row whose slot is 0 stays as it is

LoRA: Hu et al., 2021, arXiv:2106.09685; many adapters in a batch: Punica, arXiv:2310.18547, S-LoRA, arXiv:2311.03285.
A layer may compute several parts at once, such as queries, keys and values: each has an A and a B of its own.

Letters: T rows, K inputs, N outputs of all parts, S slots, P parts, R the largest rank, a multiple of 16. The outputs
of B lie in tiles of 16, the last tile of each part filled up with zeros, so that a kernel reads B from its beginning to
its end:

    b[s, tile of part p, r, j] = B[s, p][16 * tile + j, r]
"""

import itertools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from compiled_llm.ops import native
from compiled_llm.ops.library import define_op, on_gpu
from compiled_llm.ops.moe.routing import weighted_sum_added_reference
from compiled_llm.ops.rowwise import reference

TILE = 16


class LoraWeights(NamedTuple):
    """What all slots of a layer hold. Written in place: a step reads the tensors where they are."""

    a: Tensor  # [S, P, R, K]
    b: Tensor  # [S, tiles, R, 16]
    ranks: Tensor  # [S, P] int32; 0: the adapter leaves the part as it is. What lies behind the rank is never read
    scales: Tensor  # [S, P] float32
    starts: Tensor  # [P + 1] int32: the first output of each part, and N

    @classmethod
    def empty(
        cls, parts: list[int], in_features: int, num_slots: int, rank: int, dtype: torch.dtype, device: torch.device
    ) -> "LoraWeights":
        """Slots that change nothing, of ranks up to ``rank``. ``parts``: outputs of each part."""
        most = -(-rank // TILE) * TILE
        starts = torch.tensor([0, *parts]).cumsum(0, dtype=torch.int32)
        shapes = (num_slots, len(parts), most, in_features), (num_slots, sum(map(_tiles, parts)), most, TILE)
        a, b = (native.zeros_on(device, shape, dtype) for shape in shapes)
        return cls(
            a,
            b,
            torch.zeros(num_slots, len(parts), dtype=torch.int32, device=device),
            torch.zeros(num_slots, len(parts), device=device),
            starts.to(device),
        )


def tiles_of(b: Tensor) -> Tensor:
    """A part's ``B`` ``[outputs, rank]`` as ``LoraWeights.b`` has it: ``[tiles, rank, 16]`` contiguous."""
    filled = torch.nn.functional.pad(b, (0, 0, 0, -len(b) % TILE))
    return filled.unflatten(0, (-1, TILE)).transpose(1, 2).contiguous()


def _tiles(outputs: int) -> int:
    return -(-outputs // TILE)


def add_lora(y: Tensor, x: Tensor, slots: Tensor, weights: LoraWeights) -> Tensor:
    """Add to each row of ``y`` what the adapter of its slot changes; both sums are in float32, in one order.

    A row is computed by itself: its bits depend neither on the other rows nor on their slots. ``A x * scale`` is not
    rounded; ``y`` is rounded once. Where no row has a slot, nothing is read but ``slots``.

    Args:
        y: ``[T, N]`` float32, bfloat16 or float16, the last stride 1; written in place.
        x: ``[T, K]`` in the dtype of ``y``, the last stride 1.
        slots: ``[T]`` int32, 0 to S.
        weights: in the dtype of ``y``, contiguous.

    Returns:
        ``[T, P, R]`` float32: ``A x * scale``, as far as rows and ranks go; the rest is anything.

    Raises:
        ValueError: a tensor of another shape, dtype or layout. IndexError, on a CPU: a slot that there is not.
    """
    return torch.ops.compiled_llm.add_lora(y, x, slots, *weights)


def add_lora_reference(
    y: Tensor, x: Tensor, slots: Tensor, a: Tensor, b: Tensor, ranks: Tensor, scales: Tensor, starts: Tensor
) -> Tensor:
    """The op in plain torch: a slot and a part after the other."""
    shrunk = torch.zeros(len(x), *a.shape[1:3], device=x.device)
    bounds = starts.tolist()
    for slot in range(len(a)):
        rows = (slots == slot + 1).nonzero()[:, 0]
        tile = 0
        for part, (start, end) in enumerate(itertools.pairwise(bounds)):
            rank, count = int(ranks[slot, part]), _tiles(end - start)
            own = b[slot, tile : tile + count, :rank].transpose(1, 2).flatten(0, 1)[: end - start]
            tile += count
            if not rank or not len(rows):
                continue
            terms = x[rows].float() @ a[slot, part, :rank].float().t() * scales[slot, part]
            shrunk[rows, part, :rank] = terms
            y[rows, start:end] = (y[rows, start:end].float() + terms @ own.float().t()).to(y.dtype)
    return shrunk


class LoraRows(NamedTuple):
    """Which slot each row of a layer has: a linear one, a mixture's experts, or the heads of latent attention.

    Of G experts or heads, S adapters are S * G slots, those of an adapter side by side.
    """

    slots: Tensor  # [T] int32, of the tokens' adapters, from 1 on, or 0
    tokens: Tensor | None = None  # [R] int32, of experts' rows, as ``expert_rows`` gives them
    bounds: Tensor | None = None  # [G + 1] int32, likewise ``starts``
    groups: int = 1  # G
    gathered: bool = False  # x has rows of tokens, and not of experts


class Following(NamedTuple):
    """What is computed of a changed ``y`` in the same launch: one of these, or nothing."""

    activation: str = ""  # one of ``ACTIVATIONS``, or "clamped_swiglu" with alpha and limit
    gated: bool = True
    alpha: float = 0.0
    limit: float = 0.0
    places: Tensor | None = None  # the sum of experts, as ``weighted_sum_added``
    weights: Tensor | None = None
    beside: Tensor | None = None
    residual: Tensor | None = None  # also of that sum; else ``norm_of_sum`` of it and ``y``, whose arguments follow
    delta_norm: Tensor | None = None
    scale: Tensor | None = None
    norm: Tensor | None = None  # None: the sum alone. Without a residual: an RMS norm of so many first outputs
    norm_bias: Tensor | None = None  # of a layer norm: ``add_layer_norm`` of residual and ``y``, or ``y + beside``
    eps: float = 0.0


def lora_followed(
    y: Tensor, x: Tensor, rows: LoraRows, weights: LoraWeights, flags: Tensor, following: Following | None = None
) -> tuple[Tensor, Tensor]:
    """``add_lora`` and what follows it, in one launch of a GPU. Elsewhere they are ops of their own.

    Args:
        y: ``[R, N]`` as of ``add_lora``; of heads ``[T, G, N]`` contiguous. Written in place.
        x: ``[R, K]``; of heads ``[T, G, K]``; of experts whose ``rows.gathered`` is true ``[T, K]``.
        flags: int32 ``[2]``, zeros, and zeros again when the op has run; two ops that run at the same time need their
            own.

    Returns:
        what follows, ``[R, N]``, or ``[R, N / 2]`` of a gate, or ``[T, N]`` of a sum of experts, or as many columns as
        a norm without a residual has; and the sum ``[R, N]`` that a norm is of. Else empty tensors.

    Raises:
        ValueError: a tensor of another shape, dtype or layout; an unknown activation.
    """
    following = following or Following()
    return torch.ops.compiled_llm.lora_followed(y, x, *rows, *weights, flags, *following)[:2]


def slots_of_rows(slots: Tensor, tokens: Tensor | None, bounds: Tensor | None, groups: int) -> Tensor:
    """The slot of each row, ``[R]`` int32, in the order of ``y``: of heads, those of a token side by side."""
    if bounds is None:
        group = torch.arange(groups, dtype=torch.int32, device=slots.device).repeat(len(slots))
        own = slots.repeat_interleave(groups) if groups > 1 else slots
    else:
        assert tokens is not None, "of experts' rows"
        places = torch.arange(len(tokens), device=slots.device)
        group = torch.searchsorted(bounds[1:], places, right=True, out_int32=True)
        own = slots[tokens.clamp(0, len(slots) - 1)] * (group < groups)  # nobody's rows have any token
    return ((own - 1) * groups + group + 1) * (own > 0)


def lora_followed_reference(y: Tensor, x: Tensor, slots, tokens, bounds, groups, gathered, *args: Any) -> Any:
    """The op in plain torch: its numbers, not its order."""
    weights, after = args[:5], Following(*args[6:])
    own = slots_of_rows(slots, tokens, bounds, groups)
    rows = x[tokens.clamp(0, len(x) - 1)] if gathered else x
    changed = y.flatten(0, -2) if groups > 1 else y
    shrunk = add_lora_reference(changed, rows.flatten(0, -2), own, *weights)
    out, total = x.new_empty(0), x.new_empty(0)
    if after.places is not None:
        assert after.weights is not None, "the sum of experts has both"
        out = weighted_sum_added_reference(changed, after.places, after.weights, after.beside, after.residual)
    elif after.norm_bias is not None:
        assert after.residual is not None, "a layer norm is of a sum"
        assert after.norm is not None
        delta = changed if after.beside is None else changed + after.beside
        total, out = reference.add_layer_norm_reference(after.residual, delta, after.norm, after.norm_bias, after.eps)
    elif after.residual is not None:
        norms = changed, after.delta_norm, after.scale, after.norm, after.eps
        total, out = reference.sum_of_norms_reference(after.residual, None, *norms)
    elif after.norm is not None:
        out = reference.rms_norm_reference(changed[:, : len(after.norm)], after.norm, after.eps)
    elif after.activation == "clamped_swiglu":
        out = reference.clamped_swiglu_reference(changed, after.alpha, after.limit)
    elif after.activation:
        of = reference.gated_activation_reference if after.gated else reference.activation_reference
        out = of(changed, after.activation)
    return out, total, shrunk


def _followed_fake(y: Tensor, x: Tensor, slots, tokens, bounds, groups, gathered, a, *args: Any) -> Any:
    after, wide, rows = Following(*args[5:]), y.shape[-1], math.prod(y.shape[:-1])
    shrunk, nothing = x.new_empty(rows, *a.shape[1:3], dtype=torch.float32), x.new_empty(0)
    if after.places is not None:
        return x.new_empty(after.places.shape[0], wide), nothing, shrunk
    if after.residual is not None:
        return x.new_empty(0 if after.norm is None else (rows, wide)), x.new_empty(rows, wide), shrunk
    if after.norm is not None:
        return x.new_empty(rows, after.norm.shape[0]), nothing, shrunk
    if after.activation:
        return x.new_empty(rows, wide // 2 if after.gated else wide), nothing, shrunk
    return nothing, x.new_empty(0), shrunk


def _fake(y: Tensor, x: Tensor, slots: Tensor, a: Tensor, *weights: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], *a.shape[1:3], dtype=torch.float32)


define_op(
    "add_lora(Tensor(a!) y, Tensor x, Tensor slots, Tensor a, Tensor b, Tensor ranks, Tensor scales, Tensor starts)"
    " -> Tensor",
    reference=add_lora_reference,
    fake=_fake,
    cpu="lora_cpu",
    gpu=on_gpu("linear.triton_lora:add_lora"),
)

define_op(
    "lora_followed(Tensor(a!) y, Tensor x, Tensor slots, Tensor? tokens, Tensor? bounds, int groups, bool gathered,"
    " Tensor a, Tensor b, Tensor ranks, Tensor scales, Tensor starts, Tensor flags, str activation, bool gated,"
    " float alpha, float limit, Tensor? places, Tensor? weights, Tensor? beside, Tensor? residual,"
    " Tensor? delta_norm, Tensor? scale, Tensor? norm, Tensor? norm_bias, float eps) -> (Tensor, Tensor, Tensor)",
    reference=lora_followed_reference,
    fake=_followed_fake,
    gpu=on_gpu("linear.triton_lora:lora_followed"),
)
