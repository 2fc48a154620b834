"""The row-wise ops on the GPU: the launch of their Triton kernels. ``rowwise.py`` says what they compute.

Each op is one launch, whose grid follows from shapes alone, so a CUDA graph can hold it.

Why a row's bits depend on nothing but the row: a program computes one row (or a piece of one, where nothing is added
up), and all rows of a length run the same binary. Block sizes and warps follow from the length. Triton also compiles
for the alignment and strides that it finds, and how the elements of a sum lie in the threads, so the order of the sum,
may follow from them; ``aligned_rows`` makes them the same for all rows of a length. Multiplications and additions are
not fused: a compiler chooses where, and the reference rounds after each.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from compiled_llm.ops.programmatic_launch import launch_options
from compiled_llm.ops.rowwise import reference
from compiled_llm.ops.rowwise.triton_kernels import (
    activation_kernel,
    clamped_swiglu_kernel,
    gated_kernel,
    gated_norm_kernel,
    keep_rows_kernel,
    layer_norm_kernel,
    log_sum_exp_kernel,
    norm_kernel,
    qk_norm_kernel,
    rope_kernel,
    scaled_sum_kernel,
    sigmoid_gate_kernel,
    soft_cap_kernel,
    sum_of_norms_kernel,
)
from compiled_llm.ops.triton_checks import DTYPES, check_contiguous, refuse

_ALIGNMENT = 16  # bytes of a pointer, and elements of a stride, by which Triton specialises
_MOST_OF_A_ROW = 8192  # elements in a block; a longer row takes several
# Elements in a block of a norm that has 8 warps: with 4 its sum takes 158 registers, with 8 33 (Triton 3.6).
_LARGE_NORM = 1024
_PIECE = 1024  # elements of a program where nothing is added up
_COPIED = 2048  # and where they are only copied


def _options(block: int) -> dict:
    """8 elements a thread where the block has that many, 32 at most."""
    return {"num_warps": min(8, max(1, block // 256)), "enable_fp_fusion": False}


def aligned_rows(x: Tensor, op: str, name: str, dtypes: tuple[torch.dtype, ...] = DTYPES) -> tuple[Tensor, int]:
    """``x`` ``[rows, size]`` and the distance of its rows, aligned as all rows of that size: if need be a copy.

    A row alone may have any stride, rows of a wider tensor any alignment; those of a model's own tensors never copy.
    """
    if x.dim() != 2 or (x.stride(1) != 1 and x.shape[1] != 1):
        raise ValueError(
            f"{op}: {name} must be [rows, size] with the last stride 1, got {list(x.shape)} with strides "
            f"{list(x.stride())}"
        )
    if x.dtype not in dtypes:
        wanted = " or ".join(str(dtype)[6:] for dtype in dtypes)
        raise ValueError(f"{op}: the dtype of {name} must be {wanted}, got {x.dtype}")
    size = x.shape[1]
    stride = x.stride(0) if x.shape[0] > 1 else size
    is_usual = stride == size or stride % _ALIGNMENT == size % _ALIGNMENT == 0
    if x.data_ptr() % _ALIGNMENT or not is_usual:
        return x.clone(memory_format=torch.contiguous_format), size
    return x, stride


def _weight(weight: Tensor, x: Tensor, size: int, op: str) -> Tensor:
    """The weight of a norm of ``x``, aligned as all weights of that size: if need be a copy."""
    check_contiguous(op, "a weight", weight, (size,), x.device, x.dtype, torch.float32)
    return weight.clone() if weight.data_ptr() % _ALIGNMENT else weight


def _check_like(op: str, name: str, given: Tensor, x: Tensor) -> None:
    if (given.shape, given.dtype, given.device) != (x.shape, x.dtype, x.device):
        refuse(op, name, given, f"like x, {list(x.shape)} of {x.dtype} on {x.device}")


def _norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, op: str
) -> tuple[Tensor | None, Tensor]:
    """``x + delta``, if there is a ``delta``, and the norm: an RMS norm, or with a ``bias`` a layer norm."""
    x, stride = aligned_rows(x, op, "x")
    rows, size = x.shape
    weight = _weight(weight, x, size, op)
    if bias is not None:
        bias = _weight(bias, x, size, op)
        if not weight.dtype == bias.dtype == x.dtype:
            raise ValueError(f"{op}: weight and bias must be of {x.dtype}, got {weight.dtype} and {bias.dtype}")
    total, delta_stride = None, size
    if delta is not None:
        _check_like(op, "delta", delta, x)
        delta, delta_stride = aligned_rows(delta, op, "delta")
        total = x.new_empty(rows, size)
    out = x.new_empty(rows, size)
    block = min(triton.next_power_of_2(size), _MOST_OF_A_ROW)
    if x.numel():
        with torch.cuda.device_of(x):
            kernel, weights = (norm_kernel, (weight,)) if bias is None else (layer_norm_kernel, (weight, bias))
            options = _options(block)
            if block >= _LARGE_NORM:
                options["num_warps"] = 8
            kernel[(rows,)](
                x, delta, *weights, total, out, stride, delta_stride, eps,
                SIZE=size, BLOCK=block, **options, **launch_options(rows),
            )  # fmt: skip
    return total, out


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The op on CUDA tensors, as all here (on CPU tensors under Triton's interpreter). Never waits for the GPU.

    Raises:
        ValueError: a tensor of another shape, dtype, layout or device. So do the other ops of this file.
    """
    return _norm(x, None, weight, None, eps, "rms_norm")[1]


def add_rms_norm(x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The op."""
    total, out = _norm(x, delta, weight, None, eps, "add_rms_norm")
    assert total is not None
    return total, out


def qk_norm(qkv: Tensor, q_norm: Tensor, k_norm: Tensor, eps: float) -> Tensor:
    """The op."""
    qkv, stride = aligned_rows(qkv, "qk_norm", "qkv")
    rows, (q_size, k_size) = qkv.shape[0], (len(q_norm), len(k_norm))
    if qkv.shape[1] != q_size + 2 * k_size:
        raise ValueError(
            f"qk_norm: qkv must have len(q_norm) + 2 * len(k_norm) columns, {q_size + 2 * k_size}, got {qkv.shape[1]}"
        )
    q_norm, k_norm = _weight(q_norm, qkv, q_size, "qk_norm"), _weight(k_norm, qkv, k_size, "qk_norm")
    out = qkv.new_empty(qkv.shape)
    block_q, block_k = (triton.next_power_of_2(size) for size in (q_size, k_size))
    if rows:
        with torch.cuda.device_of(qkv):
            qk_norm_kernel[(rows, 3)](
                qkv, q_norm, k_norm, out, stride, eps,
                Q_SIZE=q_size, K_SIZE=k_size, BLOCK_Q=block_q, BLOCK_K=block_k, **_options(block_q),
            )  # fmt: skip
    return out


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The op."""
    return _norm(x, None, weight, bias, eps, "layer_norm")[1]


def add_layer_norm(x: Tensor, delta: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The op."""
    total, out = _norm(x, delta, weight, bias, eps, "add_layer_norm")
    assert total is not None
    return total, out


def gated_rms_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, group_size: int, norm_first: bool) -> Tensor:
    """The op."""
    op = "gated_rms_norm"
    x, x_stride = aligned_rows(x, op, "x")
    rows, size = x.shape
    _check_like(op, "gate", gate, x)
    if group_size < 1 or size % group_size:
        raise ValueError(f"{op}: group_size must divide the {size} columns, got {group_size}")
    if weight.dtype != x.dtype:
        raise ValueError(f"{op}: weight must be of {x.dtype}, got {weight.dtype}")
    gate, gate_stride = aligned_rows(gate, op, "gate")
    weights = group_size if weight.shape == (group_size,) else size
    weight = _weight(weight, x, weights, op)
    out = x.new_empty(rows, size)
    block = min(triton.next_power_of_2(group_size), _MOST_OF_A_ROW // 2)
    groups = max(1, min(triton.next_power_of_2(size // group_size), _PIECE // block))
    if x.numel():
        with torch.cuda.device_of(x):
            gated_norm_kernel[(rows, triton.cdiv(size // group_size, groups))](
                x, gate, weight, out, x_stride, gate_stride, eps, NORM_FIRST=norm_first,
                SIZE=size, GROUP=group_size, WEIGHTS=weights, GROUPS=groups, BLOCK=block, **_options(groups * block),
            )  # fmt: skip
    return out


def rope(
    qkv: Tensor, cos_sin: Tensor, q_norm: Tensor | None, k_norm: Tensor | None, num_heads: int, num_kv_heads: int,
    eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The op."""
    qkv, stride = aligned_rows(qkv, "rope", "qkv")
    cos_sin, cos_sin_stride = aligned_rows(cos_sin, "rope", "cos_sin", (torch.float32,))
    rows, head_dim = cos_sin.shape
    if rows != qkv.shape[0] or head_dim % 2 or head_dim == 0 or cos_sin.device != qkv.device:
        raise ValueError(
            f"rope: cos_sin must be [{qkv.shape[0]}, head_dim] with an even head_dim on {qkv.device}, got "
            f"{list(cos_sin.shape)} on {cos_sin.device}"
        )
    if num_heads < 1 or num_kv_heads < 0 or qkv.shape[1] < (num_heads + num_kv_heads) * head_dim:
        raise ValueError(
            f"rope: qkv must have (num_heads + num_kv_heads) * head_dim columns or more, got {qkv.shape[1]} for "
            f"{num_heads}, {num_kv_heads} and {head_dim}"
        )
    if (q_norm is None) != (k_norm is None) or (
        q_norm is not None and k_norm is not None and q_norm.dtype != k_norm.dtype
    ):
        raise ValueError("rope: q_norm and k_norm must be of one dtype, or both None")
    norms = [None if norm is None else _weight(norm, qkv, head_dim, "rope") for norm in (q_norm, k_norm)]
    q, k = qkv.new_empty(rows, num_heads, head_dim), qkv.new_empty(rows, num_kv_heads, head_dim)
    block_half = triton.next_power_of_2(head_dim // 2)
    block_heads = max(1, min(triton.next_power_of_2(num_heads), _PIECE // (2 * block_half)))
    tiles = triton.cdiv(num_heads, block_heads) + triton.cdiv(num_kv_heads, block_heads)
    if rows:
        with torch.cuda.device_of(qkv):
            rope_kernel[(rows, tiles)](
                qkv, cos_sin, *norms, q, k, stride, cos_sin_stride, eps,
                NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HALF=head_dim // 2,
                BLOCK_HEADS=block_heads, BLOCK_HALF=block_half, **_options(2 * block_heads * block_half),
            )  # fmt: skip
    return q, k


def _in_pieces(kernel: Any, out: Tensor, *args: Any, **constants: Any) -> Tensor:
    """Launch a kernel that adds nothing up, with a program for each piece of a row of ``out``; ``out``."""
    rows, size = out.shape
    block = min(triton.next_power_of_2(max(size, 1)), _PIECE)
    if out.numel():
        with torch.cuda.device_of(out):
            kernel[(rows, triton.cdiv(size, block))](*args, SIZE=size, **constants, BLOCK=block, **_options(block))
    return out


def gated_activation(gate_up: Tensor, activation: str) -> Tensor:
    """The op."""
    _check_activation("gated_activation", activation)
    gate_up, stride = aligned_rows(gate_up, "gated_activation", "gate_up")
    rows, columns = gate_up.shape
    if columns % 2:
        raise ValueError(f"gated_activation: gate_up must have an even number of columns, got {columns}")
    out = gate_up.new_empty(rows, columns // 2)
    return _in_pieces(gated_kernel, out, gate_up, out, stride, ACTIVATION=activation)


def activation(x: Tensor, activation: str) -> Tensor:
    """The op."""
    _check_activation("activation", activation)
    x, stride = aligned_rows(x, "activation", "x")
    out = x.new_empty(x.shape)
    return _in_pieces(activation_kernel, out, x, out, stride, ACTIVATION=activation)


def _check_activation(op: str, activation: str) -> None:
    if activation not in reference.ACTIVATIONS:
        raise ValueError(f"{op}: activation must be {' or '.join(reference.ACTIVATIONS)}, got {activation}")


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """The op."""
    gate_up, stride = aligned_rows(gate_up, "clamped_swiglu", "gate_up")
    rows, columns = gate_up.shape
    if columns % 2 or not limit > 0:
        raise ValueError(
            "clamped_swiglu: gate_up must have an even number of columns, and limit be above 0, got "
            f"{columns} and {limit}"
        )
    out = gate_up.new_empty(rows, columns // 2)
    return _in_pieces(clamped_swiglu_kernel, out, gate_up, out, stride, alpha, limit)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """The op."""
    if not cap > 0:
        raise ValueError(f"soft_cap: cap must be above 0, got {cap}")
    x, stride = aligned_rows(x, "soft_cap", "x")
    out = x.new_empty(x.shape)
    return _in_pieces(soft_cap_kernel, out, x, out, stride, cap)


def scaled_sum(x: Tensor, delta: Tensor, scale: Tensor) -> Tensor:
    """The op."""
    x, x_stride = aligned_rows(x, "scaled_sum", "x")
    delta, delta_stride = aligned_rows(delta, "scaled_sum", "delta")
    _check_like("scaled_sum", "delta", delta, x)
    check_contiguous("scaled_sum", "scale", scale, (1,), x.device, torch.float32)
    out = x.new_empty(x.shape)
    return _in_pieces(scaled_sum_kernel, out, x, delta, scale, out, x_stride, delta_stride)


def sigmoid_gated(x: Tensor, gate: Tensor) -> Tensor:
    """The op."""
    x, x_stride = aligned_rows(x, "sigmoid_gated", "x")
    gate, gate_stride = aligned_rows(gate, "sigmoid_gated", "gate")
    rows, size = x.shape
    if gate.shape not in ((rows, size), (rows, 1)) or gate.dtype != x.dtype or gate.device != x.device:
        raise ValueError(
            f"sigmoid_gated: gate must be [{rows}, {size}] or [{rows}, 1] of {x.dtype} on {x.device}, got "
            f"{list(gate.shape)} of {gate.dtype} on {gate.device}"
        )
    out = x.new_empty(x.shape)
    return _in_pieces(sigmoid_gate_kernel, out, x, gate, out, x_stride, gate_stride, GATES=gate.shape[1])


def log_sum_exp(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The op."""
    logits, stride = aligned_rows(logits, "log_sum_exp", "logits")
    rows, size = logits.shape
    if size == 0:
        raise ValueError(f"log_sum_exp: logits must have columns, got {list(logits.shape)}")
    peak, log_total = (logits.new_empty(rows, dtype=torch.float32) for _ in range(2))
    block = min(triton.next_power_of_2(size), _MOST_OF_A_ROW // 2)
    if rows:
        with torch.cuda.device_of(logits):
            log_sum_exp_kernel[(rows,)](logits, peak, log_total, stride, SIZE=size, BLOCK=block, **_options(block))
    return peak, log_total


def sum_of_norms(
    x: Tensor, x_norm: Tensor | None, y: Tensor, y_norm: Tensor | None, scale: Tensor | None, norm: Tensor | None,
    eps: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The op."""
    x, x_stride = aligned_rows(x, "sum_of_norms", "x")
    y, y_stride = aligned_rows(y, "sum_of_norms", "y", (x.dtype,))
    rows, size = x.shape
    op, either = "sum_of_norms", (x.dtype, torch.float32)
    if y.shape != x.shape or y.device != x.device:
        refuse(op, "y", y, f"{[rows, size]} on {x.device}")
    for name, weights in (("x_norm", x_norm), ("y_norm", y_norm), ("norm", norm)):
        check_contiguous(op, name, weights, (size,), x.device, *either)
    check_contiguous(op, "scale", scale, (1,), x.device, torch.float32)
    total, out = x.new_empty(rows, size), x.new_empty(0 if norm is None else (rows, size))
    if total.numel():
        block = min(_PIECE, triton.next_power_of_2(size))
        with torch.cuda.device_of(x):
            sum_of_norms_kernel[(rows,)](
                x, x_norm, y, y_norm, scale, norm, total, out, x_stride, y_stride, eps, SIZE=size, BLOCK=block,
                num_warps=4, enable_fp_fusion=False,
            )  # fmt: skip
    return total, out


def keep_rows(x: Tensor, indices: Tensor, kept: Tensor) -> Tensor:
    """The op."""
    rows, size = x.shape
    fits = kept.dtype == x.dtype and kept.device == x.device and kept.is_contiguous() and x.is_contiguous()
    if not fits or kept.dim() != 2 or kept.shape[0] < rows or kept.shape[1] != size:
        raise ValueError(
            f"keep_rows: x must be contiguous, and kept a contiguous [{rows}, {size}] or longer of {x.dtype} on "
            f"{x.device}, got {list(kept.shape)} of {kept.dtype} on {kept.device}"
        )
    return _copied("keep_rows", x, indices, kept, rows)


def table_rows(table: Tensor, indices: Tensor) -> Tensor:
    """The op."""
    if table.dim() != 2 or not table.is_contiguous():
        refuse("table_rows", "table", table, "a contiguous [L, D]")
    return _copied("table_rows", table, indices, table, 0)


def _copied(op: str, x: Tensor, indices: Tensor, kept: Tensor, rows: int) -> Tensor:
    """The rows ``indices`` of ``x``; its first ``rows`` go to ``kept``."""
    if indices.dim() != 1 or indices.dtype not in (torch.int32, torch.int64) or not indices.is_contiguous():
        raise ValueError(
            f"{op}: indices must be a contiguous [R] of int32 or int64, got {list(indices.shape)} of {indices.dtype}"
        )
    size = x.shape[1]
    out = x.new_empty(len(indices), size)
    block = min(_COPIED, triton.next_power_of_2(max(size, 1)))
    if rows + len(indices) and size:
        with torch.cuda.device_of(x):
            keep_rows_kernel[(rows + len(indices), triton.cdiv(size, block))](
                x, indices, kept, out, rows, SIZE=size, BLOCK=block, **_options(block)
            )
    return out
