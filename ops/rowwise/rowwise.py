"""The row-wise ops: schemas and registration. ``reference.py`` says what they compute.

A compiler fuses these loops by itself, but cuts them by their sizes: a reduction over one row gets another order than
the same over eight, and fused code skips roundings that unfused code makes. As ops they have one order for every number
of rows. So a row's bits depend on nothing but the row, compiled or not.

Shapes: T tokens, D hidden size, N query heads, K KV heads, H head_dim, I intermediate size. Rows may be strided, the
last stride is 1; dtypes are float32, bfloat16 or float16. All results are fresh, contiguous tensors.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_llm.ops.library import define_op, like_first, on_gpu
from compiled_llm.ops.parallel.rank_group import RankGroup
from compiled_llm.ops.parallel.reductions import all_gather_reference
from compiled_llm.ops.rowwise import reference

_OPS = torch.ops.compiled_llm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / rms(x) * weight`` (Zhang and Sennrich, 2019, arXiv:1910.07467), ``[T, D]`` -> ``[T, D]``.

    The norm is computed in float32. A ``weight`` ``[D]`` in the dtype of ``x`` multiplies what has been rounded to it,
    as Llama does; a float32 one multiplies before the rounding, as Gemma does with its ``1 + w``.
    """
    return _OPS.rms_norm(x, weight, eps)


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``x + delta``, rounded to their dtype, and its ``rms_norm``: two ``[T, D]``."""
    return _OPS.add_rms_norm(x, delta, weight, eps)


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int, norm_first: bool) -> Tensor:
    """``rms_norm`` of each group of ``x`` with a gate, ``[T, D]`` -> ``[T, D]``.

    With ``norm_first`` it is ``rms_norm(x) * silu(gate)``, as in Qwen3-Next, where a group is a head; without it
    ``rms_norm(x * silu(gate))``, as in Mamba-2. Rounded where these models round.

    Args:
        gate: ``[T, D]``, dtype of ``x``.
        weight: ``[D]``, or ``[group_size]`` where all groups have the same; dtype of ``x``.
        group_size: divides D.
    """
    return _OPS.gated_rms_norm(x, gate, weight, eps, group_size, norm_first)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """``(x - mean(x)) / std(x) * weight + bias`` (Ba et al., 2016, arXiv:1607.06450), ``[T, D]`` -> ``[T, D]``.

    ``weight`` and ``bias`` ``[D]`` have the dtype of ``x``. Computed in float32 and rounded once.
    """
    return _OPS.layer_norm(x, weight, bias, eps)


def add_layer_norm(x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``x + delta``, rounded to their dtype, and its ``layer_norm``: two ``[T, D]``."""
    return _OPS.add_layer_norm(x, delta, weight, bias, eps)


def rope(
    qkv: Tensor, cos_sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, num_heads: int, num_kv_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Rotary position embeddings (Su et al., 2021, arXiv:2104.09864) of queries and keys, after a norm of each head.

    Args:
        qkv: ``[T, (N + K) * H]`` or more columns: queries, keys (none where K is 0) and what is not turned.
        cos_sin: ``[T, H]`` float32: cosines, then sines. A head's first half pairs with its second. H is even.
        q_norm, k_norm: ``[H]``, weights of ``rms_norm`` for each head; None for none.
        eps: of the norms.

    Returns:
        Queries ``[T, N, H]`` and keys ``[T, K, H]``.
    """
    return _OPS.rope(qkv, cos_sin, q_norm, k_norm, num_heads, num_kv_heads, eps)


def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    """``activation(gate) * up`` (Shazeer, 2020, arXiv:2002.05202) of ``[T, 2 * I]``, the two side by side: ``[T, I]``.

    ``activation``: "silu", "gelu" (Hendrycks and Gimpel, 2016, arXiv:1606.08415), or "gelu_tanh" for GELU with the tanh
    in the place of the error function.
    """
    assert activation in reference.ACTIVATIONS
    return _OPS.gated_activation(gate_up, activation)


def activation(x: Tensor, activation: str) -> Tensor:
    """``activation(x)`` of ``[T, I]``; those of ``gated_activation``."""
    assert activation in reference.ACTIVATIONS
    return _OPS.activation(x, activation)


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """``(up + 1) * gate * sigmoid(alpha * gate)`` of ``[T, 2 * I]``, gate and up side by side: ``[T, I]`` (gpt-oss).

    Before that the gate is at most ``limit``, and up from ``-limit`` to ``limit``. Computed in float32, rounded once.
    """
    return _OPS.clamped_swiglu(gate_up, alpha, limit)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """``cap * tanh(x / cap)`` for a positive ``cap``, ``[T, D]`` -> ``[T, D]`` (Gemma 2, arXiv:2408.00118)."""
    return _OPS.soft_cap(x, cap)


def scaled_sum(x: Tensor, delta: Tensor, scale: Tensor) -> Tensor:
    """``(x + delta) * scale``, ``[T, D]`` each and ``scale`` ``[1]`` float32: the sum is rounded before the product."""
    return _OPS.scaled_sum(x, delta, scale)


def sigmoid_gated(x: Tensor, gate: Tensor) -> Tensor:
    """``x * sigmoid(gate)``, ``[T, D]``; ``gate`` is ``[T, D]`` or ``[T, 1]``, dtype of ``x``.

    The sigmoid is rounded before the product, as in Qwen3-Next.
    """
    return _OPS.sigmoid_gated(x, gate)


def log_sum_exp(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest element and ``log(sum(exp(logits - largest)))`` of each row of ``[T, V]``: two ``[T]`` float32."""
    return _OPS.log_sum_exp(logits)


def log_sum_exp_of_ranks(own: Tensor, group: RankGroup, vocab_size: int) -> tuple[Tensor, Tensor]:
    """``log_sum_exp`` of the logits of all ranks, bit for bit; nobody gathers them.

    Args:
        own: ``[T, n]``, the logits of the rank's tokens: the ranks' one after the other are the vocabulary's. What
            stands past the vocabulary is not looked at.
        vocab_size: V, at most n times the number of ranks.
    """
    return _OPS.log_sum_exp_of_ranks(own, *group, vocab_size)


def qk_norm(qkv: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float) -> Tensor:
    """``qkv`` with ``rms_norm`` of its queries and of its keys in their places.

    Args:
        qkv: ``[T, (N + 2 * K) * H]``: queries, keys and values side by side.
        q_norm, k_norm: ``[N * H]`` and ``[K * H]``, of one dtype: that of ``qkv`` or float32.

    Returns:
        As ``qkv``, contiguous.
    """
    if qkv.is_cuda:
        return torch.ops.compiled_llm.qk_norm(qkv, q_norm, k_norm, eps)
    q, k, v = qkv.split([len(q_norm), len(k_norm), len(k_norm)], dim=1)
    return torch.cat([rms_norm(q, q_norm, eps), rms_norm(k, k_norm, eps), v], dim=1)


def sum_of_norms(
    x: Tensor, x_norm: Tensor | None, y: Tensor, y_norm: Tensor | None, eps: float, scale: Tensor | None = None
) -> Tensor:
    """``rms_norm(x, x_norm, eps) + rms_norm(y, y_norm, eps)``, the sum rounded before ``scale`` multiplies it.

    Args:
        x, y: ``[T, D]``, of one dtype.
        x_norm, y_norm: ``[D]``; None: no norm.
        scale: ``[1]`` float32, or None.

    Returns:
        ``[T, D]``.
    """
    if x.is_cuda:
        return torch.ops.compiled_llm.sum_of_norms(x, x_norm, y, y_norm, scale, None, eps)[0]
    x = x if x_norm is None else rms_norm(x, x_norm, eps)
    y = y if y_norm is None else rms_norm(y, y_norm, eps)
    return x + y if scale is None else scaled_sum(x, y, scale)


def norm_of_sum(
    x: Tensor, delta: Tensor, delta_norm: Tensor | None, norm: Tensor, eps: float, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``sum_of_norms(x, None, delta, delta_norm, eps, scale)``, and its ``rms_norm`` by ``norm``: two ``[T, D]``."""
    if x.is_cuda:
        return torch.ops.compiled_llm.sum_of_norms(x, None, delta, delta_norm, scale, norm, eps)
    if scale is not None:
        total = sum_of_norms(x, None, delta, delta_norm, eps, scale)
        return total, rms_norm(total, norm, eps)
    return add_rms_norm(x, delta if delta_norm is None else rms_norm(delta, delta_norm, eps), norm, eps)


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
    return reference.keep_rows_reference(x, indices, kept)


def write_slots(cache: Tensor, slots: Tensor, x: Tensor, column: int = 0) -> None:
    """Write the rows of ``x`` to their slots of ``cache``, from ``column`` on.

    On a CPU that is an op, which runs in one list with those of layers; for a GPU it is compiled.

    Args:
        cache: ``[B, S, C]`` contiguous: B blocks of S slots.
        slots: ``[T]`` int32, each from 0 to ``B * S - 1``.
        x: ``[T, D]``, dtype of ``cache``; ``column + D`` is at most C.

    Raises:
        ValueError: a tensor of another shape, dtype or layout.
        IndexError: a slot that there is not.
    """
    if cache.is_cuda:
        reference.write_slots_reference(cache, slots, x, column)
    else:
        _OPS.write_slots(cache, slots, x, column)


def rows_at(x: Tensor, indices: Tensor) -> Tensor:
    """The rows ``indices`` of ``x``, ``[R, D]``, contiguous.

    On a CPU that is an op, which runs in one list with those of layers; for a GPU it is compiled.

    Args:
        x: ``[T, D]``; rows may be strided, the last stride is 1.
        indices: ``[R]`` int32, from 0 to ``T - 1``.

    Raises:
        ValueError: a tensor of another shape, dtype or layout.
        IndexError: a row that there is not.
    """
    return reference.rows_at_reference(x, indices) if x.is_cuda else _OPS.rows_at(x, indices)


def table_rows(table: Tensor, indices: Tensor) -> Tensor:
    """Rows of a table, as ``F.embedding``, for layers that all read them: on a GPU they are written once.

    Inductor would compute a gather anew for each op that takes its result.

    Args:
        table: ``[L, D]`` contiguous.
        indices: ``[T]`` int32 or int64, from 0 to ``L - 1``.

    Returns:
        ``[T, D]``, contiguous.
    """
    if table.is_cuda:
        return torch.ops.compiled_llm.table_rows(table, indices)
    return F.embedding(indices, table)


def _two_like_first(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return like_first(x), like_first(x)


def _log_sum_exp_of_ranks_reference(own: Tensor, place: Tensor, memory: Tensor, vocab_size: int) -> tuple:
    logits = all_gather_reference(own, place, memory, int(place[1]))
    return reference.log_sum_exp_reference(logits[:, :vocab_size])


def _log_sum_exp_of_ranks_on_gpu(own: Tensor, place: Tensor, memory: Tensor, vocab_size: int) -> tuple:
    logits = _OPS.all_gather(own.contiguous(), place, memory, place.numel() - 1)
    return _OPS.log_sum_exp(logits[:, :vocab_size].contiguous())


def _half_of_first(gate_up: Tensor, *args: Any) -> Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


def _fake_rope(qkv: Tensor, cos_sin: Tensor, q_norm, k_norm, num_heads: int, num_kv_heads: int, eps: float):
    rows, head_dim = cos_sin.shape
    return qkv.new_empty(rows, num_heads, head_dim), qkv.new_empty(rows, num_kv_heads, head_dim)


def _fake_log_sum_exp(logits: Tensor) -> tuple[Tensor, Tensor]:
    rows = logits.new_empty(logits.shape[0], dtype=torch.float32)
    return rows, torch.empty_like(rows)


def _fake_sum_of_norms(x: Tensor, x_norm, y, y_norm, scale, norm, eps: float) -> tuple[Tensor, Tensor]:
    return like_first(x), x.new_empty(0 if norm is None else x.shape)


def _fake_kept(x: Tensor, indices: Tensor, *args: Any) -> Tensor:
    return x.new_empty(indices.shape[0], x.shape[1])


_ON_ALL_DEVICES: dict[str, Callable[..., Any]] = {
    "rms_norm(Tensor x, Tensor weight, float eps) -> Tensor": like_first,
    "add_rms_norm(Tensor x, Tensor delta, Tensor weight, float eps) -> (Tensor, Tensor)": _two_like_first,
    "gated_rms_norm(Tensor x, Tensor gate, Tensor weight, float eps, int group_size, bool norm_first)"
    " -> Tensor": like_first,
    "layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor": like_first,
    "add_layer_norm(Tensor x, Tensor delta, Tensor weight, Tensor bias, float eps)"
    " -> (Tensor, Tensor)": _two_like_first,
    "rope(Tensor qkv, Tensor cos_sin, Tensor? q_norm, Tensor? k_norm, int num_heads, int num_kv_heads, float eps)"
    " -> (Tensor, Tensor)": _fake_rope,
    "gated_activation(Tensor gate_up, str activation) -> Tensor": _half_of_first,
    "activation(Tensor x, str activation) -> Tensor": like_first,
    "clamped_swiglu(Tensor gate_up, float alpha, float limit) -> Tensor": _half_of_first,
    "soft_cap(Tensor x, float cap) -> Tensor": like_first,
    "scaled_sum(Tensor x, Tensor delta, Tensor scale) -> Tensor": like_first,
    "sigmoid_gated(Tensor x, Tensor gate) -> Tensor": like_first,
    "log_sum_exp(Tensor logits) -> (Tensor, Tensor)": _fake_log_sum_exp,
}
_ON_GPUS: dict[str, Callable[..., Any]] = {  # a CPU has an op for each of their parts
    "qk_norm(Tensor qkv, Tensor q_norm, Tensor k_norm, float eps) -> Tensor": like_first,
    "sum_of_norms(Tensor x, Tensor? x_norm, Tensor y, Tensor? y_norm, Tensor? scale, Tensor? norm, float eps)"
    " -> (Tensor, Tensor)": _fake_sum_of_norms,
    "keep_rows(Tensor x, Tensor indices, Tensor(a!) kept) -> Tensor": _fake_kept,
    "table_rows(Tensor table, Tensor indices) -> Tensor": _fake_kept,
}
for _schema, _fake in (_ON_ALL_DEVICES | _ON_GPUS).items():
    _name = _schema.partition("(")[0]
    define_op(
        _schema,
        reference=getattr(reference, f"{_name}_reference"),
        fake=_fake,
        cpu="rowwise_cpu" if _schema in _ON_ALL_DEVICES else None,
        gpu=on_gpu(f"rowwise.triton_rowwise:{_name}"),
    )
define_op(
    "write_slots(Tensor(a!) cache, Tensor slots, Tensor x, int column) -> ()",
    reference=reference.write_slots_reference,
    fake=lambda cache, slots, x, column: None,
    cpu="rowwise_cpu",
)
define_op(
    "rows_at(Tensor x, Tensor indices) -> Tensor",
    reference=reference.rows_at_reference,
    fake=lambda x, indices: x.new_empty(indices.shape[0], x.shape[1]),
    cpu="rowwise_cpu",
)
define_op(
    "log_sum_exp_of_ranks(Tensor own, Tensor place, Tensor(a!) memory, int vocab_size) -> (Tensor, Tensor)",
    reference=_log_sum_exp_of_ranks_reference,
    fake=lambda own, place, memory, vocab_size: _fake_log_sum_exp(own),
    cpu="rowwise_cpu",
    gpu=_log_sum_exp_of_ranks_on_gpu,
)
