"""The row-wise ops on a CUDA GPU: the reference's numbers, and a row's bits in any company."""

from collections.abc import Callable

import pytest
import torch

from compiled_llm.ops.rowwise import rowwise
from tests.ops.rowwise.rowwise_cases import CASES, DTYPES, extremes, outputs
from tests.ops.rowwise.test_triton_rowwise import (
    a_row_has_the_same_bits_in_any_company,
    agrees_with_the_reference,
)  # fmt: skip

pytestmark = pytest.mark.gpu
PARAMS = [pytest.param(*case, id=name) for name, case in CASES.items()]
SIZES = {
    "rms_norm": 4096,
    "add_rms_norm": 12288,
    "layer_norm": 4096,
    "add_layer_norm": 12288,
    "rope": 128,
    "gated_activation": 6144,
    "activation": 6144,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "arguments"), PARAMS)
def test_what_the_reference_computes(name: str, arguments: Callable, dtype: torch.dtype) -> None:
    agrees_with_the_reference(name, arguments, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "arguments"), PARAMS)
def test_a_row_has_the_same_bits_alone_and_in_any_company(name: str, arguments: Callable, dtype: torch.dtype) -> None:
    sizes = (64, 128, 200) if name == "rope" else (128, 200, 4096, 12288)
    a_row_has_the_same_bits_in_any_company(name, arguments, dtype, "cuda", 300, sizes)


def test_extremes() -> None:
    extremes(torch.ops.compiled_llm, "cuda")


@pytest.mark.parametrize(("name", "arguments"), PARAMS)
def test_a_graph_replays_other_rows(name: str, arguments: Callable) -> None:
    """Captured once; replayed on other numbers, each row has the bits that it has alone."""
    size = SIZES.get(name, 151936)
    op = getattr(rowwise, name)
    given = [x.cuda() if isinstance(x, torch.Tensor) else x for x in arguments(torch.bfloat16, 33, size)]
    static = [x.clone() if isinstance(x, torch.Tensor) else x for x in given]
    op(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = outputs(op(*static))
    order = torch.arange(33, device="cuda").flip(0)
    for kept, x in zip(static, given, strict=True):
        if isinstance(x, torch.Tensor) and x.dim() == 2:
            kept.copy_(x[order])
    graph.replay()
    for row in (0, 7, 32):
        alone = [x[row : row + 1] if isinstance(x, torch.Tensor) and x.dim() == 2 else x for x in given]
        for got, want in zip(captured, outputs(op(*alone)), strict=True):
            assert torch.equal(got[32 - row], want[0])
