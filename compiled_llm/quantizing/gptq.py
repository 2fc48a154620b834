"""GPTQ: rounding whose error later columns make up for (Frantar et al., 2023, arXiv:2210.17323); choice of scales.

Weights of a layer are ``W [N, K]``; its inputs are known by ``H = sum of x x^T``, ``[K, K]``, over a text.
The squared error of its outputs over these is the sum over rows of ``d H d^T``, where ``d`` is the error of a row.
"""

import torch
from torch import Tensor

from compiled_llm.ops.linear.quantized_weight import (
    QuantizedRows,
    WeightFormat,
    dequantize,
    group_scales,
    round_to_codes,
)
from compiled_llm.ops.linear.searched_scales import quantize_searched, scale_candidates

_SHRINKS = tuple(1 - 0.05 * step for step in range(11))
_DAMPING = 0.01  # of H's mean diagonal, as in the paper
_BLOCK = 128  # columns whose errors reach the rest at once


def best_scales(weight: Tensor, hessian: Tensor, form: WeightFormat) -> tuple[Tensor, Tensor | None]:
    """For each group the scale, of 11 between the whole and half of its range, with the least output error.

    That error is of the group's own inputs, as in AWQ's search for clipping (Lin et al., 2023, section 3.2). Where a
    row is one group, scales come from ``quantize_searched``: clipping single weights of a whole row seldom helps. Those
    of fp4 are the powers of two that it tries.

    Args:
        weight: ``[N, K]`` float32; K a multiple of the group size.
        hessian: ``[K, K]``.

    Returns:
        Scales and zeros ``[N, G]``.
    """
    if not form.group_size:
        return quantize_searched(weight, form)[1:]
    scales, zeros = group_scales(weight, form)
    size, groups = form.group_size, form.num_groups(weight.shape[1])
    inner = torch.stack([hessian[g * size : (g + 1) * size, g * size : (g + 1) * size] for g in range(groups)]).float()
    least = torch.full_like(scales, torch.inf)
    if form.element == "fp4":
        candidates = [(tried, zeros) for tried in scale_candidates(scales, form)]
    else:
        candidates = [group_scales(weight, form, shrink) for shrink in _SHRINKS]
    for tried, tried_zeros in candidates:
        rounded = dequantize(round_to_codes(weight, tried, tried_zeros, form), form)
        errors = (rounded - weight).view(len(weight), groups, size).transpose(0, 1)  # [G, N, size]
        loss = ((errors @ inner) * errors).sum(2).T
        better = loss < least
        least, scales = torch.where(better, loss, least), torch.where(better, tried, scales)
        if zeros is not None:
            assert tried_zeros is not None
            zeros = torch.where(better, tried_zeros, zeros)
    return scales, zeros


def gptq(
    weight: Tensor, hessian: Tensor, form: WeightFormat, scales: Tensor, zeros: Tensor | None, act_order: bool = True
) -> QuantizedRows:
    """Round a column at a time, and take the error that it makes off the columns that are still to come.

    With ``U`` the upper Cholesky factor of ``(H + damping)^-1``, the error ``e = (w_j - q_j) / U_jj`` of column j is
    taken off column i as ``e U_ji`` (the paper's algorithm 1).

    Args:
        weight: ``[N, K]`` float32.
        hessian: ``[K, K]``.
        scales, zeros: ``[N, G]`` of the groups, which stay as they are: no order of columns changes the layout.
        act_order: columns with the largest inputs first.
    """
    in_features = weight.shape[1]
    size = form.group_size or in_features
    h = hessian.double()
    diagonal = h.diagonal()
    order = torch.argsort(diagonal, descending=True, stable=True) if act_order else torch.arange(in_features)
    h = h[order][:, order] + torch.eye(in_features, dtype=h.dtype) * (_DAMPING * diagonal.mean()).clamp(min=1e-10)
    factor = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(h)), upper=True).float()
    left = weight.float()[:, order].clone()
    codes = torch.empty(weight.shape, dtype=torch.int8)
    # One column is one group of one input.
    single = form._replace(group_size=0)
    for start in range(0, in_features, _BLOCK):
        end = min(start + _BLOCK, in_features)
        errors = torch.zeros(len(weight), end - start)
        for j in range(start, end):
            column = int(order[j])
            of_group = slice(column // size, column // size + 1)
            zero = None if zeros is None else zeros[:, of_group]
            rounded = round_to_codes(left[:, j : j + 1], scales[:, of_group], zero, single)
            codes[:, column] = rounded.codes[:, 0]
            error = (left[:, j] - dequantize(rounded, single)[:, 0]) / factor[j, j]
            left[:, j + 1 : end] -= error[:, None] * factor[j, j + 1 : end]
            errors[:, j - start] = error
        left[:, end:] -= errors @ factor[start:end, end:]
    return QuantizedRows(codes, scales, zeros)
