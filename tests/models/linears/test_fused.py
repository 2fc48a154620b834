"""Which products take in what surrounds them, and that an activation in the product is the one behind it."""

import pytest
import torch

from compiled_llm.models.linears import fused
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.exact import Exact
from compiled_llm.models.linears.fused import activated_linear, takes_what_follows
from compiled_llm.models.linears.protocol import Linear
from compiled_llm.ops import gated_activation
from compiled_llm.ops.linear.product_choices import MAX_ROWS
from compiled_llm.ops.torch_private_gpu import FakeTensorMode


@pytest.mark.parametrize("is_fused", [False, True])
def test_an_activation_in_the_product(is_fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "takes_what_follows", lambda linear, x, around: is_fused)
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(*shape, generator=generator) for shape in ((3, 16), (24, 16), (24,))]
    x, linear = drawn[0], Dense(drawn[1] / 4, drawn[2])
    torch.testing.assert_close(activated_linear(x, linear, "gelu"), gated_activation(linear.apply(x), "gelu"))


@pytest.mark.parametrize(
    ("rows", "dtype", "device", "exact", "expected"),
    [
        (MAX_ROWS, torch.bfloat16, "cuda", False, True),
        (1, torch.float16, "cuda", False, True),
        (MAX_ROWS + 1, torch.bfloat16, "cuda", False, False),
        (1, torch.float32, "cuda", False, False),
        (MAX_ROWS, torch.bfloat16, "cuda", True, True),
        (MAX_ROWS + 1, torch.bfloat16, "cuda", True, False),
        (1, torch.bfloat16, "cpu", False, False),
    ],
)
def test_few_rows_on_a_gpu_are_fused(rows: int, dtype: torch.dtype, device: str, exact: bool, expected: bool) -> None:
    with FakeTensorMode():
        x, weight = (torch.empty(n, 16, dtype=dtype, device=device) for n in (rows, 16))
        linear: Linear = Exact(Dense(weight)) if exact else Dense(weight)
        assert takes_what_follows(linear, x, "residual") == expected
