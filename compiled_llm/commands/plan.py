"""Say which models to serve on which devices, and how many requests are within their targets then.

    compiled-llm plan --models qwen3-8b qwen3-0.6b --machines h200:1x8 --rate 40 --slo ttft:1000 tpot:50
    compiled-llm plan --models qwen3-8b llama-3.1-8b --machines h200:8x8 --trace requests.jsonl --slo scale:5
    compiled-llm plan --models demo --machines measured:1x2 --costs costs.json --rate 4 --slo e2el:3000

Nothing is served: requests are simulated over step costs. Those of GPUs are estimated, those of ``measured`` machines
are what ``compiled-llm bench step-costs`` wrote. The search is AlpaServe's. A trace has a line of JSON a request:
arrival (seconds), prompt_tokens, output_tokens, model, and cached_tokens where the replica has a part of the prompt.
Without ``--trace`` requests are drawn. docs/scale.md says what is counted, and how near it was to what was measured.

Exit status: 0, or 2 for bad arguments.
"""

import argparse
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser, errors_end
from compiled_llm.checkpoint.shapes import SHAPES
from compiled_llm.gpu_step.gpus import GPUS

if TYPE_CHECKING:  # they load numpy, and torch
    from compiled_llm.planning.costs import Catalogue
    from compiled_llm.planning.gpu_costs import ModelFacts
    from compiled_llm.planning.placement import Targets
    from compiled_llm.planning.traces import TraceRequest

_METRICS = ("ttft", "tpot", "e2el", "scale")
_DRAWN = ("rate", "cv", "bursts", "popularity", "seconds", "prompt_tokens", "output_tokens", "seed")
_SIZES = [1, 2, 4, 8]


def parser(program: str) -> FlagParser:
    made = FlagParser(prog=program, description="Say which models to serve on which devices.")
    add = made.add_argument
    add("--models", nargs="+", required=True, metavar="NAME", help="directories, known shapes, or names in --costs")
    add("--machines", required=True, metavar="KIND:NxM", help=f"N with M devices each: measured, {', '.join(GPUS)}")
    add("--costs", type=Path, metavar="FILE", help="of measured machines, by compiled-llm bench step-costs")
    add("--slo", nargs="+", required=True, metavar="METRIC:MS", help="ttft, tpot, e2el; or scale: times alone")
    add("--link", choices=("nvlink", "pcie"), default="nvlink", help="between GPUs of a machine (default: nvlink)")
    add = made.add_argument_group("requests").add_argument
    add("--trace", type=Path, metavar="FILE.jsonl", help="requests; without it they are drawn:")
    add("--rate", type=float, help="requests a second, of all models together")
    add("--popularity", type=float, help="n-th model's share is n ** -POPULARITY (default: 0, all alike)")
    add("--cv", type=float, help="burstiness: CV of intervals, 1 is Poisson (default: 1)")
    add("--bursts", action="store_true", default=None, help="rates change, as in serverless traces")
    add("--seconds", type=float, help="how long they arrive (default: 60)")
    add("--prompt-tokens", type=int, help="on average (default: 512)")
    add("--output-tokens", type=int, help="on average (default: 128)")
    add("--seed", type=int, help="of what is drawn (default: 0)")
    add = made.add_argument_group("search").add_argument
    add("--tensor-parallel-sizes", type=int, nargs="+", default=_SIZES, metavar="N", help="to try (default: 1 2 4 8)")
    add(
        "--pipeline-parallel-sizes", type=int, nargs="+", default=_SIZES, metavar="N", help="to try (default: the same)"
    )
    add("--models-per-group", type=int, default=8, metavar="N", help="at most (default: 8)")
    add("--drop-hopeless", action="store_true", help="requests that are late already are not begun")
    add("--no-curves", action="store_true", help="leave out other rates, burstiness and targets")
    add = made.add_argument_group("result").add_argument
    add("--picture", type=tables.picture_file, metavar="FILE.png", help="draw the curves; needs matplotlib")
    tables.add_json_flag(made)
    return made


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    least = {"models_per_group": 1, "tensor_parallel_sizes": 1, "pipeline_parallel_sizes": 1, "seed": 0}
    args = parser(program).parse_checked(_check, arguments, **least, prompt_tokens=1, output_tokens=1)

    from compiled_llm.planning.placement import Cluster, Planner
    from compiled_llm.planning.results import curves, group_rows, model_rows, text_of

    kind, machines, per_machine = _machines(args.machines)
    with errors_end(program):
        names = [_name(model) for model in args.models]
        catalogue, memory_bytes = _catalogue(args, kind, per_machine)
        trace = _trace(args, names)
        planner = Planner(
            catalogue,
            Cluster(machines * per_machine, per_machine, memory_bytes),
            _targets(args.slo),
            tp_sizes=args.tensor_parallel_sizes,
            pp_sizes=args.pipeline_parallel_sizes,
            models_per_group=args.models_per_group,
            drops_hopeless=args.drop_hopeless,
        )
        rated = planner.search(trace)
    num_simulations = planner.num_simulations
    found = {} if args.no_curves else curves(planner, rated, trace)
    print(text_of(planner, rated, trace, found))
    if args.picture is not None:
        from compiled_llm.planning.picture import draw

        draw(args.picture, {"": found}, f"{', '.join(names)} on {args.machines}")
    facts: dict[str, Any] = {"plan": args.machines, "slo": args.slo, "requests": len(trace)}
    facts |= {"simulations": num_simulations, "planned_share": planner.share, "attained": rated.attained}
    facts |= {"groups": group_rows(planner, rated), "models": model_rows(rated, trace), "curves": found}
    tables.finish(facts, args.json)
    return 0


def _check(args: argparse.Namespace) -> None:
    """``ValueError`` for bad arguments, before anything is loaded."""
    kind, _, _ = _machines(args.machines)
    if (kind == "measured") != (args.costs is not None):
        raise ValueError(f"--costs must be given for measured machines and for no others, given {args.costs}")
    _targets_given(args.slo)
    given = [name for name in _DRAWN if getattr(args, name) is not None]
    if args.trace is not None and given:
        raise ValueError(f"--{given[0].replace('_', '-')} must be left out with --trace, which has all requests")
    if args.trace is None and args.rate is None:
        raise ValueError("--trace or --rate must be given: which requests are to be served")
    for name in ("rate", "cv", "seconds"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name} must be a number above 0, given {value}")
    if args.popularity is not None and not 0 <= args.popularity <= 10:
        raise ValueError(f"--popularity must be from 0 to 10, given {args.popularity}")
    if args.picture is not None and args.no_curves:
        raise ValueError("--picture must be left out with --no-curves, which it would show")


def _machines(text: str) -> tuple[str, int, int]:
    """``"h200:8x8"`` -> kind, machines, devices of each."""
    match = re.fullmatch(rf"(measured|{'|'.join(GPUS)}):([1-9]\d{{0,4}})x([1-9]\d{{0,2}})", text)
    if match is None:
        raise ValueError(f"--machines must be KIND:NxM, as h200:8x8, of measured, {', '.join(GPUS)}; given {text!r}")
    return match[1], int(match[2]), int(match[3])


def _targets_given(pairs: Sequence[str]) -> dict[str, float]:
    targets: dict[str, float] = {}
    for pair in pairs:
        name, _, text = pair.partition(":")
        if name not in _METRICS or name in targets or not re.fullmatch(r"\d+(\.\d+)?", text) or not float(text) > 0:
            raise ValueError(f"--slo must be METRIC:NUMBER, each of {', '.join(_METRICS)} once; given {pair!r}")
        targets[name] = float(text) if name == "scale" else float(text) / 1e3
    return targets


def _targets(pairs: Sequence[str]) -> "Targets":
    from compiled_llm.planning.placement import Targets

    return Targets(**_targets_given(pairs))


def _name(model: str) -> str:
    return model if model in SHAPES else Path(model).name


def _catalogue(args: argparse.Namespace, kind: str, per_machine: int) -> "tuple[Catalogue, float]":
    """The costs of the models, and the bytes of a device."""
    from compiled_llm.planning.costs import MeasuredCosts
    from compiled_llm.planning.gpu_costs import GpuCosts

    if args.costs is not None:
        measured = MeasuredCosts.read(args.costs)
        for model in args.models:
            if model not in measured.models:
                raise ValueError(f"--models must be of those in --costs, {', '.join(measured.models)}; given {model!r}")
        return measured, measured.memory_bytes
    gpu = GPUS[kind]
    return GpuCosts([_facts(model) for model in args.models], gpu, per_machine, args.link), gpu.memory_bytes


def _facts(model: str) -> "ModelFacts":
    from compiled_llm.models.config_file import parse_config, read_config  # it loads torch, which takes seconds
    from compiled_llm.planning.model_facts import facts_of

    config = parse_config(SHAPES[model]) if model in SHAPES else read_config(Path(model))
    return facts_of(_name(model), config)


def _trace(args: argparse.Namespace, names: Sequence[str]) -> "list[TraceRequest]":
    from compiled_llm.planning.traces import Load, popularity, read_trace

    if args.trace is not None:
        return read_trace(args.trace, names)
    given = {name: getattr(args, name) for name in _DRAWN[1:] if getattr(args, name) is not None}
    trace = Load(popularity(names, args.rate, given.pop("popularity", 0.0)), **{"seconds": 60.0, **given}).draw()
    if not trace:
        raise ValueError(f"--rate {args.rate} gives no request in --seconds {given.get('seconds', 60.0)}: raise either")
    return trace
