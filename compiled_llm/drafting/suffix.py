"""Drafting by suffixes: what most often followed the longest run of last tokens, here or in recent outputs of others.

SuffixDecoding (Oliaro et al., 2024, arXiv:2411.04975), as Arctic Inference has it: of the runs of last tokens that were
seen before, each gives a draft, the likeliest tokens after it one after the other by their counts; the draft wins whose
probabilities, multiplied along it and summed, are the largest. Instead of a suffix tree there is the sorted list of all
places, by the tokens before them, backwards: the places after equal runs stand side by side, and a node of the tree is
a range of the list.

The places after the longest run stay known. As long as the tokens that come are those that follow at some of them, they
move on by as many, and their run is the longest still: a longer one would have been longer before, unless its output
has ended since. Only after another token the list is searched, and what came since is entered into it.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from compiled_llm.api.speculative_config import SpeculativeConfig
from compiled_llm.drafting.token_text import LAST, as_text, as_tokens
from compiled_llm.scheduling.request import Request

_MOST_PLACES = 8  # of a run that are counted: of more, so many evenly spread ones
MOST_CACHED_TOKENS = 131_072  # of ended outputs that are kept, all salts together: 30 MB
_BYTES_A_TOKEN = 230  # of a text and its places: 220 were measured with ids of 17 bits, 170 with ids of 12
_BLOCK = 512  # places of a block; at most twice as many
_INDEX_BITS = 24
_INDEX_MASK = (1 << _INDEX_BITS) - 1  # of tokens in a text


class SuffixDrafter:
    """A ``DraftSource``.

    Args:
        num_tokens: most tokens of a proposal.
        depth: a run has fewer tokens.
        most_cached: outputs of ended requests that are kept, of at most ``MOST_CACHED_TOKENS`` tokens.
        factor: most drafts for each token of the run.
        least_probability: a draft ends before a token that is less likely.
    """

    def __init__(
        self,
        num_tokens: int,
        depth: int = 24,
        most_cached: int = 10_000,
        factor: float = 1.0,
        least_probability: float = 0.1,
        adapts: bool = True,
    ) -> None:
        self.num_tokens, self.adapts = num_tokens, adapts
        self._depth, self._factor, self._least_probability = depth, factor, least_probability
        self._texts: dict[Request, _Text] = {}
        self._outputs = RecentOutputs(most_cached, MOST_CACHED_TOKENS, depth)

    @classmethod
    def of(cls, config: SpeculativeConfig) -> "SuffixDrafter":
        depth, most_cached = config.suffix_decoding_max_tree_depth, config.suffix_decoding_max_cached_requests
        factor, least = config.suffix_decoding_max_spec_factor, config.suffix_decoding_min_token_prob
        assert depth is not None
        assert most_cached is not None
        assert factor is not None
        assert least is not None
        return cls(config.num_tokens, depth, most_cached, factor, least, config.adaptive)

    def propose(self, requests: Sequence[Request], most: Sequence[int]) -> list[list[int]]:
        """As ``DraftSource.propose``."""
        return [self._proposal(request, count) for request, count in zip(requests, most, strict=True)]

    def end(self, request: Request) -> None:
        self._texts.pop(request, None)
        if request.output_token_ids:
            self._outputs.add(request.cache_salt, as_text(request.output_token_ids))

    def most_bytes(self, num_tokens: int) -> int:
        """Bytes of what it keeps for running requests of so many tokens, and of ended outputs, at most."""
        return _BYTES_A_TOKEN * (num_tokens + (MOST_CACHED_TOKENS if self._outputs.most_outputs else 0))

    def text_of(self, request: Request) -> tuple["_Text", str]:
        """Its prompt and output, with all tokens that are known; and those of these that are new."""
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = _Text(as_text(request.prompt_token_ids), self._depth)
        tokens = as_text(request.output_token_ids[text.num_output_tokens :])
        text.add(tokens)
        return text, tokens

    def _proposal(self, request: Request, most: int) -> list[int]:
        (text, tokens), outputs = self.text_of(request), self._outputs.of(request.cache_salt)
        runs = [(text.own, text.places)] if outputs is None else [(text.own, text.places), (text.others, outputs)]
        lost, best = [], _NO_DRAFT
        for run, places in runs:
            if run.moved(places, tokens):
                best = self._best(run, places, text, most, best)
            else:
                lost.append((run, places))
        for run, places in lost:
            if best.score < most:
                text.enter()
                run.length, run.places = places.longest(text.last())
                best = self._best(run, places, text, most, best)
        return as_tokens(best.tokens)

    def _best(self, run: "Run", places: "SortedPlaces", text: "_Text", most: int, best: "Draft") -> "Draft":
        """The best draft of ``best`` and those after ``run`` and shorter ones that ``places`` have."""
        length, found, factor = run.length, run.places, 1
        # A run of n tokens gives at most n x factor drafts, each of probability 1 at most. A shorter one is looked for
        # where it may give twice as many as are known.
        while length > 0 and (count := min(most, int(length * self._factor))) > factor * best.score:
            if factor > 1:
                text.enter()
                found = places.find(text.last()[:length])
            draft = _likeliest(places.after(found, count), self._least_probability)
            if draft.score > best.score:
                best = draft
            length, factor = length // 2, 2
        return best


class Draft(NamedTuple):
    """A draft, and the sum of the probabilities that its first token, its first two... are right, as counted."""

    tokens: str
    score: float


_NO_DRAFT = Draft("", 0.0)


def _likeliest(followers: list[str], least_probability: float) -> Draft:
    """Token by token the one that most of ``followers`` have, of equally frequent ones that of the first."""
    if followers and followers.count(followers[0]) == len(followers):
        return Draft(followers[0], float(len(followers[0])))
    tokens, probability, score = "", 1.0, 0.0
    while followers:
        place = len(tokens)
        if len(followers) == 1:
            tokens, score = followers[0], score + probability * (len(followers[0]) - place)
            break
        column = [text[place] for text in followers if len(text) > place]
        if not column:
            break
        token = column[0]
        if column.count(token) < len(followers):
            token = max(column, key=column.count)
            probability *= column.count(token) / len(followers)
            if probability < least_probability:
                break
            followers = [text for text in followers if text.startswith(token, place)]
        tokens += token
        score += probability
    return Draft(tokens, score)


class SortedPlaces:
    """Places in texts, sorted by the tokens before them, backwards: in blocks, so that adding one moves few others.

    Keys and places are plain str and int, which Python's garbage collector does not look at.

    Args:
        depth: as in ``SuffixDrafter``: a key has at most one token less.

    Attributes:
        texts: by their numbers. What is taken out of it is not found any more.
    """

    def __init__(self, depth: int, text: str = "") -> None:
        self.texts: dict[int, str] = {0: text}
        self._depth = depth
        keys = _keys(text, depth)
        order = sorted(range(len(keys)), key=keys.__getitem__)
        starts = range(0, max(1, len(order)), _BLOCK)
        # Of each block: of each place, the tokens before it, the last one first.
        self._keys = [[keys[i] for i in order[start : start + _BLOCK]] for start in starts]
        # And which token stands there: ``text number << _INDEX_BITS | index``.
        self._places = [[i + 1 for i in order[start : start + _BLOCK]] for start in starts]
        self._lasts = [block[-1] if block else "" for block in self._keys]  # the last key of each block
        self._next_cleared = 0

    def add(self, number: int, start: int, end: int) -> None:
        """The places ``start..end - 1`` of a text."""
        depth, tokens, lasts, code = self._depth, self.texts[number], self._lasts, number << _INDEX_BITS
        for index in range(start, end):
            key = tokens[max(0, index - depth + 1) : index][::-1]
            block = bisect_left(lasts, key)
            if block == len(lasts):
                block -= 1
                lasts[block] = key
            keys = self._keys[block]
            place = bisect_left(keys, key)
            keys.insert(place, key)
            self._places[block].insert(place, code | index)
            if len(keys) > 2 * _BLOCK:
                self._split(block)

    def clear(self, count: int) -> None:
        """Take the places of texts that are gone out of the next blocks, of some ``count`` places, in turn."""
        for _ in range(min(len(self._keys), -(-count // _BLOCK))):
            block = self._next_cleared = (self._next_cleared + 1) % len(self._keys)
            keys, places, texts = self._keys[block], self._places[block], self.texts
            left = [i for i, place in enumerate(places) if place >> _INDEX_BITS in texts]
            if len(left) < len(keys):
                self._keys[block], self._places[block] = [keys[i] for i in left], [places[i] for i in left]
            if left:
                self._lasts[block] = self._keys[block][-1]
            elif len(self._keys) > 1:
                del self._keys[block], self._places[block], self._lasts[block]
                self._next_cleared -= 1

    def longest(self, last: str) -> tuple[int, list[int]]:
        """How many of the tokens of ``last`` some place has before it, from the first on; such places, newest first.

        Of more than ``_MOST_PLACES`` those that have the most in common with all of ``last``.
        """
        block = min(bisect_left(self._lasts, last), len(self._lasts) - 1)
        keys, places = self._keys[block], self._places[block]
        end = bisect_left(keys, last)
        if not end and block:  # the one before is the last one of another block
            keys, places = self._keys[block - 1] + keys, self._places[block - 1] + places
            end = len(self._keys[block - 1])
        length = _common(last, keys[end - 1]) if end else 0
        if end < len(keys) and (not length or keys[end].startswith(last[:length])):
            length = max(length, _common(last, keys[end]))
        if not length:
            return 0, []
        run = last[:length]
        end = bisect_left(keys, run + LAST, end, min(len(keys), end + _MOST_PLACES // 2))
        first = bisect_left(keys, run, max(0, end - _MOST_PLACES), end)
        return length, sorted(places[first:end], reverse=True)

    def find(self, run: str) -> list[int]:
        """Places with ``run`` before them, newest first, at most ``_MOST_PLACES``; of one block."""
        block = min(bisect_left(self._lasts, run), len(self._lasts) - 1)
        following = self._keys[block + 1] if block + 1 < len(self._keys) else []
        if following and following[0].startswith(run):  # perhaps all of it
            block += 1
        keys = self._keys[block]
        first = bisect_left(keys, run)
        end = bisect_left(keys, run + LAST, first)
        step = max(1, -(-(end - first) // _MOST_PLACES))
        return sorted(self._places[block][first:end:step], reverse=True)

    def after(self, places: Sequence[int], count: int) -> list[str]:
        """Up to ``count`` tokens at each of ``places``, of texts that are there."""
        texts, found = self.texts, []
        for place in places:
            text = texts.get(place >> _INDEX_BITS)
            if text is not None:
                index = place & _INDEX_MASK
                found.append(text[index : index + count])
        return found

    def _split(self, block: int) -> None:
        """Make two blocks of one."""
        keys, places = self._keys[block], self._places[block]
        self._keys[block : block + 1] = [keys[:_BLOCK], keys[_BLOCK:]]
        self._places[block : block + 1] = [places[:_BLOCK], places[_BLOCK:]]
        self._lasts.insert(block, keys[_BLOCK - 1])


def _keys(text: str, depth: int) -> list[str]:
    """Of each place of a text but the first: the tokens before it, backwards, at most ``depth - 1``."""
    backwards, end = text[::-1], len(text)
    return [backwards[end - index : end - index + depth - 1] for index in range(1, end)]


def _common(one: str, other: str) -> int:
    """How many characters two texts have in common at their beginning."""
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


class Run:
    """The longest run of last tokens that a list has, and the places after it.

    Attributes:
        list: whose places these are; None: of nothing yet.
    """

    __slots__ = ("length", "list", "places")

    def __init__(self) -> None:
        self.list: SortedPlaces | None = None
        self.length = 0
        self.places: list[int] = []

    def moved(self, places: SortedPlaces, tokens: str) -> bool:
        """Go on by ``tokens``, the last ones. False: no known place has them, and ``places`` are to be searched."""
        if places is not self.list:
            self.list, self.places = places, []
            return False
        if not self.places:
            return False
        count, texts, found = len(tokens), places.texts, list[int]()
        for place in self.places:
            text, index = texts.get(place >> _INDEX_BITS), place & _INDEX_MASK
            if text is not None and text.startswith(tokens, index) and index + count < len(text):
                found.append(place + count)
        # Of many places only some were known: another one may have the longer run.
        if len(found) < len(self.places) == _MOST_PLACES:
            found = []
        self.length, self.places = self.length + count, found
        return bool(found)


class _Text:
    """One request's prompt and output, and their places.

    Attributes:
        own, others: the longest runs that it and recent outputs have.
    """

    def __init__(self, prompt: str, depth: int) -> None:
        self.num_output_tokens, self._depth = 0, depth
        self.places, self._num_entered = SortedPlaces(depth, prompt), len(prompt)
        self.own, self.others = Run(), Run()

    def add(self, tokens: str) -> None:
        """More of the output."""
        if tokens:
            self.places.texts[0] += tokens
            self.num_output_tokens += len(tokens)

    def enter(self) -> None:
        """Have all places found. A place is entered once it has a token."""
        end = len(self.places.texts[0])
        self.places.add(0, self._num_entered, end)
        self._num_entered = end

    def last(self) -> str:
        """The last tokens, backwards: one less than the depth."""
        return self.places.texts[0][: -self._depth : -1]


class RecentOutputs:
    """Outputs of ended requests, each salt's apart; the oldest are dropped.

    Args:
        most_outputs, most_tokens: that are kept, all salts together.

    Attributes:
        num_tokens: that are kept.
    """

    def __init__(self, most_outputs: int, most_tokens: int, depth: int) -> None:
        self.most_outputs, self._most_tokens, self._depth = most_outputs, most_tokens, depth
        self._kept: deque[tuple[str, int, int]] = deque()  # (salt, number, tokens), oldest first
        self._places: dict[str, SortedPlaces] = {}
        self._num_added = 0
        self.num_tokens = 0

    def of(self, salt: str) -> SortedPlaces | None:
        """The places of the outputs of requests with this salt."""
        return self._places.get(salt)

    def add(self, salt: str, text: str) -> None:
        """Keep the output of a request that has ended."""
        text = text[-self._most_tokens :]
        if self.most_outputs == 0 or len(text) < 2:
            return
        if salt not in self._places:
            self._places[salt] = SortedPlaces(self._depth)
            del self._places[salt].texts[0]
        self._num_added += 1
        places, number = self._places[salt], self._num_added
        places.texts[number] = text
        places.add(number, 1, len(text))
        # Twice as fast as places come: at most half of them are of dropped outputs.
        places.clear(2 * len(text))
        self._kept.append((salt, number, len(text)))
        self.num_tokens += len(text)
        while len(self._kept) > self.most_outputs or self.num_tokens > self._most_tokens:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        """It is not found any more; its places go in time."""
        salt, number, length = self._kept.popleft()
        self.num_tokens -= length
        texts = self._places[salt].texts
        del texts[number]
        if not texts:
            del self._places[salt]
