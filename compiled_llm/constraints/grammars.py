"""Structured output: which tokens may follow, so that a generation is JSON of a schema, or matches a regex or grammar.

The grammars are compiled and followed by llguidance (https://github.com/guidance-ai/llguidance), in processes that are
started when the first one is needed; docs/structured_outputs.md says why, and what is supported. No torch here.
"""

import importlib.util
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, cast

from compiled_llm.api.argument_checks import UnservableError
from compiled_llm.api.structured_outputs import StructuredOutputsParams
from compiled_llm.constraints.grammar_processes import GrammarProcesses, GrammarSource, GrammarState, Vocabulary, bits

if TYPE_CHECKING:
    from compiled_llm.text.tokenizer import Tokenizer

# What the library may do at most, in its units. It counts about 50,000 of fuel a millisecond when it compiles, 14,000
# in a step, and 20,000 items. A lexer state takes up to 2 kB.
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 500_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 30_000,
    "verbose_errors": False,
}
# Processor time that it may take to say which tokens may follow; an ordinary step takes less than a millisecond.
_SECONDS_AT_ONCE = 1.0
_SECONDS_A_TOKEN = 0.02
# JSON's whitespace, but never endlessly: models like to go on with spaces.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"


class GrammarCompiler:
    """Compiles what requests ask for, for one model; made once an engine. Any thread may use it.

    Args:
        tokenizer: byte-level or byte-fallback BPE. Reading a vocabulary of 150,000 tokens takes some seconds, which
            the first grammar waits for.
        vocab_size: the model's, V; the tokenizer may have fewer tokens.
        eos_token_ids: the tokens that end a text, at least one.
        max_seconds: of processor time, that compiling a grammar may take.
        max_bytes: of memory, that a compiled grammar may take.
        most: compiled grammars that are kept.

    Raises:
        ImportError: llguidance is not installed.
        UnservableError: no eos.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        vocab_size: int,
        eos_token_ids: Collection[int],
        *,
        max_seconds: float = 3.0,
        max_bytes: int = 2**29,
        most: int = 32,
    ) -> None:
        if importlib.util.find_spec("llguidance") is None:
            raise ImportError("structured outputs need llguidance: pip install 'compiled-llm[structured]'")
        if not eos_token_ids:
            raise UnservableError(
                "structured outputs need a model with an end-of-text token; its config.json names none"
            )
        text, token_ids = tokenizer.vocabulary()
        # The library needs room for each token of the tokenizer, even if the model has fewer.
        size = max(vocab_size, max(token_ids) + 1)
        words = bits(token_ids, size) & bits(range(vocab_size), size)
        self._vocabulary = Vocabulary(text, size, vocab_size, sorted(eos_token_ids), words)
        self._max_seconds, self._max_bytes = max_seconds, max_bytes
        self._processes = GrammarProcesses(self._vocabulary, most)

    def start(self, params: StructuredOutputsParams) -> GrammarState:
        """The state of a generation before its first token.

        Raises:
            ValueError: it does not compile, can never be matched, or is too large: with the library's reason. Or the
                library cannot read the tokenizer.
        """
        return self._processes.start(_source(params, self._max_seconds, self._max_bytes))

    def close(self) -> None:
        """End the processes."""
        self._processes.close()


def _source(params: StructuredOutputsParams, max_seconds: float, max_bytes: int) -> GrammarSource:
    """The library's own form of a grammar. Whether it compiles is not known yet."""
    options: dict[str, Any] = {}
    if params.json is not None or params.json_object:
        kind, text = "json", cast(str, params.json) if params.json is not None else '{"type":"object"}'
        pattern = None if params.disable_any_whitespace else params.whitespace_pattern or _WHITESPACE
        options = {"whitespace_flexible": pattern is not None, "whitespace_pattern": pattern}
    elif params.grammar is not None:
        kind, text = "lark", params.grammar
    elif params.regex is not None:
        kind, text = "regex", params.regex
    else:
        kind, text = "regex", "|".join(_escaped(item) for item in params.choice or ())
    return GrammarSource(
        kind=kind,
        text=text,
        json_options=tuple(options.items()),
        limits=tuple(_LIMITS.items()),
        seconds=max_seconds,
        seconds_at_once=_SECONDS_AT_ONCE,
        seconds_a_token=_SECONDS_A_TOKEN,
        num_bytes=max_bytes,
    )


def _escaped(text: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)
