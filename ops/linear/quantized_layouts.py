"""Quantised weights packed for the device that they are on: for CPUs, or for GPUs. Each file says how they lie."""

import torch
from torch import Tensor

from compiled_llm.ops.linear import quantize_rows, quantized_weight, quantized_weight_gpu
from compiled_llm.ops.linear.quantized_weight import QuantizedRows, QuantizedWeight, WeightFormat
from compiled_llm.ops.linear.searched_scales import quantize_searched


def empty_quantized(
    form: WeightFormat, out_features: int, in_features: int, device: torch.device, experts: int | None = None
) -> QuantizedWeight:
    """A packed weight for ``pack_quantized_rows``, of ``experts`` matrices if given.

    Raises:
        ValueError: a group size that GPUs do not have, on a GPU.
    """
    if device.type == "cuda":
        return quantized_weight_gpu.empty_quantized_gpu(form, out_features, in_features, device, experts)
    return quantized_weight.empty_quantized(form, out_features, in_features, device, experts)


def pack_quantized_rows(weight: QuantizedWeight, start: int, rows: QuantizedRows, form: WeightFormat) -> None:
    """Write ``rows``, the rows of one matrix from ``start`` on, into ``weight``."""
    rows = quantized_weight.as_kept(rows, form)
    if weight.codes.device.type == "cuda":
        quantized_weight_gpu.pack_quantized_rows_gpu(weight, start, rows, form)
    else:
        quantized_weight.pack_quantized_rows(weight, start, rows, form)


def quantize_into(weight: QuantizedWeight, start: int, rows: Tensor, form: WeightFormat) -> None:
    """Round ``rows`` ``[n, K]`` under searched scales, and write the codes into ``weight`` from row ``start`` on."""
    if weight.codes.device.type == "cuda":
        quantized_weight_gpu.pack_quantized_rows_gpu(weight, start, quantize_searched(rows, form), form)
    else:
        quantize_rows.quantize_into(weight, start, rows, form)


def unpack_quantized_rows(weight: QuantizedWeight, ids: Tensor, form: WeightFormat, in_features: int) -> QuantizedRows:
    """Rows ``ids`` ``[T]`` (int32 or int64) of a packed matrix. Traced into the step, where it is an embedding's."""
    if weight.codes.device.type == "cuda":
        return quantized_weight_gpu.unpack_quantized_rows_gpu(weight, ids, form, in_features)
    return quantized_weight.unpack_quantized_rows(weight, ids, form, in_features)
