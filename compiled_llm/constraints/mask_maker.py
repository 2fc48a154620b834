"""MaskMaker: the sampling parameters of a request -> the masks of its generations."""

import functools
import threading
from collections.abc import Collection

from compiled_llm.api.config import EngineConfig
from compiled_llm.api.readable import shown
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.api.structured_outputs import StructuredOutputsParams
from compiled_llm.constraints.grammars import GrammarCompiler, GrammarState
from compiled_llm.constraints.token_masks import TokenMask
from compiled_llm.text.tokenizer import Tokenizer

_MAX_BAD_WORD_CHARACTERS = 65_536  # of all words of a request together
_MIN_GRAMMARS = 32  # that are kept compiled


class MaskMaker:
    """Makes masks for one model. Any thread may use it; to compile a grammar may take long.

    Args:
        tokenizer: None: the model has none, and no request has bad words or a grammar.
        most_grammars: that are in use at once; a few more are kept.
    """

    def __init__(
        self,
        config: EngineConfig,
        tokenizer: Tokenizer | None,
        vocab_size: int,
        eos_token_ids: Collection[int],
        most_grammars: int,
    ) -> None:
        self._config, self._tokenizer = config, tokenizer
        self._vocab_size, self._eos_token_ids = vocab_size, eos_token_ids
        self._num_grammars = max(_MIN_GRAMMARS, 2 * most_grammars)
        self._grammars: GrammarCompiler | None = None  # made for the first request that has a grammar
        self._making_grammars = threading.Lock()
        self._bad_words = functools.lru_cache(maxsize=32)(self._token_sequences)

    def close(self) -> None:
        """End the processes that follow grammars."""
        if self._grammars is not None:
            self._grammars.close()

    def masks(
        self, params: SamplingParams, stop_token_ids: Collection[int], split_special_tokens: bool
    ) -> list[TokenMask | None]:
        """A mask for each of the request's ``n`` generations; None where every token may follow.

        Raises:
            ValueError: a grammar does not compile, a bad word has no tokens, or no token may come first.
        """
        if not params.masks_tokens:
            return [None] * params.n
        grammars = [self._start_grammar(params) for _ in range(params.n)]
        first = TokenMask(
            self._vocab_size,
            allowed_token_ids=params.allowed_token_ids,
            bad_words=self._bad_words(params.bad_words or (), split_special_tokens),
            min_tokens=params.min_tokens,
            stop_token_ids=stop_token_ids,
            grammar=grammars[0],
        )
        if grammars[0] is None and first.words([], 0) is None:
            raise ValueError(
                "allowed_token_ids, bad_words and min_tokens leave no token to begin with: allow one that is neither a "
                "bad word nor ends the output"
            )
        return [first, *map(first.copy, grammars[1:])]

    def _start_grammar(self, params: SamplingParams) -> GrammarState | None:
        if params.structured_outputs is None:
            return None
        assert isinstance(params.structured_outputs, StructuredOutputsParams)
        assert self._tokenizer is not None
        with self._making_grammars:
            if self._grammars is None:
                self._grammars = GrammarCompiler(
                    self._tokenizer,
                    self._vocab_size,
                    self._eos_token_ids,
                    max_seconds=self._config.max_grammar_seconds,
                    max_bytes=self._config.max_grammar_bytes,
                    most=self._num_grammars,
                )
        return self._grammars.start(params.structured_outputs)

    def _token_sequences(self, words: tuple[str, ...], split_special_tokens: bool) -> list[tuple[int, ...]]:
        """How each word is spelled in tokens at the start of a text, and after a space where that is another way.

        Special tokens in it are text, and special tokens too unless ``split_special_tokens``.
        """
        if not words:
            return []
        assert self._tokenizer is not None
        length = sum(map(len, words))
        if length > _MAX_BAD_WORD_CHARACTERS:
            raise ValueError(
                f"bad_words may have {_MAX_BAD_WORD_CHARACTERS} characters at most, all words together, given {length}"
            )
        texts = [text for word in words for text in (word, " " + word.lstrip())]
        found = [tuple(token_ids) for token_ids in self._tokenizer.encode_pieces(texts, True)]
        if () in found:
            raise ValueError(f"bad_words must be strings that have tokens, given {shown(texts[found.index(())])}")
        special = [] if split_special_tokens else list(filter(self._tokenizer.special_tokens_within, texts))
        if special:
            found += [tuple(token_ids) for token_ids in self._tokenizer.encode_pieces(special)]
        return list(dict.fromkeys(found))
