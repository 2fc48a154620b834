"""Which products are fused on a GPU: defaults, files, and what is refused."""

import json
from pathlib import Path

import pytest
import torch

from compiled_llm.ops.linear import product_choices
from compiled_llm.ops.linear.product_choices import AROUND, Choice, LinearTile, Product, choose, load, path_of, save
from compiled_llm.report.report import _products

GPU = "NVIDIA H200"
QKV = Product(6144, 4096, "residual")
MEASURED = (Choice(4, "fused", LinearTile(16, 64, 128, 4, 4)), Choice(16, "apart"), Choice(64, "fused"))


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(product_choices, "FOLDER", tmp_path / "products")


def test_without_a_file_few_rows_are_fused() -> None:
    for around in AROUND:
        ways = {rows: choose(Product(64, 32, around), rows, GPU).way for rows in (1, 32, 33)}
        assert ways == {1: "fused", 32: "fused", 33: "apart"}


def test_a_file_chooses_by_shape_and_rows() -> None:
    save(path_of(GPU), GPU, {QKV: MEASURED})
    assert [choose(QKV, rows, GPU) for rows in (1, 4, 5, 16, 17, 64)] == [
        one for one in MEASURED for _ in range(2)
    ]  # fmt: skip
    assert choose(QKV, 65, GPU).way == "apart", "the default"
    for other in (QKV._replace(around="gate"), QKV._replace(in_features=64)):
        assert choose(other, 5, GPU).way == "fused", "the default"
    assert choose(QKV, 5, "NVIDIA H100").way == "fused", "a file is one GPU's"


def test_a_graph_has_the_choice_as_a_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    save(path_of(GPU), GPU, {QKV: MEASURED})
    monkeypatch.setattr(product_choices, "gpu_name", lambda device: GPU)

    @torch.compile(fullgraph=True, dynamic=False, backend="eager")
    def chosen(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if product_choices.is_fused(6144, 4096, "residual", x.shape[0], 0) else x - 1

    assert chosen(torch.zeros(4)).tolist() == [1] * 4
    assert chosen(torch.zeros(5)).tolist() == [-1] * 5


def test_a_report_says_where_choices_come_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_choices, "gpu_name", lambda device: GPU)
    device = torch.device("cuda", 0)
    assert _products(torch.device("cpu")) == {}
    assert _products(device) == {"products": "defaults"}
    save(path_of(GPU), GPU, {QKV: MEASURED})
    assert _products(device)["products"].startswith("measured, 1 products (NVIDIA_H200.json, sha256 ")


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ((Choice(16, "fused"), Choice(16, "apart")), "rows must rise from choice to choice, got 16 after 16"),
        ((Choice(16, "cublas"),), "way must be one of fused, apart, got 'cublas'"),
        ((Choice(16, "fused", LinearTile(24, 64, 64, 4, 3)),), "powers of two from 16 on"),
        ((Choice(16, "fused", LinearTile(16, 64, 64, 3, 3)),), "warps to 8"),
        ((), "at least"),
    ],
)
def test_refuses_by_name(choices: tuple[Choice, ...], message: str) -> None:
    save(path_of(GPU), GPU, {QKV: choices})
    with pytest.raises(ValueError, match=rf"(?s)NVIDIA_H200\.json.*{message}.*tune linear"):
        load(path_of(GPU))


def test_refuses_what_is_no_file_of_choices() -> None:
    path_of(GPU).parent.mkdir()
    path_of(GPU).write_text(json.dumps({"layers": []}))
    with pytest.raises(ValueError, match=r"NVIDIA_H200\.json is no file of choices .*tune linear"):
        load(path_of(GPU))
    path_of("other").write_text(json.dumps({"products": [{**QKV._asdict(), "around": "all", "choices": [
        {"rows": 4, "way": "apart"}]}]}))  # fmt: skip
    with pytest.raises(ValueError, match="around must be one of gate, residual"):
        load(path_of("other"))
