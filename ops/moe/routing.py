"""Which experts a token uses, and the sum of what they give: references, schemas, registration.

A layer with a mixture of experts (Shazeer et al., 2017, arXiv:1701.06538) is

    weights, experts = route(logits, ...)             each token's k experts
    places, tokens, starts = expert_rows(experts, ...)  the rows of each expert, side by side: both in routed_rows
    y = ...                                           linear layers of the experts, see grouped_linear.py
    out = weighted_sum(y, places, weights)

All shapes are static: which expert has which rows is data alone. A token's bits depend on nothing but its own row.
T tokens, E experts, k experts of a token, D hidden size; R = T * k rows.
"""

import torch
from torch import Tensor

from compiled_llm.ops.library import define_op, on_gpu

# Of routed_linear.
MAX_ROWS = 256
MAX_EXPERTS = 256
MAX_GROUPED_EXPERTS = 128
"""Most where they are chosen by groups, which takes more registers."""

SCORINGS = ("softmax", "softmax_of_chosen", "sigmoid")


_OPS = torch.ops.compiled_llm


def route(
    logits: Tensor, choice_bias: Tensor | None, top_k: int, scoring: str, scale: float = 1.0, groups: int = 1,
    top_groups: int = 1,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Each token's experts, the best first, and their weights. All of it is computed in float32.

    Args:
        logits: ``[T, E]`` float32, bfloat16 or float16, contiguous: the router's.
        choice_bias: ``[E]`` float32, added to the scores for the choice alone, not for the weights (DeepSeek-V3,
            arXiv:2412.19437); None for none.
        top_k: k.
        scoring: what an expert's weight is. "softmax": of all logits; "softmax_of_chosen": of those of the k experts;
            "sigmoid": of its logit, divided by the sum over the k experts.
        scale: of the weights.
        groups, top_groups: experts are chosen from those ``top_groups`` of ``groups`` equal parts of all whose two best
            scores have the largest sums (DeepSeek-V3), or if scores are no sigmoids, whose best score is the largest
            (DeepSeek-V2, arXiv:2405.04434).

    Returns:
        Weights ``[T, k]`` float32 and experts ``[T, k]`` int32. Of equal scores the lower number is first.
    """
    assert scoring in SCORINGS
    return _OPS.route(logits, choice_bias, top_k, scoring, scale, groups, top_groups)


def expert_rows(experts: Tensor, num_tokens: Tensor, used: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of tokens in the order of the experts that they go to.

    Args:
        experts: ``[T, k]`` int32, see ``route``.
        num_tokens: ``[1]`` int32: the first so many tokens are real, the others are padding and go to no expert.
        used: ``[1]`` int64, to which the number of experts that have rows is added.
        num_experts: E.

    Returns:
        places ``[T, k]`` int32: the row of each token and expert, -1 for padding; tokens ``[R]`` int32: the token of
        each row; starts ``[E + 1]`` int32: the rows of expert e are ``starts[e]`` to ``starts[e + 1]``. The rows from
        ``starts[E]`` on belong to nobody.
    """
    return _OPS.expert_rows(experts, num_tokens, used, num_experts)


def routed_rows(
    logits: Tensor, choice_bias: Tensor | None, expert_scale: Tensor | None, num_tokens: Tensor, used: Tensor,
    top_k: int, scoring: str, scale: float = 1.0, groups: int = 1, top_groups: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """``route`` and then ``expert_rows``, whose arguments it has: on a GPU one launch or two.

    Args:
        expert_scale: ``[E]`` float32, of each expert's weights; None for none.

    Returns:
        Weights, places, tokens and starts.
    """
    assert scoring in SCORINGS
    given = logits, choice_bias, expert_scale, num_tokens, used, top_k, scoring, scale, groups, top_groups
    return _OPS.routed_rows(*given) if logits.is_cuda else routed_rows_reference(*given)


def weighted_sum(y: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """``sum(weights[t, j] * y[places[t, j]] for j in range(k))`` in float32, rounded once; 0 for padding.

    Args:
        y: ``[R, D]`` contiguous; float32, bfloat16 or float16.
        places: ``[T, k]`` int32, weights: ``[T, k]`` float32.

    Returns:
        ``[T, D]`` in the dtype of ``y``.
    """
    return _OPS.weighted_sum(y, places, weights)


def weighted_sum_added(
    y: Tensor, places: Tensor, weights: Tensor, beside: Tensor | None, residual: Tensor | None
) -> Tensor:
    """``residual + (weighted_sum(y, places, weights) + beside)``, each sum rounded, in one launch of a GPU.

    Args:
        beside, residual: ``[T, D]`` contiguous, in the dtype of ``y``; None adds nothing.
    """
    return _OPS.weighted_sum_added(y, places, weights, beside, residual)


def route_reference(
    logits: Tensor, choice_bias: Tensor | None, top_k: int, scoring: str, scale: float, groups: int, top_groups: int
) -> tuple[Tensor, Tensor]:
    """The op in plain torch."""
    logits = logits.float()
    scores = logits.sigmoid() if scoring == "sigmoid" else logits
    choice = scores if choice_bias is None else scores + choice_bias
    if top_groups < groups:
        parts = choice.unflatten(-1, (groups, -1))
        best = parts.topk(min(2 if scoring == "sigmoid" else 1, parts.shape[-1]), dim=-1).values.sum(-1)
        left_out = best.argsort(dim=-1, descending=True, stable=True)[:, top_groups:]
        choice = parts.scatter(1, left_out[:, :, None].expand(-1, -1, parts.shape[-1]), -torch.inf).flatten(1)
    experts = choice.argsort(dim=-1, descending=True, stable=True)[:, :top_k]
    chosen = scores.gather(1, experts)
    if scoring == "sigmoid":
        total = sum(chosen.unbind(1), start=torch.full_like(chosen[:, 0], 1e-20))  # in one order on every device
        weights = chosen / total[:, None]
    elif scoring == "softmax":
        weights = logits.softmax(-1).gather(1, experts)
    else:
        weights = chosen.softmax(-1)
    return weights * scale, experts.int()


def expert_rows_reference(
    experts: Tensor, num_tokens: Tensor, used: Tensor, num_experts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The op in plain torch, without looking at a tensor's content on the host."""
    count, top_k = experts.shape
    token = torch.arange(count, device=experts.device)
    keys = torch.where((token < num_tokens)[:, None], experts, num_experts).flatten()
    ordered, rows = keys.sort(stable=True)
    starts = torch.searchsorted(ordered, torch.arange(num_experts + 1, device=experts.device), out_int32=True)
    used += (starts[1:] > starts[:-1]).sum()
    order = torch.arange(len(rows), device=experts.device)
    places = torch.empty_like(rows).scatter_(0, rows, order)
    places = torch.where(keys < num_experts, places, -1)
    return places.int().view(count, top_k), (rows // top_k).int(), starts


def routed_rows_reference(
    logits: Tensor, choice_bias: Tensor | None, expert_scale: Tensor | None, num_tokens: Tensor, used: Tensor,
    top_k: int, scoring: str, scale: float, groups: int, top_groups: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The op as two others."""
    weights, experts = route(logits, choice_bias, top_k, scoring, scale, groups, top_groups)
    if expert_scale is not None:
        weights = weights * expert_scale[experts]
    return weights, *expert_rows(experts, num_tokens, used, logits.shape[1])


def weighted_sum_reference(y: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """The op in plain torch."""
    out = y.new_zeros(places.shape[0], y.shape[1], dtype=torch.float32)
    for place, weight in zip(places.unbind(1), weights.unbind(1), strict=True):
        term = weight[:, None] * y[place.clamp(min=0)].float()
        out += torch.where((place >= 0)[:, None], term, 0.0)
    return out.to(y.dtype)


def weighted_sum_added_reference(
    y: Tensor, places: Tensor, weights: Tensor, beside: Tensor | None, residual: Tensor | None
) -> Tensor:
    """The op in plain torch."""
    total = weighted_sum_reference(y, places, weights)
    total = total if beside is None else total + beside
    return total if residual is None else residual + total


def _fake_route(logits: Tensor, choice_bias: Tensor | None, top_k: int, *args) -> tuple[Tensor, Tensor]:
    weights = logits.new_empty(logits.shape[0], top_k, dtype=torch.float32)
    return weights, torch.empty_like(weights, dtype=torch.int32)


def _fake_rows(experts: Tensor, num_tokens, used, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    return experts.new_empty(experts.shape), experts.new_empty(experts.numel()), experts.new_empty(num_experts + 1)


def _fake_routed(logits: Tensor, choice_bias, expert_scale, num_tokens, used, top_k: int, *args) -> tuple[Tensor, ...]:
    weights, experts = _fake_route(logits, choice_bias, top_k)
    return weights, *_fake_rows(experts, num_tokens, used, logits.shape[1])


def _fake_sum(y: Tensor, places: Tensor, *args) -> Tensor:
    return y.new_empty(places.shape[0], y.shape[1])


_CHOICE = "int top_k, str scoring, float scale, int groups, int top_groups"
define_op(
    f"route(Tensor logits, Tensor? choice_bias, {_CHOICE}) -> (Tensor, Tensor)",
    reference=route_reference,
    fake=_fake_route,
    cpu="rowwise_cpu",
)
define_op(
    "expert_rows(Tensor experts, Tensor num_tokens, Tensor(a!) used, int num_experts) -> (Tensor, Tensor, Tensor)",
    reference=expert_rows_reference,
    fake=_fake_rows,
    cpu="rowwise_cpu",
)
define_op(
    "routed_rows(Tensor logits, Tensor? choice_bias, Tensor? expert_scale, Tensor num_tokens, Tensor(a!) used,"
    f" {_CHOICE}) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=routed_rows_reference,
    fake=_fake_routed,
    gpu=on_gpu("moe.triton_expert_rows:routed_rows"),
)
define_op(
    "weighted_sum(Tensor y, Tensor places, Tensor weights) -> Tensor",
    reference=weighted_sum_reference,
    fake=_fake_sum,
    cpu="rowwise_cpu",
    gpu=on_gpu("moe.triton_routing:weighted_sum"),
)
define_op(
    "weighted_sum_added(Tensor y, Tensor places, Tensor weights, Tensor? beside, Tensor? residual) -> Tensor",
    reference=weighted_sum_added_reference,
    fake=_fake_sum,
    gpu=on_gpu("moe.triton_routing:weighted_sum"),
)
