"""Tasks of lm-eval (EleutherAI's lm-evaluation-harness) with the engine as its model.

    compiled-llm report lm-eval --model DIR --tasks arc_easy,lambada_openai
    compiled-llm report lm-eval --model DIR --dtype bfloat16 --tasks gsm8k -- --num_fewshot 5 --limit 100

Needs ``pip install 'compiled-llm[lm-eval]'``. All engine arguments are flags. Flags after ``--`` are lm-eval's own, as
its ``run`` command has them (``-- --help`` lists them). Its ``--model_args`` are arguments of ``CompiledLM`` in
``compiled_llm/quality/lm_eval_model.py``, such as ``max_gen_toks=512``.

Exit status: lm-eval's, or 2 for bad arguments.
"""

import argparse
import json
import sys
from collections.abc import Sequence

from compiled_llm.api.command_line import FlagParser, add_engine_arguments, engine_config
from compiled_llm.quality.lm_eval_requests import engine_arguments

_GIVEN_BEFORE = {"--model", "-M", "--tasks", "-t", "--device"}  # flags of lm-eval that are ours too


def parser(program: str) -> FlagParser:
    made = FlagParser(prog=program, description="Tasks of lm-eval with the engine as its model.")
    made.add_argument("--tasks", required=True, metavar="NAME[,NAME...]", help="what to evaluate")
    made.add_argument("lm_eval_flags", nargs="*", metavar="-- FLAG", help="flags of lm-eval's run command")
    add_engine_arguments(made)
    return made


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    args = parser(program).parse_checked(_check, arguments)
    config = engine_config(args)
    model = ["--model", "compiled-llm", "--model_args", json.dumps(engine_arguments(config)), "--device", config.device]
    try:
        from lm_eval.__main__ import cli_evaluate

        import compiled_llm.quality.lm_eval_model  # noqa: F401, it registers the model
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("lm_eval"):
            raise
        print(f"{program}: error: lm-eval is not installed: pip install 'compiled-llm[lm-eval]'", file=sys.stderr)
        return 2
    sys.argv = [sys.argv[0], "run", *model, "--tasks", args.tasks, *args.lm_eval_flags]
    cli_evaluate()
    return 0


def _check(args: argparse.Namespace) -> None:
    """``ValueError`` for flags that lm-eval would take for something else."""
    for word in args.lm_eval_flags:
        if word.partition("=")[0] in _GIVEN_BEFORE:
            raise ValueError(f"{word} must be given before the --")
    if args.lm_eval_flags and not args.lm_eval_flags[0].startswith("-"):
        raise ValueError(f"flags of lm-eval are given after a --, given {args.lm_eval_flags[0]!r}")
