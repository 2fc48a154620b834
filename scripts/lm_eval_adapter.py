"""lm-eval (EleutherAI's lm-evaluation-harness) with the engine as its model.

    python scripts/lm_eval_adapter.py --model DIR --tasks arc_easy,lambada_openai
    python scripts/lm_eval_adapter.py --model DIR --dtype bfloat16 --tasks gsm8k -- --num_fewshot 5 --limit 100

Needs ``pip install 'compiled-llm[lm-eval]'``. All engine arguments are flags. Flags after ``--`` are lm-eval's own, as
its ``run`` command has them (``-- --help`` lists them). Its ``--model_args`` are arguments of ``CompiledLM`` in
``lm_eval_model.py``, such as ``max_gen_toks=512``.

Exit status: lm-eval's, or 2 for bad arguments.
"""

import argparse
import json
import sys

import bench.own_checkout
from lm_eval_requests import engine_arguments

from compiled_llm.api.command_line import FlagParser, add_engine_arguments, engine_config, errors_end

OURS = {"--model", "-M", "--tasks", "-t", "--device"}  # flags of lm-eval that are given before the --


def parse_arguments() -> argparse.Namespace:
    parser = FlagParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--tasks", required=True, metavar="NAME[,NAME...]", help="what to evaluate")
    parser.add_argument("lm_eval_flags", nargs="*", metavar="-- FLAG", help="flags of lm-eval's run command")
    add_engine_arguments(parser)
    return parser.parse_checked(check)


def check(args: argparse.Namespace) -> None:
    """``ValueError`` for flags that lm-eval would take for something else."""
    for word in args.lm_eval_flags:
        if word.partition("=")[0] in OURS:
            raise ValueError(f"{word} must be given before the --")
    if args.lm_eval_flags and not args.lm_eval_flags[0].startswith("-"):
        raise ValueError(f"flags of lm-eval are given after a --, given {args.lm_eval_flags[0]!r}")


def main() -> int:
    args = parse_arguments()
    with errors_end("lm_eval_adapter"):
        config = engine_config(args)
    model = ["--model", "compiled-llm", "--model_args", json.dumps(engine_arguments(config)), "--device", config.device]
    try:
        import lm_eval_model  # noqa: F401, it registers the model
        from lm_eval.__main__ import cli_evaluate
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("lm_eval"):
            raise
        print("lm_eval_adapter: error: lm-eval is not installed: pip install 'compiled-llm[lm-eval]'", file=sys.stderr)
        return 2
    sys.argv = [sys.argv[0], "run", *model, "--tasks", args.tasks, *args.lm_eval_flags]
    cli_evaluate()
    return 0


if __name__ == "__main__":
    sys.exit(main())
