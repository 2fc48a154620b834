"""Which product and which tile a layer of quantised weights has on a GPU: defaults, and files of measured ones.

``compiled-llm tune linear`` writes ``ops/tiles/linear/<GPU>.json``; a layer that it lacks, and a GPU without a file,
get the defaults below. Neither torch nor Triton is imported here, so the choice can be tested anywhere.

A row's bits must not depend on how many rows there are, so what follows the number of rows may not change them:

- Activations as they are: Triton kernels alone, which add inputs up in one order, by one kind of instruction. On Hopper
  that is ``wgmma``, on Blackwell ``tcgen05``, which Triton takes for tiles of 64 outputs and more, with warps in fours;
  versions 3.6 and 3.7 not for fewer than 16 rows.
- Activations of int8: sums within a group are exact integers, and what follows is defined to the operation. So any tile
  will do; and so will any exact product of int8, where there is one group (``triton_int8_scaling.py``).
"""

import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).parents[1] / "tiles" / "linear"
IMPLEMENTATIONS = ("triton", "int_mm")
INT_MM_ROWS = 16  # torch._int_mm takes more than these
_INT_MM_OUTPUTS = 8  # and a multiple of these


class Tile(NamedTuple):
    """What a program computes, and how: ``m`` rows, ``n`` outputs."""

    m: int
    n: int
    warps: int
    stages: int


class Layer(NamedTuple):
    """What a choice is made for.

    Attributes:
        element, group_size, zeros: the form of the weights, as ``WeightFormat`` has them.
        int8_activations: whether activations are quantised to int8.
        itemsize: bytes of an element of x.
        out_features, in_features: N and K.
        experts: 0: a layer of its own.
    """

    element: str
    group_size: int
    zeros: bool
    int8_activations: bool
    itemsize: int
    out_features: int
    in_features: int
    experts: int = 0


class Choice(NamedTuple):
    """What steps of up to ``rows`` rows use: "triton" with a tile, or "int_mm"."""

    rows: int
    implementation: str
    tile: Tile | None = None


# Their ``m`` is the number of rows up to which they serve; the last serves any number. Chosen so that no registers
# spill: the tests that compile them ahead of time assert it.
WGMMA = (Tile(16, 64, 4, 8), Tile(32, 64, 4, 6), Tile(64, 64, 4, 4), Tile(128, 128, 8, 3))
MMA = (Tile(8, 64, 4, 6), Tile(16, 64, 4, 5), Tile(32, 64, 8, 4), Tile(64, 64, 4, 3), Tile(128, 128, 8, 2))
MMA_GROUPS = (*MMA[:4], Tile(128, 64, 8, 2))  # decoded halves of bytes beside the sums of a group and of all groups
MMA_EXPERTS_ZEROS = (MMA[0], Tile(16, 64, 8, 5), *MMA_GROUPS[2:])  # of bytes
MMA_EXPERTS_FP8 = (*MMA[:4], Tile(128, 128, 8, 3))  # in groups of 128
FLOAT32 = (Tile(16, 32, 4, 2), Tile(32, 64, 8, 2))
INT8 = (Tile(8, 64, 4, 8), Tile(16, 64, 4, 6), Tile(64, 64, 4, 4), Tile(128, 128, 8, 3))
INT8_ZEROS = (*INT8[:3], Tile(128, 64, 8, 3))  # in groups, here and below
INT8_ZEROS_MMA = (*INT8[:2], Tile(64, 128, 8, 3))  # without wgmma what is multiplied takes registers too
INT8_EXPERTS = (*INT8[:2], Tile(64, 128, 8, 3))  # their rows' addresses take registers too
INT8_EXPERTS_ZEROS = (*INT8[:2], Tile(32, 128, 8, 3))
INT8_EXPERTS_ZEROS_MMA = (*INT8[:2], Tile(32, 64, 4, 3))
# In place of the first of experts' tiles where 4 warps would spill: int4 in groups of 64 or more, before Hopper.
FEW_OF_INT4 = Tile(8, 64, 8, 8)


def default_tiles(layer: Layer, capability: tuple[int, int]) -> tuple[Tile, ...]:
    """Without a file."""
    tiles = _tiles(layer, capability)
    return tiles if keeps_instruction(layer, tiles[0], capability) else tiles[1:]


def _tiles(layer: Layer, capability: tuple[int, int]) -> tuple[Tile, ...]:
    """The first may be for so few rows that it has another instruction than the others."""
    if layer.int8_activations:
        if not layer.group_size:
            return INT8
        if layer.experts:
            return _of_experts(layer, capability)
        if not layer.zeros:
            return INT8
        return INT8_ZEROS if capability[0] == 9 else INT8_ZEROS_MMA
    if layer.itemsize == 4:
        return FLOAT32
    if capability[0] == 9:
        return WGMMA
    zeros_of_128 = layer.group_size == 128 and layer.zeros
    if layer.element == "int4":
        return MMA_GROUPS if zeros_of_128 or layer.group_size == 64 else MMA
    if layer.experts and layer.element == "fp8" and layer.group_size == 128:
        return MMA_EXPERTS_FP8
    return MMA_EXPERTS_ZEROS if zeros_of_128 and layer.experts else MMA


def _of_experts(layer: Layer, capability: tuple[int, int]) -> tuple[Tile, ...]:
    """With int8 activations and weights in groups."""
    tiles = INT8_EXPERTS
    if layer.zeros:
        tiles = INT8_EXPERTS_ZEROS if capability[0] == 9 else INT8_EXPERTS_ZEROS_MMA
    needs_warps = capability[0] == 8 and layer.element == "int4" and layer.group_size >= 64
    return (FEW_OF_INT4, *tiles[1:]) if needs_warps else tiles


def choose(layer: Layer, rows: int, capability: tuple[int, int], gpu: str = "") -> Choice:
    """The choice for so many rows: from the file of ``gpu`` if that has the layer, else a default.

    Of experts, ``rows`` are those of one.

    Raises:
        ValueError: the file has a choice that this layer cannot have.
    """
    measured = load(path_of(gpu)).get(layer)
    choices = measured or tuple(Choice(tile.m, "triton", tile) for tile in default_tiles(layer, capability))
    return next((choice for choice in choices if rows <= choice.rows), choices[-1])


def takes_int_mm(layer: Layer) -> bool:
    """Whether ``torch._int_mm`` can multiply this layer's codes, by more than ``INT_MM_ROWS`` rows."""
    one_group = layer.int8_activations and layer.element == "int8" and layer.group_size == 0
    return one_group and not layer.experts and layer.out_features % _INT_MM_OUTPUTS == 0


def reason_against(layer: Layer, choices: tuple[Choice, ...], capability: tuple[int, int]) -> str:
    """Why ``choices``, by rising rows, cannot be those of a layer on such a GPU; "" if they can."""
    above = 0
    for rows, implementation, tile in choices:
        if rows <= above:
            return f"rows must rise from choice to choice, got {rows} after {above}"
        if implementation not in IMPLEMENTATIONS:
            return f"implementation must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}"
        if implementation == "int_mm":
            if not takes_int_mm(layer):
                return (
                    "int_mm is for int8 weights with a scale for each output and int8 activations, a multiple of "
                    f"{_INT_MM_OUTPUTS} outputs, and no experts"
                )
            if above < INT_MM_ROWS:
                return f"int_mm takes more than {INT_MM_ROWS} rows: another choice must serve up to {INT_MM_ROWS}"
        elif tile is None or not _is_tile(tile):
            return f"triton needs a tile whose m and n are powers of two, from 8 and 16 on, got {tile}"
        elif not keeps_instruction(layer, tile, capability):
            return (
                "on this GPU m must be 16 or more, n 64 or more and warps a multiple of 4, got "
                f"{tile}: else rows would lose bits"
            )
        above = rows
    return "" if choices else "there must be one choice at least"


def _is_tile(tile: Tile) -> bool:
    powers = not any(size & (size - 1) for size in tile[:2])
    return powers and tile.m >= 8 and tile.n >= 16 and min(tile[2:]) >= 1


def keeps_instruction(layer: Layer, tile: Tile, capability: tuple[int, int]) -> bool:
    """Whether a tile's products are of the one kind of instruction that all tiles of the layer must have."""
    any_will_do = layer.int8_activations or layer.itemsize == 4 or capability[0] not in (9, 10)
    return any_will_do or (tile.m >= 16 and tile.n >= 64 and tile.warps % 4 == 0)


# -- Files


def path_of(gpu: str) -> Path:
    """The file of a GPU, by the name that ``torch.cuda.get_device_name`` gives it."""
    return FOLDER / (re.sub(r"[^A-Za-z0-9]+", "_", gpu).strip("_") + ".json")


def save(
    path: Path, gpu: str, capability: tuple[int, int], layers: Mapping[Layer, tuple[Choice, ...]]
) -> None:  # fmt: skip
    """Write a GPU's file."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def written(choice: Choice) -> dict:
        tile = {} if choice.tile is None else {"tile": choice.tile._asdict()}
        return {"rows": choice.rows, "implementation": choice.implementation, **tile}

    entries = [layer._asdict() | {"choices": [*map(written, layers[layer])]} for layer in sorted(layers)]
    path.write_text(json.dumps({"gpu": gpu, "capability": capability, "layers": entries}, indent=1) + "\n")


@functools.cache
def load(path: Path) -> dict[Layer, tuple[Choice, ...]]:
    """The contents of a file, empty if there is none. Read once: a running engine never changes its tiles.

    Raises:
        ValueError: it is not such a file, or has a choice that a layer cannot have.
    """
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text())
        major, minor = content["capability"]
        layers = {}
        for entry in content["layers"]:
            choices = tuple(_choice(**fields) for fields in entry.pop("choices"))
            layers[Layer(**entry)] = choices
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path} is no file of tiles ({error!r}): write it anew by compiled-llm tune linear"
        ) from error
    for layer, choices in layers.items():
        reason = reason_against(layer, choices, (major, minor))
        if reason:
            raise ValueError(f"{path}: {layer}: {reason}; write it anew by compiled-llm tune linear")
    return layers


def _choice(rows: int, implementation: str, tile: Mapping[str, int] | None = None) -> Choice:
    return Choice(rows, implementation, None if tile is None else Tile(**tile))
