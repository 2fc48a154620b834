"""Report what quantised weights cost in quality, and save in memory and time, for one model on one text.

    compiled-llm report weights --quantization int8,int4
    compiled-llm report weights --model DIR --quantization int4 --quantization-skip layers.0 --text FILE
    compiled-llm report weights --model DIR --quantized-model DIR --text FILE --kv-cache-dtype int8

``compiled_llm/quality/weights.py`` says what is measured. The weights are rounded at load, as the engine's arguments of
the same names say, or read from a quantised checkpoint of the same model, ``--quantized-model``.

Ends in one JSON line. Exit status: 0, 1 when a scale of the KV cache is zero or not finite, 2 for bad arguments.
"""

import argparse
import os
from collections.abc import Sequence
from typing import Any

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser, add_engine_arguments, errors_end
from compiled_llm.api.config import QUANTIZATIONS, EngineConfig
from compiled_llm.commands.report.text_flags import LEAST, add_text_flags

_OF_ALL = ("model", "dtype", "device")
_OF_QUANTISED = ("quantization_group_size", "quantization_skip", "quantization_head", "quantization_embedding")


def parser(program: str) -> FlagParser:
    made = FlagParser(prog=program, description="Report what quantised weights cost in quality, on a text.")
    add = made.add_argument
    kinds = f"one or several of {', '.join(QUANTIZATIONS)}"
    add("--quantization", type=lambda text: text.split(","), metavar="KIND[,KIND...]", help=kinds)
    add("--quantized-model", metavar="DIR", help="the same model, as quantised and published")
    add("--no-layers", action="store_true", help="measure all together, and no layer alone")
    add_text_flags(made)
    speed = "tokens to generate for the speed; 0: no speed (default: 64)"
    add("--speed-tokens", type=int, default=64, metavar="N", help=speed)
    prompt = "tokens of the prompt for the speed, or what the model's length leaves (default: 512)"
    add("--speed-prompt", type=int, default=512, metavar="N", help=prompt)
    tables.add_json_flag(made)
    add_engine_arguments(made, *_OF_ALL, *_OF_QUANTISED, "kv_cache_dtype", "enforce_eager")
    return made


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    flags = parser(program)
    args = flags.parse_checked(_check, arguments, **LEAST, speed_tokens=0, speed_prompt=1)
    with flags.ending_errors():
        own, quantised = configs(args)

    from compiled_llm.quality import weights  # it loads torch, which takes seconds
    from compiled_llm.quality.teacher_forcing import BadScaleError
    from compiled_llm.quantizing.texts import Text

    text = Text(args.text, args.max_tokens, args.window)
    streams = weights.Streams(args.speed_prompt, args.speed_tokens, args.enforce_eager) if args.speed_tokens else None
    with errors_end(program), errors_end(program, (BadScaleError,), status=1):
        found = weights.measure(own, quantised, text, args.chunk, not args.no_layers, streams)
    print(weights.text_of(found))
    settings = {name: getattr(args, name) for name in (*_OF_QUANTISED, "kv_cache_dtype")}
    tables.finish(found | settings, args.json)
    return 0


def _check(args: argparse.Namespace) -> None:
    if (args.quantization is None) == (args.quantized_model is None):
        raise ValueError("give either --quantization KIND[,KIND...] or --quantized-model DIR")
    if args.speed_tokens == 1:
        raise ValueError("--speed-tokens must be at least 2, or 0 for no speed, given 1")


def configs(args: argparse.Namespace) -> tuple[EngineConfig, dict[str, EngineConfig]]:
    """The model as it is, and by its name what is compared with it. ``ValueError`` for what the engine would refuse."""
    of_all = {name: getattr(args, name) for name in _OF_ALL}
    given = {**of_all, **{name: getattr(args, name) for name in _OF_QUANTISED}, "kv_cache_dtype": args.kv_cache_dtype}
    if args.quantized_model is not None:
        name = os.path.relpath(args.quantized_model)
        return EngineConfig(**of_all), {name: EngineConfig(**{**given, "model": args.quantized_model})}
    named = {kind: {**given, "quantization": kind} for kind in args.quantization}
    in_groups = [kind for kind, options in named.items() if _has_groups(options)]
    for kind in named.keys() - in_groups if in_groups else ():  # the size is not for these
        named[kind]["quantization_group_size"] = None
    return EngineConfig(**of_all), {kind: EngineConfig(**options) for kind, options in named.items()}


def _has_groups(options: dict[str, Any]) -> bool:
    """Whether weights are rounded in groups whose size may be chosen."""
    names = ("quantization", "quantization_head", "quantization_embedding")
    return any(options[name].startswith("int4") for name in names)
