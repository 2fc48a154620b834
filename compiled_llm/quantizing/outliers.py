"""LLM.int8()'s split of outlier columns, as a measure beside the kinds that are written."""

import torch
from torch import Tensor

from compiled_llm.ops.linear.quantized_weight import WeightFormat, dequantize, quantize
from compiled_llm.quantizing.schemes import quantize_inputs

THRESHOLD = 6.0  # Dettmers et al., 2022 (arXiv:2208.07339), section 3.2


def split_outliers(rows: Tensor, largest: Tensor, weight: Tensor) -> tuple[Tensor, int]:
    """What int8 weights and inputs give where inputs that reach the threshold somewhere stay as they are.

    Args:
        rows: ``[R, K]`` inputs.
        largest: ``[K]``, the largest absolute value of each over a text.
        weight: ``[N, K]``.

    Returns:
        Outputs ``[R, N]``, and the number of columns that stay.
    """
    outlier = largest >= THRESHOLD
    plain, form = ~outlier, WeightFormat("int8")
    output = rows[:, outlier] @ weight[:, outlier].T
    if plain.any():
        output = output + quantize_inputs(rows[:, plain]) @ dequantize(quantize(weight[:, plain], form), form).T
    return output, int(torch.count_nonzero(outlier))
