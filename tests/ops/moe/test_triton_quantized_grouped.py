"""The experts' kernels on quantised weights, compiled for GPUs that are not there.

``tests/ops/linear/test_triton_quantized.py`` runs them in Triton's interpreter, beside those of single layers.
"""

from pathlib import Path

import pytest
import torch

from compiled_llm.ops.linear.quantized_weight import WeightFormat
from compiled_llm.ops.linear.quantized_weight_gpu import empty_quantized_gpu

triton = pytest.importorskip("triton")

from compiled_llm.ops.linear import triton_quantize_rows  # noqa: E402
from compiled_llm.ops.moe import triton_quantized_grouped  # noqa: E402
from tests.ops import ahead_of_time  # noqa: E402

META = torch.device("meta")
FORMATS = [
    WeightFormat("int8"),
    WeightFormat("int4", 128),
    WeightFormat("int4", 32),
    WeightFormat("int8", 0, True),
    WeightFormat("int8", 32, True),
    WeightFormat("int8", 128, True),
    WeightFormat("int4", 32, True),
    WeightFormat("int4", 64),
    WeightFormat("int4", 64, True),
    WeightFormat("int4", 128, True),
    WeightFormat("fp8", 128),
    WeightFormat("fp4", 32),
]
STARTS = torch.empty(129, dtype=torch.int32, device=META)


SOME = [(form, a8, 1) for form in FORMATS[:3] for a8 in (False, True)]
MORE = [(form, a8, tokens) for form in FORMATS for a8 in (False, True) for tokens in (1, 64, 512, 2048)]


@pytest.mark.parametrize(
    ("form", "a8", "tokens"),
    [
        *SOME,
        *(
            pytest.param(*case, marks=pytest.mark.battery)
            for case in MORE
            if case not in SOME and (not case[1] or case[0].element.startswith("int"))
        ),
    ],
    ids=str,
)
@pytest.mark.parametrize("capability", [pytest.param((8, 0), marks=pytest.mark.battery), (9, 0)], ids=str)
def test_compiles_without_spills(
    capability: tuple[int, int],
    form: WeightFormat,
    a8: bool,
    tokens: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """In the sizes of Qwen3-30B-A3B: 128 experts, of which a token uses 8."""
    recorded = ahead_of_time.recorded(monkeypatch, capability, triton_quantized_grouped, triton_quantize_rows)
    x = torch.empty(tokens, 2048, dtype=torch.bfloat16, device=META)
    rows = torch.empty(tokens * 8, dtype=torch.int32, device=META)
    weight = empty_quantized_gpu(form, 1536, 2048, META, 128)
    constants = rows, STARTS, form.element, form.group_size, 1536
    if a8:
        triton_quantized_grouped.grouped_quantized_linear_a8(x, *weight, None, None, *constants)
    else:
        triton_quantized_grouped.grouped_quantized_linear(x, *weight, None, *constants)
    monkeypatch.undo()
    binary, registers = ahead_of_time.without_spills(recorded[-1], capability, tmp_path)
    print(f"| {capability}, {form}, a8 {a8}, {tokens} tokens | {registers} | {binary.metadata.shared // 1024} |")
    assert ("wgmma" if capability == (9, 0) else "mma.sync") in binary.asm["ptx"]


def test_refuses_by_name() -> None:
    form = WeightFormat("int4", 64)
    weight = empty_quantized_gpu(form, 8, 128, torch.device("cpu"), 4)
    x, starts = torch.ones(2, 128), torch.zeros(4, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"starts must be a contiguous \[5\] of torch.int32"):
        triton_quantized_grouped.grouped_quantized_linear(x, *weight, None, None, starts, "int4", 64, 8)
