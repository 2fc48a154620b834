"""The engine's products beside cuBLAS on this GPU, and which tiles would be faster.

    python scripts/bench/probe_linear.py --output FOLDER

For the linear layers of two models in bfloat16: microseconds of ``F.linear`` with single ops behind it, of the
engine's op as it is, and of other tiles, whose bits must be the same; then of the four products of a layer behind each
other, with norms, as the engine runs them (``graph_times.py`` says how). All kernels are compiled first, in parallel
processes. ``probe_linear.json`` in FOLDER is written as it goes; a table is printed at the end.
"""

import argparse
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import own_checkout
import torch
import torch.nn.functional as F
from graph_times import Run, launches_for, slopes
from torch import Tensor
from turns import wait_for_turn

from compiled_llm import ops
from compiled_llm.api.command_line import FlagParser
from compiled_llm.models.linears import fused as layers
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.exact import Exact
from compiled_llm.models.linears.fused import added_linear, normed_linear
from compiled_llm.ops.linear import product_choices
from compiled_llm.ops.linear.product_choices import Choice, LinearTile
from compiled_llm.ops.linear.surroundings import Surroundings, surrounded
from compiled_llm.ops.programmatic_launch import programmatic_launches

EPS = 1e-5
BUFFER = 1 << 31  # elements of bfloat16, of which all weights are views
TOLERANCE = 0.02  # of the largest output
SECONDS = 0.2  # of a case


class Product(NamedTuple):
    """``around``: what follows it, as ``product_choices.Product`` has it."""

    model: str
    name: str
    outputs: int
    inputs: int
    around: str


BIG, SMALL = "llama-3.1-8b", "qwen3-0.6b"
PRODUCTS = [
    Product(BIG, "qkv", 6144, 4096, ""),
    Product(BIG, "o", 4096, 4096, "residual"),
    Product(BIG, "gate_up", 28672, 4096, "gate"),
    Product(BIG, "down", 4096, 14336, "residual"),
    Product(BIG, "head", 128256, 4096, ""),
    Product(SMALL, "qkv", 4096, 1024, ""),
    Product(SMALL, "o", 1024, 2048, "residual"),
    Product(SMALL, "gate_up", 6144, 1024, "gate"),
    Product(SMALL, "down", 1024, 3072, "residual"),
    Product(SMALL, "head", 151936, 1024, ""),
]
# In the order of their weight, should the time run out.
POINTS = [(BIG, 1), (BIG, 32), (SMALL, 1), (SMALL, 32), (BIG, 256), (BIG, 2048), (BIG, 64), (BIG, 128), (SMALL, 256)]
BOUNDS = {1: 16, 32: 32, 64: 64, 128: 128, 256: 256, 2048: 1 << 20}  # rows for which a measured number of them speaks
WORTH = 0.985  # of the time of the tile in use: more is noise


def tiles_of(product: Product, rows: int) -> list[LinearTile]:
    if rows <= 32:
        m = 16 if rows <= 16 else 32
        found = [(64, 128, 4, 8), (64, 128, 4, 4), (64, 128, 4, 6), (64, 64, 4, 8), (128, 128, 8, 4), (64, 256, 4, 3)]
        if product.around != "gate" and product.name != "head":
            found += [(64, 256, 4, 4), (32, 256, 4, 4), (16, 256, 4, 4), (32, 128, 4, 6), (32, 128, 4, 8)]
        return [LinearTile(m, *rest) for rest in found]
    if rows <= 64:
        found = [(64, 64, 64, 4, 6), (64, 64, 128, 4, 4), (64, 64, 128, 4, 6), (64, 128, 128, 8, 3)]
        return [LinearTile(*tile) for tile in [*found, (64, 32, 128, 4, 5)][: 4 if product.around == "gate" else 5]]
    found = [(128, 64, 64, 4, 4), (128, 128, 64, 8, 4), (256, 128, 64, 8, 4), (256, 128, 64, 8, 3)]
    return [LinearTile(*tile) for tile in [*found, (128, 256, 64, 8, 3), (128, 128, 128, 8, 3)]]


class Data(NamedTuple):
    """Of a product, on the GPU."""

    product: Product
    buffer: Tensor  # [BUFFER] bfloat16
    x: Tensor  # [rows, inputs]
    residual: Tensor  # [rows, outputs]

    @classmethod
    def of(cls, product: Product, rows: int, buffer: Tensor) -> "Data":
        x = torch.randn(rows, product.inputs, device="cuda") / product.inputs**0.5
        return cls(product, buffer, x.bfloat16(), torch.randn(rows, product.outputs, device="cuda").bfloat16())

    def weight(self, copy: int = 0) -> Tensor:
        size = self.product.outputs * self.product.inputs
        start = copy % (len(self.buffer) // size) * size
        return self.buffer[start : start + size].view(self.product.outputs, self.product.inputs)

    @property
    def around(self) -> Surroundings:
        residual = self.residual if self.product.around == "residual" else None
        return Surroundings(activation="silu" if self.product.around == "gate" else "", residual=residual)


def runs_of(data: Data) -> dict[str, Run]:
    """By name: "cublas", "engine", and tiles."""
    from compiled_llm.ops.linear import triton_linear

    following = data.around.following

    def cublas(copy: int) -> Tensor:
        y = F.linear(data.x, data.weight(copy))
        y = ops.gated_activation(y, "silu") if data.around.activation else y
        return y if data.around.residual is None else y + data.residual

    def of_tile(tile: LinearTile | None) -> Run:
        return lambda copy: triton_linear.exact_linear(data.x, data.weight(copy), None, *following, tile=tile)

    tiles = {" ".join(map(str, tile)): of_tile(tile) for tile in tiles_of(data.product, len(data.x))}
    return {"cublas": cublas, "engine": of_tile(None), **tiles}


# ---- compiled in parallel -------------------------------------------------------------------------------------------

_buffer: list[Tensor] = []  # of a process that compiles: memory of any contents, made at the first job


def compile_job(job: tuple[Product, int, str]) -> str:
    """A way of a product with so many rows: why it does not compile, or ""."""
    product, rows, name = job
    try:
        if not _buffer:
            _buffer.append(torch.empty(BUFFER // 3, dtype=torch.bfloat16, device="cuda"))
        for allowed in (False, True)[: 2 if rows <= 32 and name == "engine" else 1]:
            with programmatic_launches(allowed):
                runs_of(Data.of(product, rows, _buffer[0]))[name](0)
                ops.rms_norm(Data.of(product, rows, _buffer[0]).x, _buffer[0][: product.inputs], EPS)
        torch.cuda.synchronize()
    except Exception as error:  # one kernel fewer
        return f"{product.model} {product.name} {rows} {name}: {type(error).__name__}: {str(error)[:200]}"
    return ""


def compile_all(processes: int, seconds: float, log: dict[str, Any]) -> None:
    """What is not compiled in time is compiled when it is run."""
    todo = [
        (product, rows, name)
        for model, rows in POINTS
        for product in PRODUCTS
        if product.model == model
        for name in ("engine", *(" ".join(map(str, tile)) for tile in tiles_of(product, rows)))
    ]
    end, count = time.monotonic() + seconds, 0
    with multiprocessing.get_context("spawn").Pool(processes) as pool:  # whose end stops what still runs
        results = pool.imap_unordered(compile_job, todo)
        for _ in todo:
            try:
                reason = results.next(max(0.1, end - time.monotonic()))
            except multiprocessing.TimeoutError:
                break
            count += not reason
            log["left_out"] += [reason] if reason else []
    log["compiled"] = f"{count} of {len(todo)} kernels"


# ---- measured -------------------------------------------------------------------------------------------------------


def measure(data: Data, log: dict[str, Any]) -> dict[str, Any]:
    """A case: microseconds of each way, which of them have not the bits of the engine's, and the engine's tile."""
    from compiled_llm.ops.linear import triton_linear

    product, rows = data.product, len(data.x)
    double = [given.double() if isinstance(given, Tensor) else given for given in data.around]
    parts = data.weight().split(16384)
    want = surrounded(lambda x: torch.cat([x @ part.double().T for part in parts], 1), data.x.double(), *double)
    runs, other_bits, bits = runs_of(data), [], runs_of(data)["engine"](0)
    for name in list(runs):
        try:
            got = runs[name](0)
            error = float((got.double() - want).abs().max() / want.abs().max())
            if not error <= TOLERANCE:
                raise ValueError(f"off by {error:.2g}")
            other_bits += [name] if not torch.equal(got, bits) else []
        except Exception as error:  # one fewer
            log["left_out"].append(f"{product.name} {rows} {name}: {type(error).__name__}: {str(error)[:200]}")
            del runs[name]
    left_out: dict[str, str] = {}
    launches = 4 if rows > 256 else launches_for(data.weight().nbytes)
    found = slopes(runs, launches, SECONDS, left_out)
    log["left_out"] += [f"{product.name} {rows} {pair}" for pair in left_out.items()]
    us = {name: 1e6 * seconds for name, seconds in sorted(found.items(), key=lambda pair: pair[1])}
    tile = triton_linear._tile_of(data.x, data.weight(), data.around)
    return {"product": product, "rows": rows, "us": us, "other_bits": other_bits, "tile": tile}


class Asking:
    """A kernel that asks for another number of bytes of each row before the launch before has ended."""

    def __init__(self, kernel: Any, ahead: int) -> None:
        self._kernel, self._ahead = kernel, ahead

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: self._kernel[grid](*args, **{**options, "AHEAD": self._ahead})


def chain(model: str, rows: int, cases: dict[str, Any], buffer: Tensor, log: dict[str, Any]) -> dict[str, Any]:
    """Microseconds of a layer's products with norms, gate and residuals, without attention."""
    from compiled_llm.ops.linear import triton_linear

    shapes = [(p.outputs, p.inputs) for p in PRODUCTS if p.model == model and p.name != "head"]
    size = sum(outputs * inputs for outputs, inputs in shapes)
    x = torch.randn(rows, shapes[0][1], device="cuda").bfloat16()
    heads, norm = torch.randn(rows, shapes[1][1], device="cuda").bfloat16(), torch.ones_like(x[0])
    fastest = {
        shape: next((LinearTile(*map(int, n.split())) for n in cases[name]["us"] if n[0].isdigit()), None)
        for name, shape in zip(("qkv", "o", "gate_up", "down"), shapes, strict=True)
        if name in cases
    }

    def layer(copy: int, kind: Any) -> None:
        parts = buffer[copy * size : (copy + 1) * size].split([outputs * inputs for outputs, inputs in shapes])
        qkv, o, gate_up, down = (kind(part.view(shape)) for part, shape in zip(parts, shapes, strict=True))
        y, _ = normed_linear(x, None, norm, EPS, qkv)
        y, delta = added_linear(y, o, heads)
        y, products = normed_linear(y, delta, norm, EPS, gate_up, "silu")
        y, delta = added_linear(y, down, products)
        if delta is not None:
            ops.add_rms_norm(y, delta, norm, EPS)

    def engine(copy: int) -> None:
        layer(copy, Dense)

    def apart(copy: int) -> None:
        with mock.patch.object(layers, "is_fused", return_value=False):
            layer(copy, Dense)

    def exact(copy: int) -> None:
        layer(copy, lambda weight: Exact(Dense(weight)))

    def tiled(copy: int) -> None:
        with mock.patch.object(triton_linear, "_tile_of", lambda x, weight, around: fastest[tuple(weight.shape)]):
            exact(copy)

    def early(copy: int) -> None:
        with programmatic_launches():
            engine(copy)

    def asking(ahead: int) -> Run:
        def run(copy: int) -> None:
            kernel = Asking(triton_linear.exact_linear_kernel, ahead)
            with mock.patch.object(triton_linear, "exact_linear_kernel", kernel):
                early(copy)

        return run

    runs: dict[str, Run] = {"cublas and single ops": apart, "engine": engine}
    if all(fastest.values()) and len(fastest) == 4:
        runs["fastest tiles"] = tiled
    if rows <= 32:
        runs |= {"engine, programmatic": early}
        runs |= {f"programmatic, {2 * ahead} bytes of a row": asking(ahead) for ahead in (64, 256)}
    else:
        runs["exact"] = exact
    for name in list(runs):
        try:
            runs[name](0)
        except Exception as error:  # one fewer
            log["left_out"].append(f"chain {rows} {name}: {type(error).__name__}: {str(error)[:200]}")
            del runs[name]
    left_out: dict[str, str] = {}
    found = slopes(runs, 4 if model == BIG else 28, SECONDS, left_out)
    log["left_out"] += [f"chain {rows} {pair}" for pair in left_out.items()]
    return {"model": model, "rows": rows, "us": {name: 1e6 * seconds for name, seconds in found.items()}}


def measure_all(model: str, rows: int, buffer: Tensor, end: float, log: dict[str, Any]) -> None:
    """All layers of a model with so many rows, each by itself and together, unless it is later than ``end``."""
    cases: dict[str, Any] = {}
    for product in (*(p for p in PRODUCTS if p.model == model), None):
        if time.monotonic() > end:
            break
        try:
            if product is None:
                log["chains"].append(chain(model, rows, cases, buffer, log))
            else:
                cases[product.name] = measure(Data.of(product, rows, buffer), log)
        except Exception as error:  # the next one
            log["left_out"].append(f"{model} {rows} {product}: {type(error).__name__}: {str(error)[:300]}")
    log["cases"] += cases.values()


def choices_of(cases: list[dict[str, Any]]) -> dict[product_choices.Product, tuple[Choice, ...]]:
    """What a file of measured products says: tiles of the same bits, and where a library's product is faster."""
    found: dict[product_choices.Product, list[Choice]] = {}
    complete = [case for case in cases if {"engine", "cublas"} <= case["us"].keys()]
    for case in sorted(complete, key=lambda case: case["rows"]):
        product, us, tile = case["product"], case["us"], case["tile"]
        time = us["engine"]
        for name in (name for name in us if name[0].isdigit() and name not in case["other_bits"]):
            if us[name] < WORTH * time:
                time, tile = us[name], LinearTile(*map(int, name.split()))
        choice = Choice(BOUNDS[case["rows"]], "fused" if time < us["cublas"] else "apart", tile)
        arounds = {"gate" if product.around == "gate" else "residual"}
        if case["rows"] > product_choices.MAX_ROWS:  # with exact=True the gate is a launch of its own there
            arounds.add("residual")
        for around in arounds:
            found.setdefault(product_choices.Product(product.outputs, product.inputs, around), []).append(choice)
    return {product: tuple(found[product]) for product in found}


# ---- the program ----------------------------------------------------------------------------------------------------


def table(log: dict[str, Any]) -> str:
    lines = ["layer, rows: cublas | engine | fastest tile (rows outputs inputs warps stages)"]
    for case in log["cases"]:
        us = case["us"]
        tile = next((f"{time:.1f} {name}" for name, time in us.items() if name[0].isdigit()), "-")
        head = f"{case['product'].model[:5]} {case['product'].name}, {case['rows']}"
        lines.append(f"{head}: {us.get('cublas', 0):.1f} | {us.get('engine', 0):.1f} | {tile}")
    for entry in log["chains"]:
        ways = " | ".join(f"{time:.1f} {name}" for name, time in entry["us"].items())
        lines.append(f"layer of {entry['model']}, {entry['rows']}: {ways}")
    other = sorted(
        {f"{c['product'].name} {c['rows']} {n}" for c in log["cases"] for n in c["other_bits"] if n != "cublas"}
    )
    lines.append(f"other bits than the engine's: {', '.join(other) or 'none'}")
    return "\n".join([*lines, f"{log['compiled']}, {len(log['left_out'])} left out, {log['s']:.0f} s"])


def main() -> int:
    parser = FlagParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("."), help="folder for probe_linear.json")
    parser.add_argument("--seconds", type=float, default=40, help="for measuring")
    parser.add_argument("--compile-seconds", type=float, default=60, help="for compiling")
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("probe_linear: no CUDA GPU here (torch.cuda.is_available() is False)", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    args.output.mkdir(parents=True, exist_ok=True)
    log: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "left_out": [], "cases": [], "chains": [], "s": 0.0}
    compile_all(args.processes, args.compile_seconds, log)
    wait_for_turn()
    begun = time.monotonic()

    def save() -> None:
        log["s"] = time.monotonic() - begun
        (args.output / "probe_linear.json").write_text(json.dumps(log, indent=1))

    buffer = torch.empty(BUFFER, dtype=torch.bfloat16, device="cuda").normal_()
    with torch.inference_mode():
        for model, rows in POINTS:
            measure_all(model, rows, buffer, begun + args.seconds, log)
            save()
    path = args.output / product_choices.path_of(log["gpu"]).name
    product_choices.save(path, log["gpu"], choices_of(log["cases"]))
    print(table(log))
    print(f"{path}: tiles as measured, for ops/tiles/products")
    for reason in log["left_out"][:10]:
        print(f"left out: {reason[:200]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
