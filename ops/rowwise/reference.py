"""What the row-wise ops compute, in plain torch. Every result is rounded where transformers' eager models round it."""

import torch
import torch.nn.functional as F
from torch import Tensor

ACTIVATIONS = ("silu", "gelu_tanh", "gelu", "relu2")
GATES = (*ACTIVATIONS, "clamped_swiglu")


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The op in plain torch, over the last dimension of ``x`` of any shape."""
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return weight * y.to(x.dtype) if weight.dtype == x.dtype else (y * weight).to(x.dtype)


def add_rms_norm_reference(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The op in plain torch."""
    x = x + delta
    return x, rms_norm_reference(x, weight, eps)


def gated_rms_norm_reference(
    x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int, norm_first: bool
) -> Tensor:
    """The op in plain torch."""
    wide = torch.promote_types(x.dtype, torch.float32)
    silu = F.silu(gate.to(wide))
    y = x.to(wide) if norm_first else x.to(wide) * silu
    y = y.unflatten(-1, (-1, group_size))
    y = (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)).flatten(-2).to(x.dtype)
    y = y * weight.repeat(x.shape[-1] // len(weight))
    return (y * silu).to(x.dtype) if norm_first else y


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The op in plain torch, over the last dimension of ``x`` of any shape."""
    wide = torch.promote_types(x.dtype, torch.float32)
    y = x.to(wide)
    y = y - y.mean(-1, keepdim=True)
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return (y * weight.to(wide) + bias.to(wide)).to(x.dtype)


def add_layer_norm_reference(
    x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The op in plain torch."""
    x = x + delta
    return x, layer_norm_reference(x, weight, bias, eps)


def rope_reference(
    qkv: Tensor, cos_sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, num_heads: int, num_kv_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The op in plain torch."""
    heads = qkv.unflatten(-1, (-1, cos_sin.shape[1]))
    q, k = heads[:, :num_heads], heads[:, num_heads : num_heads + num_kv_heads]
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm_reference(q, q_norm, eps), rms_norm_reference(k, k_norm, eps)
    return _rotated(q, cos_sin), _rotated(k, cos_sin)


def _rotated(x: Tensor, cos_sin: Tensor) -> Tensor:
    cos, sin = cos_sin[:, None].chunk(2, dim=-1)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([(first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)], dim=-1)


def gated_activation_reference(gate_up: Tensor, activation: str) -> Tensor:
    """The op in plain torch."""
    gate, up = gate_up.chunk(2, dim=-1)
    return activation_reference(gate, activation) * up


def activation_reference(x: Tensor, activation: str) -> Tensor:
    """The op in plain torch."""
    if activation == "silu":
        return F.silu(x)
    if activation == "relu2":
        return F.relu(x).square()
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def clamped_swiglu_reference(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """The op in plain torch."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * (gate * torch.sigmoid(gate * alpha))).to(gate_up.dtype)


def soft_cap_reference(x: Tensor, cap: float) -> Tensor:
    """The op in plain torch."""
    return torch.tanh(x / cap) * cap


def scaled_sum_reference(x: Tensor, delta: Tensor, scale: Tensor) -> Tensor:
    """The op in plain torch."""
    return ((x + delta).float() * scale).to(x.dtype)


def sigmoid_gated_reference(x: Tensor, gate: Tensor) -> Tensor:
    """The op in plain torch."""
    return x * torch.sigmoid(gate)


def log_sum_exp_reference(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The op in plain torch."""
    logits = logits.float()
    peak = logits.amax(dim=-1)
    return peak, (logits - peak[:, None]).exp().sum(dim=-1).log()


def keep_rows_reference(x: Tensor, indices: Tensor, kept: Tensor) -> Tensor:
    """The op in plain torch; what a CPU computes, compiled."""
    kept[: x.shape[0]] = x
    return torch.index_select(x, 0, indices)


def write_slots_reference(cache: Tensor, slots: Tensor, x: Tensor, column: int) -> None:
    """The op in plain torch; what a GPU computes, compiled."""
    size = cache.shape[1]
    cache.narrow(2, column, x.shape[1]).index_put_((slots // size, slots % size), x)


def rows_at_reference(x: Tensor, indices: Tensor) -> Tensor:
    """The op in plain torch; what a GPU computes, compiled."""
    return torch.index_select(x, 0, indices)


def table_rows_reference(table: Tensor, indices: Tensor) -> Tensor:
    """The op in plain torch."""
    return torch.index_select(table, 0, indices)


def qk_norm_reference(qkv: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float) -> Tensor:
    """The op in plain torch."""
    q, k, v = qkv.split([len(q_norm), len(k_norm), len(k_norm)], dim=1)
    return torch.cat([rms_norm_reference(q, q_norm, eps), rms_norm_reference(k, k_norm, eps), v], dim=1)


def sum_of_norms_reference(
    x: Tensor, x_norm: Tensor | None, y: Tensor, y_norm: Tensor | None, scale: Tensor | None, norm: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The op in plain torch. Without a ``norm`` the second result is empty."""
    x = x if x_norm is None else rms_norm_reference(x, x_norm, eps)
    total = x + (y if y_norm is None else rms_norm_reference(y, y_norm, eps))
    total = total if scale is None else (total * scale).to(x.dtype)
    return total, x.new_empty(0) if norm is None else rms_norm_reference(total, norm, eps)
