"""Which product and tile a quantised layer has on a GPU: defaults, files, and choices that are refused."""

import json
from pathlib import Path

import pytest

from compiled_llm.ops.linear import quantized_tiles
from compiled_llm.ops.linear.quantized_tiles import Choice, Layer, Tile, choose, load, path_of, save

H200 = "NVIDIA H200"
W8A8 = Layer("int8", 0, False, True, 2, 6144, 4096)
INT4 = Layer("int4", 128, False, False, 2, 6144, 4096)
SMALL, LARGE = Tile(16, 64, 4, 6), Tile(128, 256, 8, 3)
MEASURED = {
    W8A8: (Choice(16, "triton", SMALL), Choice(64, "triton", LARGE), Choice(2048, "int_mm")),
    INT4: (Choice(8192, "triton", LARGE),),
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(quantized_tiles, "FOLDER", tmp_path / "linear")
    return tmp_path / "linear"


def test_a_file_is_read_back_and_chosen_by_rows(folder: Path) -> None:
    path = path_of(H200)
    assert path == folder / "NVIDIA_H200.json"
    save(path, H200, (9, 0), MEASURED)
    assert load(path) == MEASURED
    for rows, choice in ((1, 0), (16, 0), (17, 1), (64, 1), (65, 2), (2048, 2), (100_000, 2)):
        assert choose(W8A8, rows, (9, 0), H200) == MEASURED[W8A8][choice]
    assert choose(INT4, 1, (9, 0), H200).tile == LARGE
    for other in (INT4._replace(zeros=True), INT4._replace(experts=8), INT4._replace(itemsize=4)):
        assert choose(other, 1, (9, 0), H200) == choose(other, 1, (9, 0))
    assert choose(W8A8, 2048, (9, 0), "NVIDIA H100 80GB HBM3").implementation == "triton"


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("layer", [W8A8, INT4, INT4._replace(itemsize=4), INT4._replace(experts=8)])
def test_defaults_are_choices_that_a_layer_can_have(layer: Layer, capability: tuple[int, int]) -> None:
    choices = tuple(Choice(tile.m, "triton", tile) for tile in quantized_tiles.default_tiles(layer, capability))
    assert quantized_tiles.reason_against(layer, choices, capability) == ""
    assert choose(layer, 1, capability) == choices[0]
    assert choose(layer, 10_000, capability) == choices[-1]


def test_int8_products_are_for_one_group_of_int8() -> None:
    assert quantized_tiles.takes_int_mm(W8A8)
    assert quantized_tiles.takes_int_mm(W8A8._replace(zeros=True, in_features=257))
    for other in (
        W8A8._replace(int8_activations=False),
        W8A8._replace(element="int4"),
        W8A8._replace(group_size=128),
        W8A8._replace(out_features=6143),
        W8A8._replace(experts=8),
    ):
        assert not quantized_tiles.takes_int_mm(other)


REFUSED = {
    "one choice at least": (W8A8, ()),
    "rows must rise": (W8A8, (Choice(16, "triton", SMALL), Choice(16, "triton", LARGE))),
    "implementation must be one of triton, int_mm, got 'cublas'": (W8A8, (Choice(16, "cublas"),)),
    "int_mm is for int8": (INT4, (Choice(16, "triton", SMALL), Choice(64, "int_mm"))),
    "int_mm takes more than 16 rows": (W8A8, (Choice(8, "triton", SMALL), Choice(64, "int_mm"))),
    "triton needs a tile": (W8A8, (Choice(16, "triton"),)),
    "powers of two, from 8 and 16 on": (W8A8, (Choice(16, "triton", Tile(48, 64, 4, 2)),)),
    "m must be 16 or more, n 64 or more and warps a multiple of 4": (INT4, (Choice(16, "triton", Tile(16, 32, 4, 2)),)),
    "got Tile.*warps=2": (INT4, (Choice(16, "triton", Tile(16, 64, 2, 2)),)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_choices_that_a_layer_cannot_have_are_refused(message: str, folder: Path) -> None:
    layer, choices = REFUSED[message]
    path = path_of(H200)
    save(path, H200, (9, 0), {layer: choices})
    with pytest.raises(ValueError, match=rf"(?s)NVIDIA_H200\.json.*{message}.*tune linear"):
        choose(INT4, 1, (9, 0), H200)


def test_only_activations_as_they_are_have_one_kind_of_instruction(folder: Path) -> None:
    narrow = (Choice(16, "triton", Tile(16, 32, 2, 2)),)
    for layer, capability in ((W8A8, (9, 0)), (INT4._replace(itemsize=4), (9, 0)), (INT4, (8, 0))):
        assert quantized_tiles.reason_against(layer, narrow, capability) == ""


@pytest.mark.parametrize("text", ["", "[]", '{"gpu": "x"}', '{"capability": [9, 0], "layers": [{"choices": []}]}'])
def test_other_files_are_refused(text: str, folder: Path) -> None:
    folder.mkdir()
    path_of(H200).write_text(text)
    with pytest.raises(ValueError, match=r"NVIDIA_H200\.json is no file of tiles .*tune linear"):
        choose(INT4, 1, (9, 0), H200)


def test_files_in_the_package_are_whole() -> None:
    for path in quantized_tiles.FOLDER.glob("*.json"):
        assert load(path)
        assert path == path_of(json.loads(path.read_text())["gpu"])
