"""Show the token ids of a text, and what each token stands for.

    compiled-llm tokenize "def fibonacci(n):"
    compiled-llm tokenize --model DIR --file prompt.txt --json
    compiled-llm tokenize --model DIR --chat "Hello"

They are what the engine makes of the text as a prompt, or with ``--chat`` of a conversation that has it as the user's
message. ``-`` reads the text from standard input, without the line break at its end; ``--file`` takes a file whole.
No weights are read, nor downloaded of a hub's model. A token is shown as Python spells its text, or its bytes where
these are a part of a character; their number goes to stderr.

Exit status: 0, 1 when the tokens could not be written, 2 for bad arguments, 128 + the signal's number after SIGINT
(130) or SIGTERM (143), 141 when stdout was closed.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from compiled_llm.api.command_line import FlagParser, add_engine_arguments, engine_config
from compiled_llm.commands.generate import text_argument
from compiled_llm.system.process import GuardedStream, StopSignals
from compiled_llm.system.program import as_program


def parser(program: str) -> FlagParser:
    parser = FlagParser(prog=program, description="Show the token ids of a text, and what each token stands for.")
    parser.add_argument("text", nargs="*", metavar="TEXT", help="in quotes, or - for standard input")
    parser.add_argument("--file", type=Path, help="a file with the text, in UTF-8, in the place of TEXT")
    parser.add_argument(
        "--chat", action="store_true", help="the text is a user's message, in the model's chat template"
    )
    parser.add_argument("--json", action="store_true", help="print text, ids and tokens as one line of JSON")
    add_engine_arguments(parser, "model", "revision", "tokenizer", "tokenizer_revision", "split_special_tokens")
    return parser


@as_program
def main(program: str, arguments: Sequence[str] | None, stdout: GuardedStream, signals: StopSignals) -> int:
    """Run the command; returns the exit status."""
    flags = parser(program)
    args = flags.parse_args(arguments)
    with flags.ending_errors():
        return _tokenize(program, args)


def _tokenize(program: str, args: argparse.Namespace) -> int:
    text = _text(args)
    from compiled_llm.checkpoint.model_files import checkpoint_directory, load_tokenizer
    from compiled_llm.text.chat import ChatEncoder
    from compiled_llm.text.prompts import Capacity, encode_prompt
    from compiled_llm.text.tokenizer import TokenBytes

    config = engine_config(args)
    tokenizer = load_tokenizer(config, checkpoint_directory(config, with_weights=False))
    if tokenizer is None:
        raise ValueError("the model has no tokenizer, and a text needs one: give --tokenizer")
    if args.chat and config.split_special_tokens:
        raise ValueError("--split-special-tokens must be left out with --chat, whose messages are always text")
    capacity = Capacity(2**31 - 1, "largest number of tokens")
    if args.chat:
        encoder = ChatEncoder(tokenizer)
        try:
            text, token_ids = encoder.encode([{"role": "user", "content": text}], capacity.num_tokens)
        finally:
            encoder.close()
    else:
        token_ids = encode_prompt(text, tokenizer, capacity, None, config.split_special_tokens).token_ids
    contents = TokenBytes(tokenizer)
    tokens = [contents.of(token_id) for token_id in token_ids]
    if args.json:
        readable = [token.decode(errors="replace") for token in tokens]
        print(json.dumps({"text": text, "token_ids": token_ids, "tokens": readable}))
        return 0
    for token_id, token in zip(token_ids, tokens, strict=True):
        try:
            shown: str | bytes = token.decode()
        except UnicodeDecodeError:
            shown = token
        print(f"{token_id:8}  {shown!r}")
    print(f"{program}: {len(token_ids)} tokens of {len(text)} characters", file=sys.stderr)
    return 0


def _text(args: argparse.Namespace) -> str:
    if args.file is None:
        return text_argument(args.text)
    if args.text:
        raise ValueError(f"TEXT must be left out with --file, given {' '.join(args.text)!r:.100}")
    try:
        return args.file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--file must be a text in UTF-8, given {str(args.file)!r}: {error}") from error
