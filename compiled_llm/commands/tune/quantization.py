"""Say which kinds of quantised weights are never slower than the model's dtype on this CPU, and in which layers.

    compiled-llm tune quantization --model DIR
    compiled-llm tune quantization --shape smollm2-135m --quantization int8,int4_w4a8 --rows 1 4 8 32 --seconds 60
    compiled-llm tune quantization --model DIR --quantization int8 --quantization-skip q_proj    # with a layer left

Of the model only config.json is read: products of layers of its sizes are timed, in turns with those of the model's
dtype. The rest of a step, attention above all, is the same with all weights and comes besides, so whole steps differ
less. For a checkpoint that is quantised already its own weights are measured. A layer counts as slower if it is so at
one of the numbers of rows. ``compiled_llm/tuning/quantization.py`` says how it is measured.

The last lines are flags to paste and a line of JSON. Exit status: 0, also where no kind is fast enough; 2 for bad
arguments.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser, add_engine_arguments, engine_config, errors_end
from compiled_llm.api.config import QUANTIZATIONS, EngineConfig

_PLAIN = ("dtype", "model_impl", "num_threads")
_OF_KINDS = ("quantization_group_size", "quantization_skip", "quantization_head")


def parser(program: str) -> FlagParser:
    from compiled_llm.checkpoint.shapes import SHAPES

    made = FlagParser(prog=program, description="Say which kinds of quantised weights are never slower on this CPU.")
    add = made.add_argument
    group = made.add_mutually_exclusive_group()
    group.add_argument("--model", metavar="DIR", help="a checkpoint's directory, GGUF file or hub id")
    group.add_argument("--shape", choices=SHAPES, help="the sizes of a known model (default: the bundled one)")
    kinds = f"one or several of {', '.join(QUANTIZATIONS)} (default: all)"
    add("--quantization", type=lambda text: text.split(","), metavar="KIND[,KIND...]", help=kinds)
    rows = "requests that decode at once (default: 1 8 32)"
    add("--rows", type=int, nargs="+", default=[1, 8, 32], metavar="N", help=rows)
    prompt = "tokens of a step that computes a prompt; 0: no such step (default: 256)"
    add("--prompt-tokens", type=int, default=256, metavar="N", help=prompt)
    add("--seconds", type=float, default=60, help="for all together (default: 60)")
    tables.add_json_flag(made)
    add_engine_arguments(made, *_PLAIN, *_OF_KINDS)
    return made


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    flags = parser(program)
    args = flags.parse_checked(_check, arguments, rows=1, prompt_tokens=0, seconds=0)
    with flags.ending_errors():
        own, kinds = _configs(args)

    import torch  # which takes seconds

    from compiled_llm.checkpoint.shapes import model_of
    from compiled_llm.system import hardware
    from compiled_llm.tuning import quantization
    from compiled_llm.worker.device import choose_threads, use_threads

    with errors_end(program), model_of(args) as model:
        threads = use_threads(choose_threads(args.num_threads))
        given: dict[str, Any] = {**model}
        own = dataclasses.replace(own, **given)
        kinds = {name: dataclasses.replace(config, **given) for name, config in kinds.items()}
        result = quantization.tune(own, kinds, args.rows, args.prompt_tokens, args.seconds)
    print(quantization.text_of(result))
    facts = {"threads": threads, "machine": hardware.describe(torch.device("cpu"))}
    tables.finish({"benchmark": "tune_quantization"} | quantization.as_json(result) | facts, args.json)
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.rows != sorted(set(args.rows)):
        raise ValueError(f"--rows must rise, given {' '.join(map(str, args.rows))}")


def _configs(args: argparse.Namespace) -> tuple[EngineConfig, dict[str, EngineConfig]]:
    """The model as it is, and the kinds that flags ask for; none: those that suit its checkpoint."""
    own = engine_config(argparse.Namespace(**{name: getattr(args, name) for name in _PLAIN}))
    given = {name: getattr(args, name) for name in _OF_KINDS if getattr(args, name) not in (None, [], "auto")}
    if args.quantization is None and not given:
        return own, {}
    kinds = args.quantization or list(QUANTIZATIONS)
    sized = [kind for kind in kinds if any(str(name).startswith("int4") for name in (kind, args.quantization_head))]
    configs = {}
    for kind in kinds:
        no_choice: dict[str, Any] = {"quantization_group_size": None} if sized and kind not in sized else {}
        configs[kind] = dataclasses.replace(own, quantization=kind, **(given | no_choice))
    return own, configs
