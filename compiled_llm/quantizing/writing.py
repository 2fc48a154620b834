"""The tensors of quantised layers, as checkpoints of compressed-tensors have them."""

import torch
from torch import Tensor

from compiled_llm.ops.linear.quantized_weight import SCALE_DTYPES, QuantizedRows
from compiled_llm.quantizing.schemes import Scheme


def layer_tensors(rows: QuantizedRows, scheme: Scheme) -> dict[str, Tensor]:
    """What takes the place of a layer's ``weight``, by the last part of its name, as ``scheme.layout`` has it.

    "pack-quantized": 32-bit words of codes plus 2^(bits - 1), the first in the lowest bits, ``[N, K * bits / 32]``;
    zero points are packed so along the rows. "int-quantized" and "float-quantized": one byte for each.
    "mxfp4-pack-quantized": two codes in a byte, the first in the lower four bits, and the scales' exponents plus 127.
    """
    form = scheme.form
    scales = rows.scales.to(SCALE_DTYPES[form.scale_dtype])
    if scheme.layout == "mxfp4-pack-quantized":
        pairs = rows.codes.view(torch.uint8)
        exponents = (torch.frexp(rows.scales)[1] - 1 + 127).to(torch.uint8)
        return {"weight_packed": pairs[:, ::2] | pairs[:, 1::2] << 4, "weight_scale": exponents}
    if scheme.layout == "float-quantized":
        return {"weight": rows.codes.view(torch.float8_e4m3fn), "weight_scale": scales}
    if scheme.layout == "int-quantized":
        return {"weight": rows.codes, "weight_scale": scales}
    assert scheme.layout == "pack-quantized"
    tensors = {
        "weight_packed": _words(rows.codes, form.bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(rows.codes.shape),
    }
    if rows.zeros is not None:
        tensors["weight_zero_point"] = _words(rows.zeros.to(torch.int8).T, form.bits).T.contiguous()
    return tensors


def _words(codes: Tensor, bits: int) -> Tensor:
    """``[n, K]`` int8 as ``[n, K * bits / 32]`` int32, rounded up."""
    each = 32 // bits
    codes = codes.to(torch.int32) + (1 << (bits - 1))
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % each)).view(len(codes), -1, each)
    words = torch.zeros(codes.shape[:2], dtype=torch.int32)
    for place in range(each):
        words |= codes[:, :, place] << (bits * place)
    return words
