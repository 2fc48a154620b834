"""What follows integer sums, compiled for GPUs that are not there: the same operations wherever the sums come from.

``test_triton_quantized.py`` runs them in Triton's interpreter, of which both products give the same bits.
"""

import re
from pathlib import Path
from unittest import mock

import pytest
import torch

from compiled_llm.ops.linear.quantized_weight import WeightFormat
from compiled_llm.ops.linear.quantized_weight_gpu import empty_quantized_gpu

triton = pytest.importorskip("triton")

from compiled_llm.ops.linear import (  # noqa: E402
    quantized_tiles,
    triton_int8_scaling,
    triton_linear,
    triton_quantize_rows,
    triton_quantized_a8,
)
from compiled_llm.ops.linear.quantized_tiles import Choice, Tile  # noqa: E402
from tests.ops import ahead_of_time  # noqa: E402

META = torch.device("meta")
FORM = WeightFormat("int8", 0, True)


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)], ids=str)
def test_neither_kernel_leaves_a_sum_to_be_fused_or_not(capability: tuple[int, int], tmp_path: Path) -> None:
    for choice in (Choice(64, "triton", Tile(64, 64, 4, 4)), Choice(64, "int_mm")):
        recorded: list = []
        with (
            mock.patch.object(quantized_tiles, "choose", return_value=choice),
            mock.patch.object(triton_linear, "_capability", return_value=capability),
            mock.patch.object(triton_quantize_rows, "quantize_rows_kernel", ahead_of_time.Recorder(None, [])),
            mock.patch.object(
                triton_quantized_a8,
                "quantized_linear_a8_kernel",
                ahead_of_time.Recorder(triton_quantized_a8.quantized_linear_a8_kernel, recorded),
            ),
            mock.patch.object(
                triton_int8_scaling,
                "scale_kernel",
                ahead_of_time.Recorder(triton_int8_scaling.scale_kernel, recorded),
            ),
        ):
            x, bias = torch.empty(64, 4096, dtype=torch.bfloat16, device=META), torch.empty(6144, device=META)
            weight = empty_quantized_gpu(FORM, 6144, 4096, META)
            triton_quantized_a8.quantized_linear_a8(x, *weight, bias.bfloat16(), None, "int8", 0, 6144)
        ((kernel, args, kwargs),) = recorded
        binary = ahead_of_time.compiled(kernel, args, kwargs, capability)
        usage, ptx = ahead_of_time.resources(binary.asm["cubin"], tmp_path / "kernel.cubin"), binary.asm["ptx"]
        assert max(usage["STACK"], usage["LOCAL"]) == 0
        assert "fma.rn.f32" in ptx
        assert re.findall(r"\b(?:add|sub|mul)\S*\.f32\S*", ptx) == []
        if choice.implementation == "int_mm":
            assert re.search(r"ld\.global\S*\.v4", ptx), "16 bytes at a time"
