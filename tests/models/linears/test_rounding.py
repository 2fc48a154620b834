"""How far rounded weights are from the checkpoint's, and the line that says so at the start."""

import io

import pytest
import torch

from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.protocol import StoredLinear
from compiled_llm.models.linears.quantizing import SCHEMES, Quantizing
from compiled_llm.models.linears.rounding import rounding_of
from compiled_llm.ops.linear.quantized_weight import dequantize
from compiled_llm.ops.linear.searched_scales import quantize_searched
from compiled_llm.system.progress import StartProgress
from compiled_llm.worker.device import say_cost_of_rounding
from tests.models.linears.test_quantizing import source


def taken(name: str) -> tuple[Quantizing, torch.Tensor]:
    """A kind that has rounded a layer and a head, and the layer's weights."""
    kind = Quantizing(Dense, torch.float32, SCHEMES[name], SCHEMES[name])
    own = source(kind)
    own.linear(StoredLinear("a", 65, 96))
    own.linear(StoredLinear("h", 8, 96, role="head"))
    return kind, source(Dense).linear(StoredLinear("a", 65, 96)).weight


@pytest.mark.parametrize("name", ["int4", "fp8", "int8_w8a8"])
def test_the_relative_error_is_that_of_some_rows(name: str) -> None:
    kind, weight = taken(name)
    rows, form = weight[[0, 64]], SCHEMES[name].form
    expected = (dequantize(quantize_searched(rows, form), form) - rows).norm() / rows.norm()
    found = rounding_of(kind)
    assert found is not None
    assert found.error == found.worst_error == pytest.approx(float(expected), rel=1e-4)
    assert found.worst == "a"
    assert rounding_of(Dense) is None


@pytest.mark.parametrize(("name", "says"), [("int4", True), ("int8", False)])
def test_a_start_says_that_weights_are_roughly_rounded(name: str, says: bool) -> None:
    stream = io.StringIO()
    say_cost_of_rounding(StartProgress("lines", stream), taken(name)[0], name)
    assert (f"quantization='{name}' rounds this model's weights roughly" in stream.getvalue()) == says
