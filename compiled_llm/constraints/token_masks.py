"""TokenMask: which tokens may follow in one generation. Host side, plain numpy; the graph applies the words.

Which tokens are banned follows from the tokens so far, which the host has. So allowed ids, bad words, a minimum of
tokens and a grammar all become one bit a token, and the graph only applies these bits.
"""

import copy
from collections.abc import Collection, Sequence

import numpy as np

from compiled_llm.constraints.grammar_processes import GrammarState, bits
from compiled_llm.step.mask_words import BITS, num_mask_words


class TokenMask:
    """The mask of one generation, token after token.

    Args:
        allowed_token_ids: the only tokens that may be generated; None: all of the vocabulary.
        bad_words: token sequences that are never completed.
        min_tokens: how many tokens come before any of ``stop_token_ids``.
        grammar: what it allows; ``accept`` and ``words`` pass it the tokens.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        allowed_token_ids: Sequence[int] | None = None,
        bad_words: Sequence[tuple[int, ...]] = (),
        min_tokens: int = 0,
        stop_token_ids: Collection[int] = (),
        grammar: GrammarState | None = None,
    ) -> None:
        self._vocab_size = vocab_size
        self._always = np.full(num_mask_words(vocab_size), 0xFFFFFFFF, dtype=np.uint32)
        if allowed_token_ids is not None:
            self._always = bits(allowed_token_ids, vocab_size).view(np.uint32)
        _clear(self._always, [word[0] for word in bad_words if len(word) == 1])
        # By the token before the last one.
        self._sequences: dict[int, list[tuple[int, ...]]] = {}
        for word in bad_words:
            if len(word) > 1:
                self._sequences.setdefault(word[-2], []).append(word)
        self._min_tokens = min_tokens
        self._before_minimum = self._always.copy()
        _clear(self._before_minimum, stop_token_ids)
        self._grammar = grammar
        self._num_accepted = 0

    def copy(self, grammar: GrammarState | None) -> "TokenMask":
        """A mask for another generation, with its own state of the grammar. The words are shared."""
        other = copy.copy(self)
        other._grammar, other._num_accepted = grammar, 0
        return other

    @property
    def needs_last_token(self) -> bool:
        """Whether a mask follows from the tokens themselves and not from their number alone."""
        return self._grammar is not None or bool(self._sequences)

    @property
    def is_finished(self) -> bool:
        """Whether the grammar has come to its end, so that nothing but an end-of-text token may follow."""
        return self._grammar is not None and self._grammar.finished

    def accept(self, output_token_ids: Sequence[int]) -> None:
        """Take in the tokens that came since the last call: all tokens of the output so far are given."""
        if self._grammar is not None:
            for token_id in output_token_ids[self._num_accepted :]:
                self._grammar.accept(token_id)
            self._num_accepted = len(output_token_ids)

    def after_drafts(self, output_token_ids: Sequence[int], drafts: Sequence[int]) -> list[np.ndarray]:
        """For each of the first drafts that may come one after the other: as ``words``, of the token after it.

        Drafts end before one with which the grammar would be at its end.

        Args:
            output_token_ids: all tokens so far.
        """
        tokens = list(output_token_ids)
        words = self.words(tokens, len(tokens))
        of_grammar = None if self._grammar is None or words is None else self._grammar.after(drafts)
        found: list[np.ndarray] = []
        for place, draft in enumerate(drafts):
            if words is None or not (int(words[draft // BITS]) >> (draft % BITS)) & 1:
                break
            if of_grammar is not None:
                words = of_grammar[place] if place < len(of_grammar) else None
            else:
                tokens.append(draft)
                words = self.words(tokens, len(tokens))
            if words is None:
                break
            found.append(words)
        return found

    def words(self, output_token_ids: Sequence[int], num_output_tokens: int) -> np.ndarray | None:
        """int32 ``[ceil(V / 32)]``: bit v % 32 of word v // 32 says whether token v may follow. None: no token may.

        Args:
            output_token_ids: the tokens known so far; all of them, if ``needs_last_token``.
            num_output_tokens: how many there are, known or not.
        """
        words = self._before_minimum if num_output_tokens < self._min_tokens else self._always
        if self._grammar is not None:
            self.accept(output_token_ids)
            words = words.copy()
            self._grammar.allow(words.view(np.int32))
        banned = [
            sequence[-1]
            for sequence in self._sequences.get(output_token_ids[-1] if output_token_ids else -1, ())
            if tuple(output_token_ids[len(output_token_ids) + 1 - len(sequence) :]) == sequence[:-1]
        ]
        if banned:
            words = words.copy()
            _clear(words, banned)
        return words.view(np.int32) if allows_any(words, self._vocab_size) else None


def allows_any(words: np.ndarray, vocab_size: int) -> bool:
    """Whether a mask leaves a token of the vocabulary."""
    whole, rest = divmod(vocab_size, BITS)
    return bool(words[:whole].any() or (rest and int(words[whole]) & ((1 << rest) - 1)))


def _clear(words: np.ndarray, token_ids: Collection[int]) -> None:
    ids = np.fromiter(token_ids, dtype=np.int64)
    np.bitwise_and.at(words, ids // BITS, ~(np.uint32(1) << (ids % BITS).astype(np.uint32)))
