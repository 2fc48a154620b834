"""Times of ``probe_linear.py``: of single layers, and of all layers of a model behind each other."""

import statistics
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from probe_linear_cases import BIG, EPS, PRODUCTS, Data, Run, by_name, programmatic_run
from probe_linear_kernel import launch
from torch import Tensor

from compiled_llm import ops
from compiled_llm.models.linears import fused as layers
from compiled_llm.models.linears.dense import Dense
from compiled_llm.models.linears.exact import Exact
from compiled_llm.models.linears.fused import added_linear, normed_linear
from compiled_llm.ops.linear.surroundings import Surroundings


def captured(run: Run, launches: int, pool: Any) -> torch.cuda.CUDAGraph:
    """On the current stream, and without ``torch.cuda.graph``, which collects garbage each time."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    graph.capture_begin(pool=pool, capture_error_mode="thread_local")
    try:
        for copy in range(launches):
            run(copy)
    finally:
        graph.capture_end()
    return graph


def slopes(runs: dict[str, Run], launches: int, rounds: int, log: dict[str, Any]) -> dict[str, float]:
    """Microseconds a launch of each."""
    pool, graphs = torch.cuda.graph_pool_handle(), {}
    for name, run in runs.items():
        try:
            graphs[name] = captured(run, launches, pool), captured(run, 2 * launches, pool)
        except Exception as error:  # one fewer
            log["left_out"].append([name, f"capture: {type(error).__name__}: {str(error)[:200]}"])
    times: dict[str, list[float]] = {name: [] for name in graphs}
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for turn in range(rounds + 1):
        for name, (short, long) in graphs.items():
            pair = []
            for graph in (short, long):
                start.record()
                graph.replay()
                end.record()
                end.synchronize()
                pair.append(start.elapsed_time(end))
            if turn:
                times[name].append((pair[1] - pair[0]) / launches * 1e3)
    return {name: statistics.median(found) for name, found in times.items()}


def best(case: dict[str, Any], programmatic: bool) -> str:
    """The name of the fastest variant with the bits of ``exact``."""
    names = (n for n in case["us"] if n.endswith("programmatic") == programmatic and n[0] in "wx" and n[1].isdigit())
    return next((name for name in names if case["same_bits"][name]), "")


def chain(
    model: str, rows: int, cases: dict[tuple[str, str], dict[str, Any]], buffer: Tensor, sms: int, log: dict[str, Any]
) -> dict[str, Any]:
    """Microseconds of the four products of a layer with norms, gate and residuals, without attention."""
    found = {p.name: Data.of(p, buffer) for p in PRODUCTS if p.model == model and p.name != "head"}
    qkv, o, gate_up, down = (found[name].product for name in ("qkv", "o", "gate_up", "down"))
    sizes = [p.outputs * p.inputs for p in (qkv, o, gate_up, down)]
    x, norm = found["qkv"].x[:rows], found["qkv"].norm

    def weights(layer: int) -> Iterator[Tensor]:
        start = layer * sum(sizes)
        for product, size in zip((qkv, o, gate_up, down), sizes, strict=True):
            yield buffer[start : start + size].view(product.outputs, product.inputs)
            start += size

    heads = torch.randn(rows, o.inputs, device="cuda").bfloat16()

    def engine(kind: Any, fused: bool) -> Run:
        def run(layer: int) -> None:
            with mock.patch.object(layers, "is_fused", return_value=fused):
                w_qkv, w_o, w_gate_up, w_down = map(kind, weights(layer))
                y, _ = normed_linear(x, None, norm, EPS, w_qkv)
                y, delta = added_linear(y, w_o, heads)
                y, products = normed_linear(y, delta, norm, EPS, w_gate_up, "silu")
                y, delta = added_linear(y, w_down, products)
                if delta is not None:
                    ops.add_rms_norm(y, delta, norm, EPS)

        return run

    outs = {name: torch.empty(rows, p.outputs, device="cuda", dtype=torch.bfloat16) for name, p in
            (("qkv", qkv), ("o", o), ("gate_up", gate_up), ("down", down))}  # fmt: skip
    hidden = outs["gate_up"].flatten()[: rows * down.inputs].view(rows, -1)

    def probe(programmatic: bool, norm_inside: bool) -> Run | None:
        chosen = {}
        for name in outs:
            around = found[name].product.around if norm_inside else found[name].product.around.replace("norm", "")
            case = cases.get((name, around.removeprefix(" and ")), {"us": {}})
            variant = by_name().get(best(case, programmatic).removesuffix(", programmatic"))
            if variant is None:
                return None
            chosen[name] = variant
        eps_norm = Surroundings(norm=norm, eps=EPS) if norm_inside else Surroundings()

        def run(layer: int) -> None:
            w_qkv, w_o, w_gate_up, w_down = weights(layer)
            y = x if norm_inside else ops.rms_norm(x, norm, EPS)
            launch(chosen["qkv"], y, w_qkv, outs["qkv"], eps_norm, sms, programmatic)
            launch(chosen["o"], heads, w_o, outs["o"], Surroundings(residual=x), sms, programmatic)
            y = outs["o"] if norm_inside else ops.rms_norm(outs["o"], norm, EPS)
            launch(chosen["gate_up"], y, w_gate_up, hidden, eps_norm._replace(activation="silu"), sms, programmatic)
            launch(chosen["down"], hidden, w_down, outs["down"], Surroundings(residual=outs["o"]), sms, programmatic)

        return run

    ways: dict[str, Run | None] = {
        "cublas and single ops": engine(Dense, False),
        "fused": engine(Dense, True),
        "fused, programmatic": programmatic_run(engine(Dense, True)),
        "exact": engine(lambda w: Exact(Dense(w)), False),
        "best variants": probe(False, True),
        "best variants, norm apart": probe(False, False),
        "best variants, programmatic": probe(True, True),
        "best variants, programmatic, norm apart": probe(True, False),
    }
    runs: dict[str, Run] = {}
    for name, run in ways.items():
        try:
            if run is not None:
                run(0)
                torch.cuda.synchronize()
                runs[name] = run
        except Exception as error:  # one fewer
            log["left_out"].append([f"chain {rows} {name}", f"{type(error).__name__}: {str(error)[:200]}"])
    launches = 4 if model == BIG else 28
    small: dict[str, Run] = {
        "norm alone": lambda _: ops.rms_norm(x, norm, EPS),
        "gate alone": lambda _: ops.gated_activation(outs["gate_up"], "silu"),
    }
    for alone in small.values():
        alone(0)
    return {"model": model, "rows": rows, "us": slopes(runs, launches, 7, log) | slopes(small, 32, 5, log)}
