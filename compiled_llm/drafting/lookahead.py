"""Drafting by lookahead: Jacobi iterations, and a pool of the n-grams that they pass.

(Fu et al., 2024, arXiv:2402.02057.)

A step samples a token behind each draft, also behind wrong ones. Of those behind the first wrong draft nothing counts;
but each is what the model says after the draft before it, and so a better guess of its position than the draft that
stood there: the next one (a Jacobi iteration). A token samples with the random numbers of its position, so this holds
for sampled requests as it does for greedy ones. On the way the guesses pass n-grams: a token as it was guessed, the one
that followed it an iteration later, and so on. The pool has these, and those of prompt and output.

The paper computes a window of several iterations and verifies candidates of the pool in one step, by a mask of its own.
Here a step verifies one chain of a request, so the chain is both: what the pool has after the last token, again and
again, where it has nothing the guess for that place, and behind these, up to the window's end, a token once more for
the iterations to begin with.
"""

from collections import OrderedDict
from collections.abc import Sequence

from compiled_llm.api.speculative_config import SpeculativeConfig
from compiled_llm.scheduling.request import Request

MOST_NGRAMS = 1024  # of prompt and output, and as many of iterations: some 400 bytes each
_Pool = OrderedDict[int, tuple[int, ...]]  # a token -> those that followed it last


class LookaheadDrafter:
    """A ``DraftSource`` that ``ReadsSamples``. Of a request it keeps up to ``MOST_NGRAMS`` n-grams of each kind.

    Args:
        num_tokens: most tokens of a proposal.
        window: places of a proposal that are guessed by iterations.
        ngram: tokens of the n-grams in the pool.
    """

    def __init__(self, num_tokens: int, window: int, ngram: int, adapts: bool = True) -> None:
        self.num_tokens, self.adapts = num_tokens, adapts
        self._window, self._ngram = window, ngram
        self._known: dict[Request, _Lookahead] = {}

    @classmethod
    def of(cls, config: SpeculativeConfig) -> "LookaheadDrafter":
        window, ngram = config.lookahead_window, config.lookahead_ngram
        assert window is not None
        assert ngram is not None
        return cls(config.num_tokens, window, ngram, config.adaptive)

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        """As ``DraftSource.propose``."""
        proposals = []
        for request, count in zip(requests, most, strict=True):
            known = self._known.get(request)
            if known is None:
                known = self._known[request] = _Lookahead(request.prompt_token_ids, self._window, self._ngram)
            known.add_output(request.output_token_ids)
            proposals.append(known.chain(count))
        return proposals

    def read_samples(self, request: Request, start: int, drafts: Sequence[int], sampled: Sequence[int]) -> None:
        """As ``ReadsSamples.read_samples``."""
        known = self._known.get(request)
        if known is not None:
            known.add_output(request.output_token_ids)
            known.read(start, drafts, sampled)

    def end(self, request: Request) -> None:
        self._known.pop(request, None)


class _Lookahead:
    """One request's pool, and its guesses.

    Attributes:
        guesses: of the tokens from position ``guessed_from`` on.
    """

    def __init__(self, prompt: Sequence[int], window: int, ngram: int) -> None:
        self._window, self._ngram = window, ngram
        self._of_text, self._of_guesses = _Pool(), _Pool()
        self._last: list[int] = []  # one token less than an n-gram has
        self._prompt_len, self._num_tokens = len(prompt), len(prompt)
        self._runs: dict[
            int, tuple[int, ...]
        ] = {}  # by the position of its last token: what the last iterations passed
        self.guesses: list[int] = []
        self.guessed_from = 0
        self._add(prompt[-(MOST_NGRAMS + ngram) :])

    def add_output(self, output: Sequence[int]) -> None:
        """``output``: all of it."""
        known = self._num_tokens - self._prompt_len
        if known < len(output):
            self._num_tokens = self._prompt_len + len(output)
            self._add(output[known:])

    def chain(self, most: int) -> list[int]:
        """Up to ``most`` tokens that may follow the last one."""
        chain: list[int] = []
        last, of_text, of_guesses = self._last[-1], self._of_text, self._of_guesses
        first = self._num_tokens - self.guessed_from
        while len(chain) < most:
            place = len(chain)
            if (following := of_text.get(last) or of_guesses.get(last)) is not None:
                chain += following
            elif place >= self._window:
                break
            elif first + place < len(self.guesses):
                chain.append(self.guesses[first + place])
            elif chain:
                chain.append(last)
            else:
                break
            last = chain[-1]
        return chain[:most]

    def read(self, start: int, drafts: Sequence[int], sampled: Sequence[int]) -> None:
        """As ``ReadsSamples.read_samples``; the output has been added."""
        before, self._runs = self._runs, {}
        wrong = self._num_tokens - 1 - start  # the first wrong draft
        for place in range(wrong, len(drafts)):
            token, behind = drafts[place], sampled[place + 1]
            if behind < 0:
                break
            run = before.get(start + place, ())
            run = ((*run, behind) if run and run[-1] == token else (token, behind))[-self._ngram :]
            self._runs[start + place + 1] = run
            if len(run) == self._ngram:
                _put(self._of_guesses, run)
        self.guesses, self.guessed_from = [run[-1] for run in self._runs.values()], self._num_tokens

    def _add(self, tokens: Sequence[int]) -> None:
        """More of prompt or output: its n-grams."""
        text, length = [*self._last, *tokens], self._ngram
        for end in range(length, len(text) + 1):
            _put(self._of_text, tuple(text[end - length : end]))
        self._last = text[1 - length :]


def _put(pool: _Pool, run: tuple[int, ...]) -> None:
    pool[run[0]] = run[1:]
    pool.move_to_end(run[0])
    if len(pool) > MOST_NGRAMS:
        pool.popitem(last=False)
