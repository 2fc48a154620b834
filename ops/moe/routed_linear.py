"""The router of a decode on a GPU, with sum and norm before it and the choice of experts behind: schema, registration.

A router is a small linear layer; the launches around it cost more than reading its weights. ``routing.py`` has the ops
on their own, and ``triton_routed_linear.py`` the kernel.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_llm.ops.library import define_op, on_gpu
from compiled_llm.ops.linear.lora import add_lora_reference
from compiled_llm.ops.moe.routing import SCORINGS, routed_rows_reference
from compiled_llm.ops.rowwise.reference import rms_norm_reference


def routed_linear(
    x: Tensor, delta: Tensor | None, norm: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None,
    choice_bias: Tensor | None, expert_scale: Tensor | None, num_tokens: Tensor, used: Tensor, counters: Tensor,
    top_k: int, scoring: str, scale: float = 1.0, groups: int = 1, top_groups: int = 1, seen_norm: Tensor | None = None,
    multiplier: float = 1.0, lora: Sequence[Tensor] = (),
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``normed = rms_norm(x + delta)`` and ``routed_rows(normed @ weight.T + bias)``, whose other arguments it has.

    All is rounded where the ops on their own round. A row's bits depend on nothing but the row.

    Args:
        x: ``[T, K]`` bfloat16 or float16, at most ``MAX_ROWS`` rows, which may be strided; the last stride is 1.
        delta: as ``x``; the sum is rounded. None adds nothing.
        norm, eps: those of ``rms_norm``, ``[K]``; None: ``x`` is what the router goes by, and there is no ``delta``.
        weight: ``[E, K]`` contiguous, at most ``MAX_EXPERTS`` rows, by groups ``MAX_GROUPED_EXPERTS``; bias: ``[E]`` or
            None: both in the dtype of ``x``, or in float32, in which logits then are.
        seen_norm: ``[K]``, like ``norm``: the router goes by a norm with these weights, times ``multiplier``. None: by
            ``normed``.
        counters: int32, one for each 16 rows and one more, zero before and after.
        lora: what adapters change of ``delta`` before, in the same launch and with the bits of ``lora_followed``: the
            ``[T, inputs]`` that ``delta`` is a product of, and tensors as of ``Surroundings.lora``. ``delta`` is then
            written in place.

    Returns:
        ``x + delta`` ``[T, K]``, without a ``delta`` empty; ``normed`` ``[T, K]``, without a ``norm`` empty; and the
        weights, places, tokens and starts of ``routed_rows``.
    """
    assert scoring in SCORINGS
    assert norm is not None or (delta is None and seen_norm is None)
    assert seen_norm is not None or multiplier == 1.0
    given = (
        x, delta, norm, eps, weight, bias, choice_bias, expert_scale, num_tokens, used, counters, top_k, scoring,
        scale, groups, top_groups, seen_norm, multiplier,
    )  # fmt: skip
    if lora:
        return torch.ops.compiled_llm.changed_routed_linear(*given, list(lora))
    return torch.ops.compiled_llm.routed_linear(*given)


def routed_linear_reference(
    x: Tensor, delta: Tensor | None, norm: Tensor | None, eps: float, weight: Tensor, bias: Tensor | None,
    choice_bias: Tensor | None, expert_scale: Tensor | None, num_tokens: Tensor, used: Tensor, counters: Tensor, *rest,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The op as others."""
    *rule, seen_norm, multiplier = rest
    total = x.new_empty(0) if delta is None else x + delta
    x = x if delta is None else total
    normed = x.new_empty(0) if norm is None else rms_norm_reference(x, norm, eps)
    seen = x if norm is None else normed
    if seen_norm is not None:
        seen = rms_norm_reference(x, seen_norm, eps) * multiplier
    logits = F.linear(seen.float(), weight.float(), None if bias is None else bias.float()).to(weight.dtype)
    return total, normed, *routed_rows_reference(logits, choice_bias, expert_scale, num_tokens, used, *rule)


def changed_routed_linear_reference(x: Tensor, delta: Tensor, *given) -> tuple[Tensor, ...]:
    """The op as others."""
    *rest, (changed_by, *lora) = given
    add_lora_reference(delta, changed_by, *lora[:-1])
    return routed_linear_reference(x, delta, *rest)


def _fake(
    x: Tensor, delta, norm, eps, weight: Tensor, bias, choice_bias, expert_scale, num_tokens, used, counters,
    top_k: int, *rule,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    weights = x.new_empty(x.shape[0], top_k, dtype=torch.float32)
    places = torch.empty_like(weights, dtype=torch.int32)
    rows, starts = places.new_empty(places.numel()), places.new_empty(weight.shape[0] + 1)
    total, normed = (x.new_empty(0 if one is None else x.shape) for one in (delta, norm))
    return total, normed, weights, places, rows, starts


_ARGUMENTS = (
    "Tensor? norm, float eps, Tensor weight, Tensor? bias, Tensor? choice_bias, Tensor? expert_scale,"
    " Tensor num_tokens, Tensor(a!) used, Tensor(b!) counters, int top_k, str scoring, float scale, int groups,"
    " int top_groups, Tensor? seen_norm, float multiplier"
)
_RETURNS = "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
define_op(
    f"routed_linear(Tensor x, Tensor? delta, {_ARGUMENTS}) -> {_RETURNS}",
    reference=routed_linear_reference,
    fake=_fake,
    gpu=on_gpu("moe.triton_routed_linear:routed_linear"),
)
define_op(
    f"changed_routed_linear(Tensor x, Tensor(c!) delta, {_ARGUMENTS}, Tensor[] lora) -> {_RETURNS}",
    reference=changed_routed_linear_reference,
    fake=_fake,
    gpu=on_gpu("moe.triton_routed_linear:routed_linear"),
)
