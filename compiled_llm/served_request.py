"""ServedRequest: a request as its user sees it, text and outputs."""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from compiled_llm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from compiled_llm.request import Request, Status
from compiled_llm.tokenizer import OutputText


@dataclasses.dataclass
class ServedRequest:
    """A request and what its user sees of it.

    Attributes:
        prompt_token_ids: a list of the user's own, shared by all outputs of the request.
        text: None where nothing is decoded.
        num_read: output tokens that ``text`` has taken in.
        last_token_time: as ``StepLog.record_token`` gave it; None before the first token that the log sees.
    """

    request: Request
    prompt: str | None
    prompt_token_ids: list[int]
    text: OutputText | None
    num_read: int = 0
    last_token_time: float | None = None

    def read_new_tokens(self) -> str | None:
        """Decode what came since the last time. Returns the stop string that the text has met, if it has."""
        request, text = self.request, self.text
        if text is None or request.finish_reason == "error":
            return None
        token_ids = request.output_token_ids
        # The token that ended a request is not text, unless asked for.
        hides_last = request.finish_reason == "stop" and not request.sampling_params.include_stop_str_in_output
        while self.num_read < len(token_ids) - hides_last:
            self.num_read += 1
            stop = text.append(token_ids[self.num_read - 1])
            if stop is not None:
                return stop
        return text.finish() if request.status is Status.FINISHED else None

    def output(self) -> RequestOutput:
        """Its state now."""
        request = self.request
        finished = request.status is Status.FINISHED
        completion = CompletionOutput(
            index=0,
            text=self.text.text(finished) if self.text else "",
            token_ids=list(request.output_token_ids),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
        )
        metrics = RequestMetrics(
            arrival_time=request.arrival_time,
            first_scheduled_time=request.first_scheduled_time,
            first_token_time=request.first_token_time,
            finished_time=request.finished_time,
            num_preemptions=request.num_preemptions,
            num_recomputed_tokens=request.num_recomputed_tokens,
            num_swapped_tokens=request.num_swapped_tokens,
        )
        return RequestOutput(
            request_id=request.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[completion],
            finished=finished,
            metrics=metrics,
            num_cached_tokens=max(0, request.num_cached_tokens),
        )


def error_output(request_id: str, prompt: Any, reason: str) -> RequestOutput:
    """The output of a request that could not be served."""
    now = time.monotonic()
    text = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
    return RequestOutput(
        request_id=request_id,
        prompt=text if isinstance(text, str) else None,
        prompt_token_ids=[],
        outputs=[CompletionOutput(index=0, text="", token_ids=[], finish_reason="error", stop_reason=reason)],
        finished=True,
        metrics=RequestMetrics(arrival_time=now, finished_time=now),
    )
