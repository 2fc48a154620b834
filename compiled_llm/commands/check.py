"""Say what there is to know of a model before it is served, without reading its weights.

    compiled-llm check --model DIR
    compiled-llm check --model DIR --max-model-len 8192 --kv-cache-dtype int8
    compiled-llm check --compare

It reads config, tokenizer and the headers of the weights: what the model is, what of its files is not served, how its
tokenizer compares with transformers' class, and how long requests may be in the memory that is free. ``--compare``
starts the engine, too, and compares compiled steps, uncompiled steps and transformers on a few prompts.

Exit status: 0; 1 when the model cannot be served, with the engine's error, or ``--compare`` found a difference; 2 for
bad arguments; 128 + the signal's number after SIGINT (130) or SIGTERM (143).
"""

import sys
from collections.abc import Sequence

from compiled_llm.api.command_line import FlagParser, add_engine_arguments, engine_config
from compiled_llm.system.process import GuardedStream, StopSignals
from compiled_llm.system.program import as_program


def parser(program: str) -> FlagParser:
    parser = FlagParser(prog=program, description="Say what there is to know of a model before it is served.")
    compare = "serve a few prompts, too, and compare with transformers: compiled steps, uncompiled steps, transformers"
    parser.add_argument("--compare", action="store_true", help=compare)
    add_engine_arguments(parser)
    return parser


@as_program
def main(program: str, arguments: Sequence[str] | None, stdout: GuardedStream, signals: StopSignals) -> int:
    """Run the command; returns the exit status."""
    args = parser(program).parse_checked(arguments=arguments)
    config = engine_config(args)
    from compiled_llm.engine.preflight import look_at  # it loads torch, which takes seconds

    try:
        for name, text in look_at(config):
            print(f"{name:16}{text}", flush=True)
        if not args.compare:
            return 0
        from compiled_llm.engine.engine import CompiledEngine

        with CompiledEngine.from_config(config) as engine:
            report = engine.check()
    except ValueError as error:
        print(f"{program}: cannot be served: {error}", file=sys.stderr)
        return 1
    print(report)
    return 0 if report.agrees else 1
