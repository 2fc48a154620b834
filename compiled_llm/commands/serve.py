"""Serve a model over HTTP, as OpenAI's interface has it.

    compiled-llm serve
    compiled-llm serve DIR --data-parallel-size 2
    compiled-llm serve DIR --data-parallel-size 2 --ray
    compiled-llm serve DIR --port 8000 --served-model-name my-model
    COMPILED_LLM_API_KEY=secret compiled-llm serve DIR --host 0.0.0.0
    compiled-llm serve DIR --enable-lora --lora-modules sql=adapters/sql chat=adapters/chat

Clients of OpenAI find it at http://127.0.0.1:8000/v1. Without a model the bundled one answers. An engine runs in a
process of its own. The log, a line for each request, goes to stderr. See docs/serving.md.

Exit status: 0 after SIGINT or SIGTERM, when all answers that were under way have ended; 1 when the engine failed or
the address is taken; 2 for bad arguments; 128 + the signal's number after a second signal, or one during the start.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import os
import sys
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from compiled_llm.api.command_line import FlagParser, add_engine_arguments, attribute_docs, engine_config
from compiled_llm.system.process import GuardedStream, StopSignals, UnwaitingStream
from compiled_llm.system.program import as_program

_PACKAGES = ("fastapi", "uvicorn", "uvloop", "httptools", "msgspec", "prometheus_client")
_SELDOM = (
    *("max_header_bytes", "max_stored_responses", "max_stored_bytes", "stored_seconds", "keep_alive_seconds", "dev"),
    *("stall_seconds", "max_load_difference", "max_completions", "min_prefill_tokens", "max_prefill_seconds"),
    *("prefill_replicas", "allow_drain", "otlp_traces_endpoint", "max_replicas"),
)
_KEY_VARIABLE = "COMPILED_LLM_API_KEY"
# Streams wait no longer than that for the prompts of others; steps of a bundled 0.1B model hold 64 tokens then.
_TARGET_ITL_MS = 250.0


def parser(program: str) -> FlagParser:
    from compiled_llm.server.settings import ServerSettings

    parser = FlagParser(prog=program, description="Serve a model over HTTP, as OpenAI's interface has it.")
    parser.add_argument("positional_model", nargs="?", metavar="MODEL", help="the same as --model")
    hints, docs = typing.get_type_hints(ServerSettings), attribute_docs(ServerSettings)
    group = parser.add_argument_group("server")
    for field in dataclasses.fields(ServerSettings):
        options: dict[str, Any] = {"type": hints[field.name], "metavar": hints[field.name].__name__.upper()}
        default: Any = field.default
        if default == ():
            options, default = {"action": "append", "metavar": "STR"}, []
            if field.name == "lora_modules":  # as vLLM has it
                options = {"action": "extend", "nargs": "+", "metavar": "NAME=PATH"}
        elif default is False:
            options = {"action": "store_true"}
        group.add_argument(
            f"--{field.name.replace('_', '-')}",
            default=default,
            help=f"{docs[field.name]} (default: {'off' if default is False else default or 'none'})",
            **options,
        )
    parser.seldom |= {f"--{name.replace('_', '-')}" for name in _SELDOM}
    group.add_argument(
        "--ray",
        nargs="?",
        const="",
        metavar="ADDRESS",
        help="run the engines on a Ray cluster, by Ray Serve: the one at HOST:PORT; without ADDRESS: that of "
        "RAY_ADDRESS, else a new one of this machine alone",
    )
    group.add_argument(
        "--max-replicas",
        type=int,
        metavar="N",
        help="with --ray: engines at most, as many as requests and KV blocks in use ask for; --data-parallel-size is "
        "how many at least (default: no more than these)",
    )
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help="a key a line, as --api-key")
    add_engine_arguments(parser, wait_for_compile=False, target_itl_ms=_TARGET_ITL_MS)
    return parser


@as_program
def main(program: str, arguments: Sequence[str] | None, stdout: GuardedStream, signals: StopSignals) -> int:
    """Run the command; returns the exit status."""
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    flags = parser(program)
    args = flags.parse_args(arguments)
    with flags.ending_errors():
        if missing:
            raise ValueError(f"serve needs the packages {', '.join(missing)}: pip install 'compiled-llm[server]'")
        return _serve(program, args, signals)


def _serve(program: str, args: argparse.Namespace, signals: StopSignals) -> int:
    if args.positional_model is not None:
        if args.model is not None:
            raise ValueError(f"MODEL and --model must not be given both, given {args.positional_model!r}")
        args.model = args.positional_model
    from compiled_llm.server.settings import ServerSettings

    sizes_are_given = args.max_num_batched_tokens is not None or args.token_bucket_sizes is not None
    if args.target_itl_ms is _TARGET_ITL_MS and (sizes_are_given or not args.enable_chunked_prefill):
        args.target_itl_ms = None  # it was not asked for
    args.api_key = [*args.api_key, *_keys(args.api_key_file)]
    values = {field.name: getattr(args, field.name) for field in dataclasses.fields(ServerSettings)}
    config, settings = engine_config(args), ServerSettings(**values)
    if args.ray is not None:
        from compiled_llm.ray_serve.arguments import Replication
        from compiled_llm.ray_serve.run import serve_on_ray

        return serve_on_ray(program, args.ray, config, settings, Replication(args.max_replicas), signals)
    if args.max_replicas is not None:
        raise ValueError(f"max_replicas is for --ray, given {args.max_replicas}: give --data-parallel-size")
    from compiled_llm.server.run import serve

    with contextlib.redirect_stderr(UnwaitingStream(sys.stderr)):
        return serve(program, config, settings)


def _keys(path: Path | None) -> list[str]:
    """Keys of the file and of the environment."""
    lines = os.environ.get(_KEY_VARIABLE, "").split(",")
    if path is not None:
        try:
            lines += path.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"--api-key-file must be a text in UTF-8, given {str(path)!r}: {error}") from error
        if not any(map(str.strip, lines)):
            raise ValueError(f"--api-key-file must have a key in a line, given {str(path)!r} without one")
    return [line.strip() for line in lines if line.strip()]
