"""How products of plain 16-bit weights are computed on a GPU, by shape and rows: defaults, and files.

A product of few rows is either "fused", one launch with activation or residual (``exact_linear.py``), or "apart": a
library's product, and what follows it as launches of its own. Which is faster, and in which tiles, a GPU has to
say: ``compiled-llm tune linear`` writes ``ops/tiles/products/<GPU>.json``. What it lacks, and a GPU without a file, get
the defaults below. With ``exact=True`` all products have the one kernel, and the file says in which tiles: these change
no bits.

The choice is made when a step is traced. So it is in the graph that is compiled, and in the key by which torch keeps
its code: a file that is written anew compiles the steps anew that it changes.
"""

import functools
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from compiled_llm.ops.torch_private import constant_in_graphs

FOLDER = Path(__file__).parents[1] / "tiles" / "products"
AROUND = ("gate", "residual")
WAYS = ("fused", "apart")

MAX_ROWS = 32
"""Most rows that are fused by default: up to these a tile has all of them, so that weights are read once."""

CHAIN_GRAIN = 128  # inputs
_CHAINED = ((4, 2560, 1536), (2, 4096, 4096))  # parts, of so many outputs at most and inputs at least
_SMALLEST_TILE = 16  # outputs


def num_chains(out_features: int, in_features: int) -> int:
    """In how many parts, one after the other, the inputs of a sum are added up; their sums are added in that order.

    It follows from the shape alone, so a sum is the same for all numbers of rows. Few outputs of many inputs keep few
    of a GPU's programs busy, each for long: so their parts can go to as many programs.
    """
    fits = (parts for parts, most, least in _CHAINED if out_features <= most and in_features >= least)
    return next(fits, 1)


def num_counters(out_features: int, in_features: int) -> int:
    """Of the parts of each tile that are done, where parts go to several programs; else 0."""
    return -(-out_features // _SMALLEST_TILE) if num_chains(out_features, in_features) > 1 else 0


class LinearTile(NamedTuple):
    """What a program computes at a time: ``n`` outputs of ``m`` rows from ``k`` inputs."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


class Product(NamedTuple):
    """What a choice is made for.

    Attributes:
        out_features, in_features: of the weight; with a gate, gates and ups together.
        around: what follows it, one of ``AROUND``: a gated activation, or a residual or nothing.
    """

    out_features: int
    in_features: int
    around: str


class Choice(NamedTuple):
    """What steps of up to ``rows`` rows use: "fused" or "apart", and the kernel's tile, if not a default one."""

    rows: int
    way: str
    tile: LinearTile | None = None


def default_choice(rows: int) -> Choice:
    """Without a file: few rows are fused."""
    return Choice(MAX_ROWS, "fused") if rows <= MAX_ROWS else Choice(rows, "apart")


def choose(product: Product, rows: int, gpu: str) -> Choice:
    """The choice for so many rows: from the file of ``gpu`` if that has the product and as many rows, else a default.

    Raises:
        ValueError: the file has a choice that there is not.
    """
    measured = load(path_of(gpu)).get(product, ())
    return next((choice for choice in measured if rows <= choice.rows), None) or default_choice(rows)


@constant_in_graphs
def is_fused(out_features: int, in_features: int, around: str, rows: int, device: int) -> bool:
    """Whether such a product is fused on CUDA device number ``device``: a constant of the graph that asks."""
    return choose(Product(out_features, in_features, around), rows, gpu_name(device)).way == "fused"


@functools.cache
def gpu_name(device: int) -> str:
    """By which files are found; "" where no GPU is."""
    return torch.cuda.get_device_name(device) if torch.cuda.is_available() else ""


def reason_against(choices: tuple[Choice, ...]) -> str:
    """Why ``choices``, by rising rows, cannot be those of a product; "" if they can."""
    above = 0
    for rows, way, tile in choices:
        if rows <= above:
            return f"rows must rise from choice to choice, got {rows} after {above}"
        if way not in WAYS:
            return f"way must be one of {', '.join(WAYS)}, got {way!r}"
        if tile is not None and not _is_tile(tile):
            return f"a tile's m, n and k are powers of two from 16 on and warps to 8, got {tile}"
        above = rows
    return "" if choices else "there must be one choice at least"


def _is_tile(tile: LinearTile) -> bool:
    is_power = all(size >= 16 and not size & (size - 1) for size in tile[:3])
    return is_power and tile.warps in (1, 2, 4, 8) and tile.stages >= 1


# -- Files


def path_of(gpu: str) -> Path:
    """The file of a GPU, by the name that ``torch.cuda.get_device_name`` gives it."""
    return FOLDER / (re.sub(r"[^A-Za-z0-9]+", "_", gpu).strip("_") + ".json")


def said_of(gpu: str) -> str:
    """For reports: where choices come from."""
    path = path_of(gpu)
    if not path.is_file():
        return "defaults"
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    return f"measured, {len(load(path))} products ({path.name}, sha256 {digest})"


def save(path: Path, gpu: str, products: Mapping[Product, tuple[Choice, ...]]) -> None:
    """Write a GPU's file."""
    path.parent.mkdir(parents=True, exist_ok=True)

    def written(choice: Choice) -> dict[str, Any]:
        tile = {} if choice.tile is None else {"tile": choice.tile._asdict()}
        return {"rows": choice.rows, "way": choice.way, **tile}

    entries = [product._asdict() | {"choices": [*map(written, products[product])]} for product in sorted(products)]
    lines = ",\n  ".join(map(json.dumps, entries))
    path.write_text(f'{{"gpu": {json.dumps(gpu)}, "products": [\n  {lines}\n]}}\n')


@functools.cache
def load(path: Path) -> dict[Product, tuple[Choice, ...]]:
    """The contents of a file, empty if there is none. Read once: a running engine never changes its choices.

    Raises:
        ValueError: it is not such a file, or has a choice that there is not.
    """
    if not path.is_file():
        return {}
    try:
        products = {}
        for entry in json.loads(path.read_text())["products"]:
            choices = tuple(_choice(**fields) for fields in entry.pop("choices"))
            products[Product(**entry)] = choices
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{path} is no file of choices ({error!r}): write it anew by compiled-llm tune linear"
        ) from error
    for product, choices in products.items():
        reason = reason_against(choices)
        if product.around not in AROUND:
            reason = f"around must be one of {', '.join(AROUND)}"
        if reason:
            raise ValueError(f"{path}: {product}: {reason}; write it anew by compiled-llm tune linear")
    return products


def _choice(rows: int, way: str, tile: Mapping[str, int] | None = None) -> Choice:
    return Choice(rows, way, None if tile is None else LinearTile(**tile))
