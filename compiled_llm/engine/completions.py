"""UserRequest: a request as its user sees it, with its continuations, their text and log-probabilities."""

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from compiled_llm.adapters.host_adapters import HeldRequest
from compiled_llm.api.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.constraints.token_masks import TokenMask
from compiled_llm.scheduling.request import Request, Status
from compiled_llm.scheduling.worker import LogprobRow
from compiled_llm.text.output_text import OutputText
from compiled_llm.text.tokenizer import Tokenizer

Logprobs = dict[int, Logprob]
# Tokens whose text nobody sees before the end are decoded so many at a time.
_MOST_UNREAD = 64


class Completion:
    """One continuation: its request in the scheduler, and what its user sees of it.

    Attributes:
        text: None where nothing is decoded.
        mask: None where every token may follow.
        logprobs: of the tokens that were read; None unless asked for.
        last_token_time: as ``StepLog.token_time`` gave it; None before the first token that the log sees.
        num_read: output tokens whose text was read.
        read_at: with how many output tokens ``read_new_tokens`` is to be called, where nobody sees the text before.
        num_shown: tokens that an output had.
    """

    def __init__(self, index: int, request: Request, text: OutputText | None, mask: TokenMask | None) -> None:
        self.index = index
        self.request = request
        self.text = text
        self.mask = mask
        known: list[Logprobs] = [{} for _ in request.output_token_ids]  # by the engine that began the output
        self.logprobs: list[Logprobs] | None = None if request.sampling_params.logprobs is None else known
        self.cumulative_logprob = 0.0
        self.last_token_time: float | None = None
        self.num_read = 0
        self._may_end_anywhere = mask is not None or bool(request.sampling_params.stop)
        self.read_at: float = 0 if self._may_end_anywhere else _MOST_UNREAD if text is not None else math.inf
        self.num_shown = 0
        self._last_output: CompletionOutput | None = None  # unless it was a delta

    @property
    def num_logprobs(self) -> int:
        """How many output tokens have their log-probabilities here."""
        return len(self.logprobs or ())

    def add_logprobs(self, logprobs: Logprobs) -> None:
        """Log-probabilities at the output's next token, which comes first in them."""
        assert self.logprobs is not None
        self.logprobs.append(logprobs)
        self.cumulative_logprob += next(iter(logprobs.values())).logprob

    def drop_logprobs(self, num_tokens: int) -> None:
        """The request's output was cut to ``num_tokens``."""
        while self.num_logprobs > num_tokens:
            assert self.logprobs is not None
            self.cumulative_logprob -= next(iter(self.logprobs.pop().values())).logprob

    def read_new_tokens(self) -> str | None:
        """Decode what came since the last time. Returns the stop string that the text has met, if it has."""
        request, text, params = self.request, self.text, self.request.sampling_params
        failed = request.finish_reason == "error"
        if text is None or (failed and self._may_end_anywhere):
            return None
        token_ids = request.output_token_ids
        if not self._may_end_anywhere:
            self.read_at = len(token_ids) + _MOST_UNREAD
        # The token that ended a request is not text, unless asked for.
        end = len(token_ids) - (request.finish_reason == "stop" and not params.include_stop_str_in_output)
        if end - self.num_read > 1 and not self._may_end_anywhere:
            start, self.num_read = self.num_read, end
            text.extend(token_ids[start:end])
        while self.num_read < end:
            self.num_read += 1
            stop = text.append(token_ids[self.num_read - 1], may_stop=self.num_read > params.min_tokens)
            if stop is not None:
                return stop
        if request.status is not Status.FINISHED or failed:
            return None
        self.num_read = len(token_ids)
        return text.finish()

    def output(self, is_delta: bool) -> CompletionOutput:
        """Its state now; ``is_delta``: with the text, tokens and log-probabilities since the last call alone."""
        request, last, start = self.request, self._last_output, self.num_shown if is_delta else 0
        self.num_shown = len(request.output_token_ids)
        if last and len(last.token_ids) == self.num_shown and last.finish_reason == request.finish_reason:
            return last
        new_text = self.text.take(request.status is Status.FINISHED) if self.text else ""
        has_logprobs = self.logprobs is not None
        output = CompletionOutput(
            self.index,
            last.text + new_text if last else new_text,
            request.output_token_ids[start:],
            self.cumulative_logprob if has_logprobs else None,
            self.logprobs[start:] if self.logprobs is not None else None,
            request.finish_reason,
            request.stop_reason,
        )
        self._last_output = None if is_delta else output
        return output


@dataclasses.dataclass
class UserRequest:
    """A user's request: its completions, the first of which computes the prompt for all.

    Attributes:
        prompt: None when token ids were given.
        prompt_token_ids: a list of the user's own, shared by all outputs of the request; where tokens are scored, also
            the last one, which needs no computing.
        prompt_logprobs: as far as they are computed, and None for tokens at the start whose own are not asked for; None
            unless asked for, and after a delta that has them.
        is_forked: whether the other completions have been started.
        output_kind: that of the outputs, as in ``SamplingParams``.
        adapter: held until the request has ended: until then it may have to be copied to a slot again.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    completions: list[Completion]
    prompt_logprobs: list[Logprobs | None] | None = None
    is_forked: bool = False
    output_kind: str = "cumulative"
    adapter: HeldRequest | None = None
    _last_metrics: tuple[tuple, RequestMetrics] | None = None

    @property
    def waits_for_the_end(self) -> bool:
        """Whether its user sees nothing of it before that, and no other completion waits for the first one."""
        return self.output_kind == "final" and self.is_forked

    @property
    def may_join_deltas(self) -> bool:
        """Whether its next token may be shown with later ones: not the first one, nor beside other continuations."""
        first, *others = self.completions
        return self.output_kind == "delta" and not others and first.num_shown > 0

    @property
    def requests(self) -> list[Request]:
        return [completion.request for completion in self.completions]

    @property
    def is_finished(self) -> bool:
        for completion in self.completions:  # noqa: SIM110 - for each request in each step: a generator takes longer
            if completion.request.status is not Status.FINISHED:
                return False
        return True

    def add_prompt_logprobs(self, first: int, logprobs: Sequence[Logprobs]) -> None:
        """Log-probabilities of the prompt's tokens from ``first`` on; what became known meanwhile stays."""
        assert self.prompt_logprobs is not None
        assert first <= len(self.prompt_logprobs), "log-probabilities of some tokens of the prompt were left out"
        self.prompt_logprobs += logprobs[len(self.prompt_logprobs) - first :]

    def output(self) -> RequestOutput:
        """Its state now, or what is new since the last call, as ``output_kind`` asks."""
        finished, is_delta = self.is_finished, self.output_kind == "delta"
        prompt_logprobs = self.prompt_logprobs
        if prompt_logprobs is not None and len(prompt_logprobs) < len(self.prompt_token_ids):
            prompt_logprobs = None
        elif is_delta:
            self.prompt_logprobs = None
        return RequestOutput(
            self.request_id,
            self.prompt,
            self.prompt_token_ids,
            [completion.output(is_delta) for completion in self.completions],
            finished,
            self._metrics(finished),
            prompt_logprobs,
            max(0, self.completions[0].request.num_cached_tokens),
        )

    def _metrics(self, finished: bool) -> RequestMetrics:
        """The metrics of now: one object from step to step, as long as nothing of it changes."""
        first, *others = (completion.request for completion in self.completions)
        counts = first.num_preemptions, first.num_recomputed_tokens, first.num_swapped_tokens
        end = first.finished_time if finished else None
        for request in others:
            own = request.num_preemptions, request.num_recomputed_tokens, request.num_swapped_tokens
            counts = counts[0] + own[0], counts[1] + own[1], counts[2] + own[2]
            if end is not None and request.finished_time is not None:
                end = max(end, request.finished_time)
        values = first.arrival_time, first.first_scheduled_time, first.first_token_time, end, *counts
        if self._last_metrics is None or self._last_metrics[0] != values:
            self._last_metrics = values, RequestMetrics(*values)
        return self._last_metrics[1]


class LogprobReader:
    """Rows of log-probabilities, from the device, as the user reads them. ``None`` as tokenizer: no text of tokens."""

    def __init__(self, tokenizer: Tokenizer | None, max_logprobs: int) -> None:
        self._tokenizer = tokenizer
        self._max_logprobs = max_logprobs

    def read(self, row: LogprobRow, token_id: int, wanted: int, has_text: bool = True) -> Logprobs:
        """The token itself first, then the ``wanted`` most likely ones (-1: as many as there are).

        Args:
            row: log-probability and rank of the token; log-probabilities and ids of the most likely ones, falling.
            has_text: whether the tokens are decoded.
        """
        logprob, rank, top_logprobs, top_ids = row
        count = self._max_logprobs if wanted < 0 else wanted
        text = self._text if has_text else _no_text
        found = {token_id: Logprob(logprob, rank, text(token_id))}
        place = 0
        for index, (top_id, top_logprob) in enumerate(zip(top_ids[:count], top_logprobs[:count], strict=True)):
            if index == 0 or top_logprob < top_logprobs[index - 1]:
                place = index + 1
            if top_id != token_id:
                found[top_id] = Logprob(top_logprob, place, text(top_id))
        return found

    def _text(self, token_id: int) -> str | None:
        if self._tokenizer is None:
            return None
        try:
            return self._tokenizer.decode([token_id], skip_special_tokens=False)
        except ValueError:  # the library panics at it: that ends no request, of which this may only be an alternative
            return None


def _no_text(token_id: int) -> None:
    return None


def unserved_output(
    request_id: str, prompt: Any, finish_reason: str, stop_reason: str | None = None, n: int = 1
) -> RequestOutput:
    """The output of a request that ended before the engine had it."""
    now = time.monotonic()
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return RequestOutput(
        request_id=request_id,
        prompt=text if isinstance(text, str) else None,
        prompt_token_ids=[],
        outputs=[CompletionOutput(i, "", [], finish_reason=finish_reason, stop_reason=stop_reason) for i in range(n)],
        finished=True,
        metrics=RequestMetrics(arrival_time=now, finished_time=now),
    )
