"""Talk with a model in the terminal.

    compiled-llm chat
    compiled-llm chat MODEL.gguf
    compiled-llm chat DIR --system "Answer in one sentence."
    compiled-llm chat --url http://127.0.0.1:8000
    printf 'Hello\\n/stats\\n' | compiled-llm chat

A line is a message; one that begins with ``/`` is a command (``/help`` lists them). Ctrl-C ends the answer, Ctrl-D
leaves. The model's chat template makes the prompt; a model without one gets the turns as text. What is not a terminal
is read as a script of lines: answers go to stdout, everything else to stderr. With ``--url`` a server with OpenAI's
interface answers, and no model is loaded here.

Exit status: 0, 1 when a line of a script could not be answered, 2 for bad arguments, 143 after SIGTERM, 130 after
SIGINT in a script, 141 when stdout was closed.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence

from compiled_llm.api.command_line import (
    FlagParser,
    add_engine_arguments,
    add_sampling_arguments,
    engine_config,
    errors_end,
    sampling_arguments,
    sampling_params,
)
from compiled_llm.api.config import EngineConfig
from compiled_llm.api.lora_request import LoRARequest, lora_arguments
from compiled_llm.system.process import GuardedStream, StopSignals
from compiled_llm.system.program import as_program
from compiled_llm.system.quick_start import quick_start

# Sampling parameters for outputs other than one answer that is printed.
_WITHOUT = (
    "n", "logprobs", "prompt_logprobs", "detokenize", "output_kind", "truncate_prompt_tokens",
    "split_special_tokens",
)  # fmt: skip
_BUNDLED = (
    "the bundled model completes Python and was trained on no conversation: it takes what you say as comments, and "
    "writes the function below them"
)
_WITHOUT_TEMPLATE = (
    "the model has no chat template, so it may be none for chats: it gets the turns as text, after User: and Assistant:"
)


def parser(program: str) -> FlagParser:
    parser = FlagParser(prog=program, description="Talk with a model in the terminal. /help there lists its commands.")
    parser.add_argument("model_name", nargs="?", metavar="MODEL", help="what to talk with, as after --model")
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before all else")
    parser.add_argument("--lora", metavar="PATH", help="the directory of an adapter that changes the model")
    parser.add_argument("--url", help="of a server that answers, as http://127.0.0.1:8000; MODEL is its name there")
    parser.add_argument("--api-key", metavar="KEY", help="of the server (default: OPENAI_API_KEY of the environment)")
    add_sampling_arguments(parser, _WITHOUT, max_tokens="a quarter of the context", temperature="the model's, or 0.7")
    add_engine_arguments(parser, wait_for_compile=False)
    return parser


@as_program
def main(program: str, arguments: Sequence[str] | None, stdout: GuardedStream, signals: StopSignals) -> int:
    """Run the command; returns the exit status."""
    flags = parser(program)
    args = flags.parse_args(arguments)
    with flags.ending_errors():
        if args.url is not None:
            return _chat_with_server(program, args, flags, stdout)
        if args.api_key is not None:
            raise ValueError("--api-key must be left out without --url")
        adapter, of_adapter = lora_arguments(args.lora)
        vars(args).update(of_adapter)
        return _chat(program, args, stdout, adapter)


def _chat_with_server(program: str, args: argparse.Namespace, flags: FlagParser, stdout: GuardedStream) -> int:
    from compiled_llm.terminal.chat import Chat
    from compiled_llm.terminal.server_client import ServerClient
    from compiled_llm.terminal.server_conversation import ServerConversation

    for field in dataclasses.fields(EngineConfig):
        if getattr(args, field.name, None) != flags.get_default(field.name):
            raise ValueError(f"--{field.name.replace('_', '-')} must be left out with --url: the server has the engine")
    sampling_params(args)
    if args.lora is not None:
        raise ValueError("--lora must be left out with --url: give the adapter's name as MODEL")
    client = ServerClient(args.url, args.api_key or os.environ.get("OPENAI_API_KEY"))
    with errors_end(program, (OSError,), 1):
        conversation = ServerConversation(
            client, args.model_name, sampling_arguments(args), _writer(stdout), args.system
        )
    return Chat(conversation, _WITHOUT).run()


def _writer(stdout: GuardedStream) -> Callable[[str], None]:
    def write(piece: str) -> None:
        stdout.write(piece)
        stdout.flush()
        if isinstance(stdout.failure, BrokenPipeError):
            raise stdout.failure

    return write


def _chat(program: str, args: argparse.Namespace, stdout: GuardedStream, adapter: LoRARequest | None) -> int:
    if args.model_name is not None:
        if args.model is not None:
            raise ValueError(f"--model must be left out where MODEL is given, given {args.model!r:.200}")
        args.model = args.model_name
    config = engine_config(args)
    sampling_params(args)  # its errors come before torch is loaded, which takes seconds
    with quick_start():
        from compiled_llm.checkpoint.model_files import checkpoint_directory, has_tokenizer
        from compiled_llm.engine.engine import CompiledEngine
        from compiled_llm.offline.serving import run_sampling
        from compiled_llm.scheduling.worker import WorkerFailedError
        from compiled_llm.terminal.chat import Chat
        from compiled_llm.terminal.engine_conversation import EngineConversation

        if not has_tokenizer(config, checkpoint_directory(config)):
            raise ValueError("the model has no tokenizer, and a chat needs one: give --tokenizer")
        given = sampling_arguments(args)
        sampling, _ = run_sampling(config, given)
        started = CompiledEngine.from_config(config)

    with errors_end(program, (WorkerFailedError,), 1), started as engine:
        if "max_tokens" not in given:
            sampling["max_tokens"] = max(1, engine.scheduler.request_capacity // 4)
        sampling = {name: value for name, value in sampling.items() if name not in _WITHOUT}
        conversation = EngineConversation(engine, sampling, _writer(stdout), args.system, adapter)
        note = _BUNDLED if config.model is None else None if conversation.has_template else _WITHOUT_TEMPLATE
        if note is not None:
            print(f"({note})", file=sys.stderr, flush=True)
        return Chat(conversation, _WITHOUT).run()
