"""What each adapter was used for: requests, tokens, latencies, and its share of the time of steps."""

import dataclasses
from collections import defaultdict
from collections.abc import Sequence

from compiled_llm.report.sample import Sample
from compiled_llm.scheduling.request import Request

_MOST_NAMES = 1024
OTHERS = "(others)"  # those beyond so many
_SAMPLE = 1024  # values of a latency that are kept


class _Use:
    def __init__(self) -> None:
        self.num_requests = self.num_prompt_tokens = self.num_output_tokens = 0
        self.seconds = 0.0
        self.ttft, self.tpot = Sample(_SAMPLE), Sample(_SAMPLE)


@dataclasses.dataclass(frozen=True)
class AdapterReport:
    """What one adapter was used for.

    Attributes:
        name: as requests called it; "": requests without one.
        num_requests: continuations that ended.
        seconds: of the device: each step's time, shared out by the tokens that it computed. share: of all such time.
        ttft, tpot: seconds until the first token, and per token after it: count, mean, p50, p90, p99; None: no value.
    """

    name: str
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    seconds: float
    share: float
    ttft: dict[str, float] | None
    tpot: dict[str, float] | None


class AdapterUse:
    """Counts by the names of adapters; of the first 1,024, and of all others together."""

    def __init__(self) -> None:
        self._uses = defaultdict[str, _Use](_Use)

    def _of(self, request: Request) -> _Use:
        name = request.adapter_name
        if name not in self._uses and len(self._uses) >= _MOST_NAMES:
            name = OTHERS
        return self._uses[name]

    def add_step(self, requests: Sequence[Request], num_tokens: Sequence[int], seconds: float) -> None:
        """A step computed so many tokens of each request."""
        each = seconds / max(1, sum(num_tokens))
        for request, count in zip(requests, num_tokens, strict=True):
            self._of(request).seconds += count * each

    def add_request(self, request: Request, ttft: float | None, tpot: float | None) -> None:
        """A request has ended. None: it is in no latency."""
        use = self._of(request)
        use.num_requests += 1
        use.num_output_tokens += len(request.output_token_ids)
        if request.request_id.number == 0:  # it computed the prompt for all
            use.num_prompt_tokens += len(request.prompt_token_ids)
        for sample, seconds in ((use.ttft, ttft), (use.tpot, tpot)):
            if seconds is not None:
                sample.add(seconds)

    def reports(self) -> tuple[AdapterReport, ...]:
        """Those with the most time first."""
        whole = sum(use.seconds for use in self._uses.values()) or 1.0
        uses = sorted(self._uses.items(), key=lambda item: -item[1].seconds)
        return tuple(
            AdapterReport(
                name, use.num_requests, use.num_prompt_tokens, use.num_output_tokens, use.seconds, use.seconds / whole,
                use.ttft.summary(), use.tpot.summary(),
            )
            for name, use in uses
        )  # fmt: skip
