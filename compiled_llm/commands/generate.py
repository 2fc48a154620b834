"""Complete a text, and print the answer as it comes.

    compiled-llm generate "def fibonacci(n):"
    compiled-llm generate "class Stack:" --max-tokens 200 --temperature 0
    compiled-llm generate - --model DIR < prompt.txt
    compiled-llm generate "SELECT" --model DIR --lora ADAPTER

``-`` reads the text from standard input, without the line break at its end. Without ``--model`` the bundled model
answers. The answer alone goes to stdout; what the start says, and a line with tokens and seconds, goes to stderr.

Exit status: 0, 1 when the answer ended with an error or could not be written, 2 for bad arguments, 128 + the signal's
number after SIGINT (130) or SIGTERM (143), 141 when stdout was closed.
"""

import argparse
import dataclasses
import sys
from collections.abc import Sequence

from compiled_llm.api.command_line import (
    FlagParser,
    add_engine_arguments,
    add_sampling_arguments,
    engine_config,
    errors_end,
    sampling_arguments,
    sampling_params,
)
from compiled_llm.api.lora_request import lora_arguments
from compiled_llm.offline.flags import DEFAULT_SAMPLING
from compiled_llm.system.process import GuardedStream, StopSignals
from compiled_llm.system.program import BROKEN_PIPE_STATUS, as_program
from compiled_llm.system.quick_start import quick_start

# Sampling parameters for outputs other than the text that is printed here.
NOT_PRINTED = ("logprobs", "prompt_logprobs", "detokenize", "output_kind")


def parser(program: str) -> FlagParser:
    parser = FlagParser(prog=program, description="Complete a text, and print the answer as it comes.")
    parser.add_argument("text", nargs="*", metavar="TEXT", help="what to complete, in quotes, or - for standard input")
    parser.add_argument("--lora", metavar="PATH", help="the directory of an adapter that changes the model")
    parser.add_argument("--quiet", action="store_true", help="print the answer alone")
    add_sampling_arguments(parser, NOT_PRINTED, **DEFAULT_SAMPLING)
    add_engine_arguments(parser, wait_for_compile=False)
    return parser


@as_program
def main(program: str, arguments: Sequence[str] | None, stdout: GuardedStream, signals: StopSignals) -> int:
    """Run the command; returns the exit status."""
    flags = parser(program)
    args = flags.parse_args(arguments)
    with flags.ending_errors():
        return _generate(program, args, stdout)


def _generate(program: str, args: argparse.Namespace, stdout: GuardedStream) -> int:
    adapter, of_adapter = lora_arguments(args.lora)
    vars(args).update(of_adapter)
    text, config = text_argument(args.text), engine_config(args)
    sampling_params(args)  # its errors come before torch is loaded, which takes seconds
    if args.quiet and config.progress == "auto":
        config = dataclasses.replace(config, progress="off")
    with quick_start():
        from compiled_llm.api.sampling_params import SamplingParams
        from compiled_llm.checkpoint.model_files import checkpoint_directory, has_tokenizer
        from compiled_llm.engine.engine import CompiledEngine
        from compiled_llm.offline.serving import run_sampling
        from compiled_llm.scheduling.worker import WorkerFailedError
        from compiled_llm.terminal.answer import Answer

        if not has_tokenizer(config, checkpoint_directory(config)):
            raise ValueError("the model has no tokenizer, and a text needs one: give --tokenizer")
        sampling, _ = run_sampling(config, sampling_arguments(args))
        params = SamplingParams(**sampling, output_kind="delta")
        started = CompiledEngine.from_config(config)

    def write(piece: str) -> None:
        stdout.write(piece)
        stdout.flush()

    answer = Answer(write, params.n)
    with errors_end(program, (WorkerFailedError,), 1), started as engine:
        try:
            for output in engine.stream(text, params, lora_request=adapter):
                answer.take(output)
                if stdout.failure is not None:
                    return BROKEN_PIPE_STATUS
        except KeyboardInterrupt:
            answer.end_line()
            raise
    if answer.error is not None:
        print(f"{program}: error: {answer.error}", file=sys.stderr)
        return 1
    if not args.quiet:
        print(f"{program}: {answer.summary}", file=sys.stderr)
    return 0


def text_argument(words: Sequence[str]) -> str:
    """The text of TEXT. ``ValueError`` where there is none, or several."""
    if len(words) != 1:
        given = f"{len(words)} words" if words else "none"
        raise ValueError(
            f'TEXT must be one argument, as in "def fibonacci(n):", or - for standard input, given {given}'
        )
    if words[0] != "-":
        return words[0]
    try:
        return sys.stdin.read().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"standard input must be text in UTF-8: {error}") from error
