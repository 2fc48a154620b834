"""Candidates for linear layers, and what is left out of them; test_interpreted.py has what is written."""

from pathlib import Path

import pytest
import torch

from compiled_llm.ops.linear import product_choices
from compiled_llm.ops.linear.product_choices import Product
from compiled_llm.ops.linear.quantized_tiles import Choice, Layer, choose, reason_against
from compiled_llm.ops.linear.quantized_weight import WeightFormat
from compiled_llm.tuning import linear, products
from compiled_llm.tuning.search import Gpu, InUseError

pytest.importorskip("triton")

INT8 = WeightFormat("int8")
W8A8 = Layer("int8", 0, False, True, 2, 6144, 4096)
INT4 = Layer("int4", 32, False, False, 2, 6144, 4096)


@pytest.mark.parametrize("layer", [W8A8, INT4, INT4._replace(experts=128)])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_candidates_are_choices_that_a_layer_can_have(layer: Layer, capability: tuple[int, int]) -> None:
    for below, rows in ((0, 16), (16, 64), (256, 2048)):
        start = choose(layer, rows, capability)._replace(rows=rows)
        found = linear.candidates(layer, below, rows, start, Gpu(capability=capability))
        assert len(set(found)) == len(found) > 10
        assert start not in found
        first = (Choice(below, "triton", start.tile),) if below else ()
        for choice in found:
            assert reason_against(layer, (*first, choice), capability) == ""
        assert (Choice(rows, "int_mm") in found) == (layer == W8A8 and below >= 16)
        distances = [sum(a != b for a, b in zip(c.tile, start.tile, strict=True)) for c in found if c.tile]
        assert distances == sorted(distances)


@pytest.mark.parametrize("product", [Product(6144, 4096, "residual"), Product(24576, 4096, "gate")])
def test_candidates_of_plain_products_are_choices_that_there_are(product: Product) -> None:
    for rows in (1, 16, 256):
        start = product_choices.choose(product, rows, "")._replace(rows=rows)
        found = products.candidates(product, rows, start, Gpu())
        assert len(set(found)) == len(found) > 10
        assert start not in found
        assert {choice.way for choice in (start, *found)} == {"fused", "apart"}
        for choice in found:
            assert product_choices.reason_against((choice,)) == ""


def test_a_product_with_other_numbers_is_left_out_and_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = products.Case(Product(32, 64, "residual"), 4, Gpu())
    right = case.right(4)
    assert 0 < case.seconds(4, product_choices.Choice(4, "apart")) < 60
    monkeypatch.setattr(case, "run", lambda copy, rows, choice: right + 1)
    assert case.seconds(4, product_choices.Choice(4, "fused")) == float("inf")
    assert "left out, off by" in capsys.readouterr().out


def test_other_bits_are_left_out_and_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    case = linear.Case(linear.Job("int8_w8a8", W8A8._replace(out_features=8, in_features=64), INT8), 16, "cpu")
    right = torch.ones(4, 8)
    outputs = {"same": right, "other": right + 2**-10}

    def launch(copy: int, rows: int, choice: Choice) -> torch.Tensor:
        if choice.implementation == "fails":
            raise RuntimeError("no such product\nand more")
        return outputs[choice.implementation]

    monkeypatch.setattr(case, "run", launch)
    assert 0 < case.seconds(4, Choice(16, "same"), right) < 60
    for _ in range(2):
        assert case.seconds(4, Choice(16, "other"), right) == float("inf")
        assert case.seconds(4, Choice(16, "fails"), right) == float("inf")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2
    assert "depend on the batch" in lines[0]
    assert lines[1].endswith("fails does not run: no such product")


def test_tiles_in_use_that_break_the_promise_end_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(linear.Case, "run", lambda self, copy, rows, choice: torch.full((rows, 1), float(rows)))
    job = linear.Job("int8_w8a8", W8A8._replace(out_features=8, in_features=64), INT8)
    with pytest.raises(InUseError, match="in use does not run, or gives rows other bits"):
        linear.tune(job, [16, 64], Gpu(), 1.0)
