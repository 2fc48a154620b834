"""Perplexity of a text, and bits per byte, in windows that overlap.

    compiled-llm report perplexity --model DIR --text FILE
    compiled-llm report perplexity --model DIR --text FILE --window 2048 --stride 512 --dtype bfloat16

``compiled_llm/quality/perplexity.py`` says which token is scored in which window. All engine arguments are flags.

Ends in one JSON line. Exit status: 0, 1 when a window could not be scored, 2 for bad arguments.
"""

from collections.abc import Sequence
from pathlib import Path

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser, add_engine_arguments, engine_config, errors_end, integers


def parser(program: str) -> FlagParser:
    made = FlagParser(prog=program, description="Perplexity of a text, and bits per byte, in windows that overlap.")
    add = made.add_argument
    add("--text", type=Path, required=True, metavar="FILE", help="UTF-8")
    add("--window", type=int, metavar="N", help="tokens of a window (default: as many as a request may have)")
    add("--stride", type=int, metavar="N", help="tokens from one window to the next (default: half a window)")
    prefix = "put these before each window (default: what the tokenizer puts before a text)"
    add("--prefix-token-ids", type=integers, metavar="INT[,INT...]", help=prefix)
    tables.add_json_flag(made)
    add_engine_arguments(made)
    return made


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    args = parser(program).parse_checked(arguments=arguments, window=1, stride=1)
    with errors_end(program):
        text = args.text.read_bytes().decode("utf-8")  # line ends as they are

    from compiled_llm.engine.engine import CompiledEngine  # it loads torch, which takes seconds
    from compiled_llm.quality import perplexity

    with errors_end(program):
        started = CompiledEngine.from_config(engine_config(args))
    with started as engine, errors_end(program), errors_end(program, (RuntimeError,), status=1):
        found = perplexity.measure(engine, text, args.window, args.stride, args.prefix_token_ids)
    prefix = len(found["prefix_token_ids"])
    rows = {
        "model": f"{found['model']}, {found['dtype']} on {found['device']}",
        "KV cache": found["kv_cache"],
        "text": f"{args.text}: {found['tokens']} tokens, {found['bytes']} bytes",
        "windows": f"{found['windows']} of up to {found['window']} tokens, of which {prefix} are put before the text's",
        "perplexity": f"{found['perplexity']:.4f} a token, {found['nats_per_token']:.4f} nats",
        "bits per byte": f"{found['bits_per_byte']:.4f}",
        "time": f"{found['seconds']:.1f} s, {found['tokens'] / found['seconds']:.0f} scored tokens/s",
    }
    tables.print_table("Perplexity", rows)
    tables.finish({**found, "text": str(args.text)}, args.json)
    return 0
