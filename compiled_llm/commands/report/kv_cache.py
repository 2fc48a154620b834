"""Report what a quantised KV cache costs in quality and saves in memory, for one model on one text.

    compiled-llm report kv-cache --kv-cache-dtype int8
    compiled-llm report kv-cache --model DIR --kv-cache-dtype fp8 --text FILE --kv-cache-skip-layers 0,5

``compiled_llm/quality/kv_cache.py`` says what is measured. Without ``--text`` it is measured on the files of Python's
standard library that the demo model was never trained on, those whose hash its ``training.json`` records.

Ends in one JSON line. Exit status: 0, 1 when a scale is zero or not finite, 2 for bad arguments.
"""

from collections.abc import Sequence

from compiled_llm.api import tables
from compiled_llm.api.command_line import FlagParser, add_engine_arguments, engine_config, errors_end
from compiled_llm.api.config_pairs import QUANTISED_DTYPES
from compiled_llm.commands.report.text_flags import LEAST, add_text_flags


def parser(program: str) -> FlagParser:
    made = FlagParser(prog=program, description="Report what a quantised KV cache costs in quality, on a text.")
    add_text_flags(made)
    tables.add_json_flag(made)
    add_engine_arguments(made, "model", "dtype", "device", "kv_cache_dtype", "kv_cache_skip_layers")
    return made


def main(program: str, arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit status."""
    flags = parser(program)
    args = flags.parse_checked(arguments=arguments, **LEAST)
    if args.kv_cache_dtype not in QUANTISED_DTYPES:
        flags.error(f"--kv-cache-dtype must be one of {', '.join(QUANTISED_DTYPES)}, given {args.kv_cache_dtype}")
    with flags.ending_errors():
        engine = engine_config(args)

    from compiled_llm.quality import kv_cache  # it loads torch, which takes seconds
    from compiled_llm.quality.teacher_forcing import BadScaleError
    from compiled_llm.quantizing.texts import Text

    with errors_end(program), errors_end(program, (BadScaleError,), status=1):
        found = kv_cache.measure(engine, Text(args.text, args.max_tokens, args.window), args.chunk)
    print(kv_cache.text_of(found))
    tables.finish(found, args.json)
    return 0
