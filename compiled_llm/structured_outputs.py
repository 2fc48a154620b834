"""Structured output: which tokens may follow, so that a generation is JSON of a schema, or matches a regex or grammar.

The grammars are compiled and followed by llguidance (https://github.com/guidance-ai/llguidance), which is loaded when
the first one is needed; docs/structured_outputs.md says why this library, and what it supports. No torch here.
"""

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from compiled_llm import grammar_texts

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

    from compiled_llm.tokenizer import Tokenizer

_MAX_COMPILED = 32  # grammars that are kept
_TOKENS_BETWEEN_RESTARTS = 256  # of a generation's matcher
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
# The library compiles by recursion, and would kill the process at the stack's end. The deepest texts of
# MAX_CHARACTERS that we could make take less than 32 MiB.
_STACK_BYTES = 256 * 2**20
_STACK_SIZE = threading.Lock()  # threading.stack_size is the whole process's
# JSON's whitespace, but never endlessly: models like to go on with spaces.
_WHITESPACE = r"[\x20\x0A\x0D\x09]{1,64}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams:
    """What a generation must look like: exactly one of the first five. Otherwise: ``ValueError``.

    Attributes:
        json: a JSON schema, as text or as a dict; kept as compact JSON text. Properties come in the schema's order.
        regex: the whole text matches it, in the syntax of Rust's regex crate, without anchors inside, look-around and
            backreferences.
        choice: strings, one of which is the whole text.
        grammar: a context-free grammar in llguidance's variant of the Lark language; the rule ``start`` is the text.
        json_object: True: any JSON object.
        whitespace_pattern: of json and json_object: a regex of the whitespace that may stand wherever JSON allows some.
            None: up to 64 of JSON's whitespace characters.
        disable_any_whitespace: of json and json_object: no whitespace between JSON's tokens.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        kinds = ("json", "regex", "choice", "grammar", "json_object")
        given = [name for name in kinds if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"structured outputs: exactly one of {', '.join(kinds)} must be given, given {given}")
        if self.json is not None:
            object.__setattr__(self, "json", grammar_texts.schema_text(self.json))
        if self.regex is not None:
            grammar_texts.check_text("regex", self.regex, grammar_texts.MAX_CHARACTERS)
        if self.choice is not None:
            object.__setattr__(self, "choice", grammar_texts.choices(self.choice))
        if self.grammar is not None:
            grammar_texts.check_grammar(self.grammar)
        if self.json_object is not None and self.json_object is not True:
            raise ValueError(f"json_object must be True or None, given {self.json_object!r}")
        if not isinstance(self.disable_any_whitespace, bool):
            raise ValueError(f"disable_any_whitespace must be True or False, given {self.disable_any_whitespace!r}")
        if self.whitespace_pattern is not None:
            grammar_texts.check_text(
                "whitespace_pattern", self.whitespace_pattern, grammar_texts.MAX_WHITESPACE_PATTERN
            )
            if self.disable_any_whitespace:
                raise ValueError("give whitespace_pattern or disable_any_whitespace, not both")
        asks_for_whitespace = self.whitespace_pattern is not None or self.disable_any_whitespace
        if asks_for_whitespace and given[0] not in ("json", "json_object"):
            raise ValueError(f"whitespace options belong to json and json_object, given {given[0]}")


class GrammarCompiler:
    """Compiles what requests ask for, for one model; made once an engine. Keeps the last compiled grammars.

    Args:
        tokenizer: byte-level or byte-fallback BPE. To take in a vocabulary of 150,000 tokens takes some seconds.
        vocab_size: the model's, V; the tokenizer may have fewer tokens.
        eos_token_ids: the tokens that end a text, at least one.

    Raises:
        ValueError: llguidance is not installed; no eos; a tokenizer that it cannot read.
    """

    def __init__(self, tokenizer: "Tokenizer", vocab_size: int, eos_token_ids: Collection[int]) -> None:
        library = _library()
        if not eos_token_ids:
            raise ValueError("structured outputs need a model with an end-of-text token; its config.json names none")
        text, tokenizer_size, token_ids = _vocabulary(tokenizer)
        # The library wants room for each token of the tokenizer, even if the model has fewer.
        size = max(vocab_size, tokenizer_size)
        try:
            self._tokenizer = library.LLTokenizer(text, n_vocab=size, eos_token=sorted(eos_token_ids))
        except ValueError as error:
            raise ValueError(f"structured outputs: llguidance cannot use this tokenizer: {_reason(error)}") from error
        self._tokens = _Tokens(
            words=_bits(token_ids, size) & _bits(range(vocab_size), size),
            eos_words=_bits(eos_token_ids, size),
            eos_token_ids=frozenset(eos_token_ids),
            vocab_size=vocab_size,
        )
        self._grammars: OrderedDict[StructuredOutputsParams, _Grammar] = OrderedDict()

    def start(self, params: StructuredOutputsParams) -> "GrammarState":
        """The state of a generation before its first token.

        Raises:
            ValueError: it does not compile, can never be matched, or is too large: with the library's reason.
        """
        grammar = self._grammars.get(params)
        if grammar is None:
            grammar = _Grammar(self._tokenizer, _library_grammar(params))
        state = GrammarState(grammar, self._tokens)
        state._next_words()  # a grammar that nothing matches shows here
        self._grammars[params] = grammar
        self._grammars.move_to_end(params)
        while len(self._grammars) > _MAX_COMPILED:
            self._grammars.popitem(last=False)
        return state


class GrammarState:
    """Where one generation stands in its grammar. Made by ``GrammarCompiler.start``."""

    def __init__(self, grammar: "_Grammar", tokens: "_Tokens") -> None:
        self._grammar = grammar
        self._tokens = tokens
        self._matcher = grammar.matcher()
        self._token_ids: list[int] = []
        self._ended = False
        self._restarted_at: int | None = None
        self._words: np.ndarray | None = None  # the mask that follows the tokens so far, once computed

    def allow(self, words: np.ndarray) -> None:
        """Write which tokens may follow. Eos tokens may if the text is complete, and no others if nothing can follow.

        Args:
            words: int32 [ceil(V / 32)], written: bit v % 32 of word v // 32 says whether token v may follow.

        Raises:
            ValueError: nothing may follow though the text is not complete, or the library's limits are reached.
        """
        assert words.dtype == np.int32, words.dtype
        assert words.shape == (-(-self._tokens.vocab_size // 32),), words.shape
        words[:] = self._next_words()[: len(words)]

    def accept(self, token_id: int) -> None:
        """The token was generated.

        Raises:
            ValueError: it may not follow (the state stays as it was), or the library's limits are reached.
        """
        name = f"structured outputs: token {token_id}, after {len(self._token_ids)} of the grammar's,"
        if not 0 <= token_id < self._tokens.vocab_size:
            raise ValueError(f"{name} must be below the vocabulary's size, {self._tokens.vocab_size}")
        if not self._next_words()[token_id // 32] >> token_id % 32 & 1:
            raise ValueError(f"{name} may not follow")
        if token_id in self._tokens.eos_token_ids:
            self._ended = True
            self._words = self._tokens.eos_words
            return
        if not self._matcher.consume_token(token_id):
            self._restart()
            self._matcher.consume_token(token_id)
            self._raise_for_error()
        self._token_ids.append(token_id)
        self._words = None

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing but an eos token may follow, or one did."""
        if self._ended:
            return True
        if self._matcher.is_stopped() or not self._matcher.is_accepting():
            return self._matcher.is_accepting()
        return not (self._next_words() & ~self._tokens.eos_words).any()

    def copy(self) -> "GrammarState":
        """Another state at the same place, for another generation that begins alike."""
        other = object.__new__(GrammarState)
        other._grammar, other._tokens = self._grammar, self._tokens
        other._matcher = self._matcher.deep_copy()
        other._token_ids = list(self._token_ids)
        other._ended, other._restarted_at, other._words = self._ended, self._restarted_at, self._words
        return other

    def _next_words(self) -> np.ndarray:
        """What ``allow`` writes, with words for further tokens of the tokenizer. Never written once it is computed."""
        if self._words is None:
            words = self._compute_words()
            if self._matcher.is_error():
                self._restart()
                words = self._compute_words()
                self._raise_for_error()
            words &= self._tokens.words
            if not self._matcher.is_accepting():
                words &= ~self._tokens.eos_words
            if not words.any():
                raise ValueError(_dead_end(len(self._token_ids)))
            self._words = words
        return self._words

    def _compute_words(self) -> np.ndarray:
        words = np.zeros_like(self._tokens.words)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        return words

    def _restart(self) -> None:
        """Go over the tokens again with a new matcher, if that may help.

        The copies of a matcher share a lexer, whose states only grow in number, so that after many generations it
        may reach its limits though no one of them needs much. A generation that does shall not restart endlessly.
        """
        place = len(self._token_ids)
        if self._restarted_at is not None and place - self._restarted_at < _TOKENS_BETWEEN_RESTARTS:
            return
        self._matcher = self._grammar.matcher(anew=True)
        self._matcher.consume_tokens(self._token_ids)
        self._restarted_at = place

    def _raise_for_error(self) -> None:
        if self._matcher.is_error():
            reason = self._matcher.get_error()
            if reason.startswith("NoExtension"):
                raise ValueError(_dead_end(len(self._token_ids)))
            raise ValueError(f"structured outputs: after {len(self._token_ids)} tokens: {_reason(reason)}")


@dataclasses.dataclass(frozen=True)
class _Tokens:
    """What is known of the tokens. words: those of both tokenizer and model; eos_words: int32 [W], a bit a token."""

    words: np.ndarray
    eos_words: np.ndarray
    eos_token_ids: frozenset[int]
    vocab_size: int


class _Grammar:
    """A compiled grammar, and how to compile it again."""

    def __init__(self, tokenizer: "LLTokenizer", text: str) -> None:
        self._tokenizer = tokenizer
        self._text = text
        self._first = self._compile()

    def matcher(self, anew: bool = False) -> "LLMatcher":
        """A matcher at the beginning; ``anew``: with a lexer of its own, which later ones share."""
        if anew:
            self._first = self._compile()
        return self._first.deep_copy()

    def _compile(self) -> "LLMatcher":
        library = _library()
        limits = library.LLParserLimits(**_LIMITS)
        made: list[LLMatcher] = []

        def compile_() -> None:
            made.append(library.LLMatcher(self._tokenizer, self._text, log_level=0, limits=limits))

        thread = threading.Thread(target=compile_)
        with _STACK_SIZE:
            before = threading.stack_size(_STACK_BYTES)
            try:
                thread.start()
            finally:
                threading.stack_size(before)
        thread.join()
        matcher = made[0]
        if matcher.is_error():
            raise ValueError(f"structured outputs: does not compile: {_reason(matcher.get_error())}")
        return matcher


def _library() -> ModuleType:
    try:
        import llguidance
    except ImportError as error:
        raise ValueError("structured outputs need llguidance: pip install 'compiled-llm[structured]'") from error
    return llguidance


def _vocabulary(tokenizer: "Tokenizer") -> tuple[str, int, set[int]]:
    """The tokenizer as the text of a tokenizer.json, one more than the largest id in it, the ids that may come out."""
    text, token_ids = tokenizer.vocabulary()
    return text, max(token_ids) + 1, token_ids


def _bits(token_ids: Iterable[int], size: int) -> np.ndarray:
    """int32 [ceil(size / 32)], with the bits of these tokens set."""
    bits = np.zeros(-(-size // 32) * 32, np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)


def _library_grammar(params: StructuredOutputsParams) -> str:
    """The library's own form of a grammar. Whether it compiles is not known yet."""
    matcher = _library().LLMatcher
    if params.json is not None or params.json_object:
        schema = cast(str, params.json) if params.json is not None else '{"type":"object"}'
        pattern = None if params.disable_any_whitespace else params.whitespace_pattern or _WHITESPACE
        options = {"whitespace_flexible": pattern is not None, "whitespace_pattern": pattern}
        try:
            return matcher.grammar_from_json_schema(schema, overrides=options)
        except ValueError as error:
            raise ValueError(f"structured outputs: does not compile: {_reason(error)}") from error
    if params.regex is not None:
        return matcher.grammar_from_regex(params.regex)
    if params.choice is not None:
        return matcher.grammar_from_regex("|".join(_escaped(item) for item in params.choice))
    return matcher.grammar_from_lark(cast(str, params.grammar))


def _escaped(text: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _dead_end(num_tokens: int) -> str:
    return f"structured outputs: after {num_tokens} tokens no token may follow, and the grammar is not matched"


def _reason(error: object) -> str:
    """The library's reason, without traces and in lines of bearable length."""
    lines = str(error).split("\n<")[0].splitlines()[:12]
    return "\n".join(line if len(line) <= 200 else f"{line[:200]}..." for line in lines).rstrip()
