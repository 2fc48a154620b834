"""tune_linear: candidates, what it writes (in Triton's interpreter), what it leaves out, refusals."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from compiled_llm.ops.linear import product_choices, quantized_tiles
from compiled_llm.ops.linear.product_choices import Product
from compiled_llm.ops.linear.quantized_tiles import Choice, Layer, choose, reason_against
from compiled_llm.ops.linear.quantized_weight import WeightFormat

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
INT8 = WeightFormat("int8")
W8A8 = Layer("int8", 0, False, True, 2, 6144, 4096)
INT4 = Layer("int4", 32, False, False, 2, 6144, 4096)


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("tune_linear")


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["tune_linear.py", *arguments])
    try:
        return script.main()
    except SystemExit as end:
        return int(end.code or 0)


@pytest.mark.parametrize("layer", [W8A8, INT4, INT4._replace(experts=128)])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_candidates_are_choices_that_a_layer_can_have(
    script: ModuleType, layer: Layer, capability: tuple[int, int]
) -> None:
    for below, rows in ((0, 16), (16, 64), (256, 2048)):
        start = choose(layer, rows, capability)._replace(rows=rows)
        found = script.candidates(layer, below, rows, start, capability, 227 * 1024)
        assert len(set(found)) == len(found) > 10
        assert start not in found
        first = (Choice(below, "triton", start.tile),) if below else ()
        for choice in found:
            assert reason_against(layer, (*first, choice), capability) == ""
        assert (Choice(rows, "int_mm") in found) == (layer == W8A8 and below >= 16)
        distances = [sum(a != b for a, b in zip(c.tile, start.tile, strict=True)) for c in found if c.tile]
        assert distances == sorted(distances)


@pytest.mark.parametrize(
    ("kind", "layer"),
    [
        ("int8_w8a8", ["16x64"]),
        pytest.param("int4", ["24x72"], marks=pytest.mark.battery),
        pytest.param("int8", ["16x64", "--experts", "2"], marks=pytest.mark.battery),
    ],
)
def test_it_writes_a_file_that_kernels_read(kind: str, layer: list[str], tmp_path: Path) -> None:
    """In the interpreter."""
    file = tmp_path / "tiles.json"
    command = [sys.executable, str(ROOT / "scripts" / "tune_linear.py"), "--kind", kind, "--layer", *layer]
    done = subprocess.run(
        [*command, "--rows", "16", "17", "--seconds", "0.1", "--output", str(file)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["tiles"] == str(file)
    assert "left out" not in done.stdout
    assert "does not run" not in done.stdout
    ((found, choices),) = quantized_tiles.load(file).items()
    assert (found.element, found.int8_activations) == (kind[:4], kind == "int8_w8a8")
    assert found.experts == (2 if "--experts" in layer else 0)
    assert [choice.rows for choice in choices] == [16, 17]


@pytest.mark.parametrize("product", [Product(6144, 4096, "residual"), Product(24576, 4096, "gate")])
def test_candidates_of_plain_products_are_choices_that_there_are(script: ModuleType, product: Product) -> None:
    for rows in (1, 16, 256):
        start = product_choices.choose(product, rows, "")._replace(rows=rows)
        found = script.tune_linear_products.candidates(product, rows, start, 227 * 1024)
        assert len(set(found)) == len(found) > 10
        assert start not in found
        assert {choice.way for choice in (start, *found)} == {"fused", "apart"}
        for choice in found:
            assert product_choices.reason_against((choice,)) == ""


def test_plain_products_are_chosen_too(tmp_path: Path) -> None:
    """In the interpreter, whose times mean nothing."""
    file = tmp_path / "products.json"
    command = [sys.executable, str(ROOT / "scripts" / "tune_linear.py"), "--kind", "bfloat16", "--layer", "32x64"]
    done = subprocess.run(
        [*command, "--rows", "2", "33", "2048", "--seconds", "0.1", "--output", str(file)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "left out" not in done.stdout
    products = product_choices.load(file)
    assert set(products) == {Product(32, 64, around) for around in product_choices.AROUND}
    assert all([choice.rows for choice in choices] == [2, 33] for choices in products.values())


def test_a_product_with_other_numbers_is_left_out_and_said(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = script.tune_linear_products.Case(Product(32, 64, "residual"), 4, "cpu")
    right = case.right(4)
    assert 0 < case.seconds(4, product_choices.Choice(4, "apart"), right) < 60
    monkeypatch.setattr(case, "run", lambda copy, rows, choice: right + 1)
    assert case.seconds(4, product_choices.Choice(4, "fused"), right) == float("inf")
    assert "left out, off by" in capsys.readouterr().out


def test_other_bits_are_left_out_and_said(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    case = script.Case(script.Job("int8_w8a8", W8A8._replace(out_features=8, in_features=64), INT8), 16, "cpu")
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
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script.Case, "run", lambda self, copy, rows, choice: torch.full((rows, 1), float(rows)))
    job = script.Job("int8_w8a8", W8A8._replace(out_features=8, in_features=64), INT8)
    with pytest.raises(script.BitsError, match="in use gives rows other bits"):
        script.tune(job, [16, 64], (9, 0), "", 1 << 17, 1.0, "cpu")


def test_a_dry_run_needs_no_gpu_and_writes_nothing(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    file = tmp_path / "tiles.json"
    arguments = ["--dry-run", "--kind", "int8_w8a8", "fp8", "--layer", "6144x4096", "--output", str(file)]
    assert run(script, monkeypatch, *arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 2 * 4
    assert lines[2].endswith("of int_mm, triton")
    assert lines[1].endswith("of triton")
    assert not file.exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no CUDA GPU"),
        (["--layer", "6144"], "--layer must be OUTPUTSxINPUTS"),
        (["--rows", "64", "16"], "--rows must rise"),
        (["--kind", "int5"], "--kind"),
    ],
)
def test_what_is_refused(
    script: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(script, monkeypatch, *arguments) == 2
    assert message in capsys.readouterr().err
