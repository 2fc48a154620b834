"""Scales that are searched: of several candidates for a group, those whose codes come nearest to the weights.

"Nearest" is the least sum of squares of what rounding changes. Candidates are

- int4 with zero points: ranges of 8 to 18 steps that begin at the group's least value. From the codes that a candidate
  gives, the scale and zero point follow that fit them best (least squares, as in llama.cpp's quantisers), and these
  are used. A group that has at most 16 values, which lie evenly, is found as it is.
- fp4: the power of two below the largest value, the one above and the one below that.
- fp8: eight scales within a factor of two. Values come to lie elsewhere between the format's, which are the same for
  each power of two.

The first candidates are those of ``quantize``, so the result is never worse than that one's. ``quantize_rows_cpu.cpp``
does the same to the bit, many times as fast.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from compiled_llm.ops.linear.quantized_weight import (
    LARGEST,
    ZERO_DTYPES,
    QuantizedRows,
    WeightFormat,
    dequantize,
    group_scales,
    kept_scales,
    quantize,
    round_to_codes,
)

STEPS = (15.0, 14.0, 13.0, 12.0, 11.0, 10.0, 9.0, 8.0, 16.0, 17.0, 18.0)
"""Of a group's range, in int4; from more than 15 on its largest values are clipped."""
FP8_SCALES = 8
_LARGEST_ZERO = 1024.0  # what is farther from 0 has too few bits in bfloat16
_WEIGHTS_AT_ONCE = 1 << 20


def is_searched(form: WeightFormat) -> bool:
    """Whether scales of this form are searched; others are those of ``quantize``."""
    return form.element in ("fp4", "fp8") or has_fitted_zeros(form)


def has_fitted_zeros(form: WeightFormat) -> bool:
    """int4 whose zero points may lie between codes."""
    return form.element == "int4" and form.zeros and form.zero_dtype != "int8" and form.group_size > 0


def quantize_searched(rows: Tensor, form: WeightFormat) -> QuantizedRows:
    """Round ``rows`` ``[n, K]`` under searched scales; as ``quantize`` where there is nothing to search."""
    if not is_searched(form):
        return quantize(rows, form)
    count = max(1, _WEIGHTS_AT_ONCE // rows.shape[1])
    parts = [_fitted(part, form) if form.zeros else _chosen(part, form) for part in rows.split(count)]
    zeros = [part.zeros for part in parts if part.zeros is not None]
    return QuantizedRows(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(zeros) if zeros else None,
    )


def _chosen(rows: Tensor, form: WeightFormat) -> QuantizedRows:
    """Without zero points."""
    best, _ = group_scales(rows, form)
    least = torch.full_like(best, torch.inf, dtype=torch.float64)
    for scales in scale_candidates(best, form):
        off = dequantize(round_to_codes(rows, scales, None, form), form) - rows.float()
        off = F.pad(off, (0, -off.shape[1] % (form.group_size or off.shape[1])))
        error = off.unflatten(1, (best.shape[1], -1)).double().square().sum(2)
        best, least = torch.where(error < least, scales, best), torch.minimum(error, least)
    return round_to_codes(rows, best, None, form)


def scale_candidates(plain: Tensor, form: WeightFormat) -> list[Tensor]:
    """What is tried in fp4 and fp8, for groups whose scales are ``plain`` by ``quantize``."""
    if form.element == "fp4":
        return [plain, plain * 2, plain / 2]
    return [kept_scales(plain * 2.0 ** (i / FP8_SCALES), form) for i in range(FP8_SCALES)]


def _fitted(rows: Tensor, form: WeightFormat) -> QuantizedRows:
    """With zero points that may lie between codes."""
    values = _groups(rows.float(), form)
    best_scales, best_zeros = torch.ones_like(values[:, :, 0]), torch.zeros_like(values[:, :, 0])
    least = torch.full_like(best_scales, torch.inf, dtype=torch.float64)
    for scales, zeros in _candidates(values, form):
        off = (_codes(values, scales, zeros) - zeros[:, :, None]) * scales[:, :, None] - values
        error = off.double().square().sum(2)
        is_less = error < least
        best_scales, best_zeros = torch.where(is_less, scales, best_scales), torch.where(is_less, zeros, best_zeros)
        least = torch.minimum(error, least)
    return round_to_codes(rows, best_scales, best_zeros, form)


def _candidates(values: Tensor, form: WeightFormat) -> Iterator[tuple[Tensor, Tensor]]:
    """Scales and zero points ``[n, G]`` for ``values`` ``[n, G, group]``."""
    low, high = values.amin(2), values.amax(2)
    plain = kept_scales(torch.maximum(-low, high) / LARGEST["int4"], form)
    yield plain, torch.zeros_like(plain)
    for steps in STEPS:
        scales = kept_scales((high - low) / steps, form)
        zeros = _kept_zeros(-8 - low / scales, form)
        if steps == STEPS[0]:
            yield scales, zeros
        yield _fit(values, _codes(values, scales, zeros), form, scales)


def _fit(values: Tensor, codes: Tensor, form: WeightFormat, scales: Tensor) -> tuple[Tensor, Tensor]:
    """The scales and zero points under which ``codes`` come nearest to ``values``; ``scales`` where all are alike."""
    size = values.shape[2]
    of_codes, of_values = codes.double().sum(2), values.double().sum(2)
    products, squares = (codes.double() * values.double()).sum(2), codes.double().square().sum(2)
    spread = size * squares - of_codes.square()
    slope = (size * products - of_codes * of_values) / spread
    fitted = torch.where((spread > 0) & (slope > 0), kept_scales(slope.float(), form), scales)
    return fitted, _kept_zeros(((of_codes - of_values / fitted.double()) / size).float(), form)


def _codes(values: Tensor, scales: Tensor, zeros: Tensor) -> Tensor:
    """As float32."""
    return torch.round((values * (1 / scales)[:, :, None] + zeros[:, :, None]).clamp(-8, 7))


def _kept_zeros(zeros: Tensor, form: WeightFormat) -> Tensor:
    return zeros.clamp(-_LARGEST_ZERO, _LARGEST_ZERO).to(ZERO_DTYPES[form.zero_dtype]).float()


def _groups(rows: Tensor, form: WeightFormat) -> Tensor:
    """``[n, G, group]``, a last group that is shorter filled up with its last value."""
    count, in_features = rows.shape
    size, groups = form.group_size or in_features, form.num_groups(in_features)
    last = rows[:, -1:].expand(count, groups * size - in_features)
    return torch.cat([rows, last], 1).view(count, groups, size)
