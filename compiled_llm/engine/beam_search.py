"""Beam search over the engine's own steps: each beam is a request of one token that forks the blocks of its parent.

The rules are those of transformers' ``generate(num_beams=...)`` with its defaults, so that the two give the same beams:
of all continuations of all beams the likeliest are considered, twice as many as there are beams (or once more for each
end-of-text id); those that end there are kept with their score, if they are among the first ``beam_width``; the
others go on. It is over when ``beam_width`` have ended and no running one scores above the worst of them, or at
``max_tokens``.

    score = (sum of log-probabilities) / (number of tokens) ** length_penalty
"""

import dataclasses
import math
import time
from collections.abc import Sequence

from compiled_llm.api.outputs import CompletionOutput, RequestMetrics, RequestOutput
from compiled_llm.api.readable import shown
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.engine.admission import PreparedRequest
from compiled_llm.scheduling.request import Request, RequestId
from compiled_llm.text.output_text import OutputText
from compiled_llm.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Beam:
    """A continuation: the tokens after the prompt, and the sum of their log-probabilities."""

    token_ids: tuple[int, ...]
    logprob: float
    parent: Request | None = None  # that computed all of it but the last token


@dataclasses.dataclass(frozen=True)
class EndedBeam:
    beam: Beam
    score: float
    finish_reason: str


class BeamGroup:
    """The beams of one prompt: it gives requests to serve, and is given the likeliest tokens of each."""

    def __init__(
        self,
        request_id: str,
        prepared: PreparedRequest,
        beam_width: int,
        length_penalty: float,
        eos_token_ids: Sequence[int],
    ) -> None:
        self.request_id = request_id
        self.count = continuations(beam_width, eos_token_ids)
        self.requests: list[Request] = []  # one for each running beam
        self.failure: str | None = None
        self._prompt, self._prompt_token_ids, self._cache_salt = prepared.prompt
        self._adapter = prepared.adapter  # held as long as its beams may run
        self._beam_width, self._max_tokens = beam_width, prepared.max_num_tokens - len(self._prompt_token_ids)
        self._length_penalty, self._eos_token_ids = length_penalty, frozenset(eos_token_ids)
        self._params = SamplingParams(temperature=0, max_tokens=1, logprobs=self.count)
        self._running = [Beam((), 0.0)]
        self._ended: list[EndedBeam] = []
        self._found: dict[Request, list[tuple[int, float]]] = {}
        self._arrival_time = time.monotonic()
        self._num_requests = 0

    def start(self) -> Request:
        """The first request: the prompt."""
        self.requests = [self._request(self._running[0])]
        return self.requests[0]

    def take(self, request: Request, token_ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """The ``count`` likeliest tokens after a running beam, and their log-probabilities."""
        self._found[request] = list(zip(token_ids[: self.count], logprobs[: self.count], strict=True))

    @property
    def has_all(self) -> bool:
        """Whether the continuations of all running beams are in."""
        return len(self._found) == len(self.requests)

    def advance(self) -> list[tuple[Request, Request]]:
        """All are in: choose who ends and who goes on. Returns (parent, child) requests; none when it is over."""
        candidates = [
            Beam((*beam.token_ids, token_id), beam.logprob + logprob, request)
            for beam, request in zip(self._running, self.requests, strict=True)
            for token_id, logprob in self._found[request]
        ]
        candidates.sort(key=lambda beam: -beam.logprob)  # stable, as transformers' flat order is
        candidates = candidates[: self.count]
        length = len(candidates[0].token_ids)
        is_last = length == self._max_tokens
        going_on = [] if is_last else [beam for beam in candidates if not self._is_over(beam)][: self._beam_width]
        for beam in candidates[: self._beam_width]:
            if is_last or self._is_over(beam):
                reason = "stop" if self._is_over(beam) else "length"
                self._ended.append(EndedBeam(beam, beam.logprob / length**self._length_penalty, reason))
        self._ended = sorted(self._ended, key=lambda ended: -ended.score)[: self._beam_width]
        if going_on and len(self._ended) == self._beam_width:
            best_possible = going_on[0].logprob / length**self._length_penalty
            if best_possible <= self._ended[-1].score:
                going_on = []
        self._found = {}
        self._running = going_on
        self.requests = [self._request(beam) for beam in going_on]
        parents = [beam.parent for beam in going_on]
        return [(parent, child) for parent, child in zip(parents, self.requests, strict=True) if parent is not None]

    def output(self, tokenizer: Tokenizer | None) -> RequestOutput:
        """The beams that ended, best first; or the failure."""
        now = time.monotonic()
        if self.failure is not None:
            outputs = [CompletionOutput(0, "", [], finish_reason="error", stop_reason=self.failure)]
        else:
            outputs = [self._completion(index, ended, tokenizer) for index, ended in enumerate(self._ended)]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=list(self._prompt_token_ids),
            outputs=outputs,
            finished=True,
            metrics=RequestMetrics(arrival_time=self._arrival_time, finished_time=now),
        )

    def _completion(self, index: int, ended: EndedBeam, tokenizer: Tokenizer | None) -> CompletionOutput:
        token_ids = list(ended.beam.token_ids)
        text = ""
        if tokenizer is not None:
            decoder = OutputText(tokenizer, self._prompt_token_ids, self._params)
            for token_id in token_ids[: len(token_ids) - (ended.finish_reason == "stop")]:
                decoder.append(token_id)
            decoder.finish()
            text = decoder.take(finished=True)
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=ended.beam.logprob,
            finish_reason=ended.finish_reason,
        )

    def _is_over(self, beam: Beam) -> bool:
        return beam.token_ids[-1] in self._eos_token_ids

    def _request(self, beam: Beam) -> Request:
        token_ids = [*self._prompt_token_ids, *beam.token_ids]
        self._num_requests += 1
        return Request(
            request_id=RequestId(self.request_id, self._num_requests),
            prompt_token_ids=token_ids,
            sampling_params=self._params,
            seed=0,
            stop_token_ids=frozenset(),
            max_num_tokens=len(token_ids) + 1,
            arrival_time=self._arrival_time,
            cache_salt=self._cache_salt,
            adapter="" if self._adapter is None else self._adapter.digest,
            adapter_name="" if self._adapter is None else self._adapter.lora_name,
            keeps_blocks=True,
        )


def continuations(beam_width: int, eos_token_ids: Sequence[int]) -> int:
    """How many continuations of all beams are looked at, so that enough are left if the likeliest end."""
    return max(2, 1 + len(eos_token_ids)) * beam_width


def check_beam_search(
    beam_width: int, max_tokens: int | None, length_penalty: float, eos_token_ids: Sequence[int], max_logprobs: int
) -> None:
    """``ValueError`` for arguments that the search cannot have."""
    most = max_logprobs // continuations(1, eos_token_ids)
    if isinstance(beam_width, bool) or not isinstance(beam_width, int) or not 1 <= beam_width <= most:
        raise ValueError(
            f"beam_width must be an integer from 1 to {most} (the engine's max_logprobs, {max_logprobs}, over "
            f"{continuations(1, eos_token_ids)} continuations for each beam), given {shown(beam_width)}: "
            "raise max_logprobs"
        )
    if max_tokens is not None and (isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 1):
        raise ValueError(f"max_tokens must be an integer of at least 1, or None, given {shown(max_tokens)}")
    number = isinstance(length_penalty, int | float) and not isinstance(length_penalty, bool)
    if not number or not math.isfinite(length_penalty) or not -10 <= length_penalty <= 10:
        raise ValueError(f"length_penalty must be a number from -10 to 10, given {shown(length_penalty)}")
