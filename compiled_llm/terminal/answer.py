"""Answer: the continuations of one request, printed one after the other while they come."""

import time
from collections.abc import Callable

from compiled_llm.api.outputs import RequestMetrics, RequestOutput


class Answer:
    """What came of a request so far. Of several continuations the first is printed as it comes, then the next.

    Args:
        write: gets each piece of text to print.
        count: continuations that were asked for; above 1 each gets a line with its number.

    Attributes:
        texts: of each continuation.
        ends: ``finish_reason`` and ``stop_reason`` of each continuation that has ended.
        num_tokens: generated, of all continuations.
        num_prompt_tokens, num_cached_tokens: of the prompt, and those of them that the prefix cache held.
    """

    def __init__(self, write: Callable[[str], object], count: int = 1) -> None:
        self._write = write
        self._current = 0  # the continuation that is printed
        self._num_printed = 0  # characters of it
        self.texts = [""] * count
        self.ends: dict[int, tuple[str, int | str | None]] = {}
        self.num_tokens = self.num_prompt_tokens = self.num_cached_tokens = 0
        self._metrics: RequestMetrics | None = None
        self._last_time = 0.0  # when the last output came, on the clock of the metrics

    def take(self, output: RequestOutput) -> None:
        """Add an output of kind "delta", and print what may be printed."""
        self._metrics, self._last_time = output.metrics, time.monotonic()
        self.num_prompt_tokens, self.num_cached_tokens = len(output.prompt_token_ids), output.num_cached_tokens
        for completion in output.outputs:
            self.texts[completion.index] += completion.text
            self.num_tokens += len(completion.token_ids)
            if completion.finish_reason is not None:
                self.ends[completion.index] = completion.finish_reason, completion.stop_reason
        self._print()

    def _print(self) -> None:
        while self._current < len(self.texts):
            self._print_current()
            if self._current not in self.ends:
                break
            self.end_line()
            self._current, self._num_printed = self._current + 1, 0

    def _print_current(self) -> None:
        text = self.texts[self._current]
        if len(self.texts) > 1 and not self._num_printed and (text or self._current in self.ends):
            self._write(f"--- {self._current + 1} of {len(self.texts)} ---\n")
        if len(text) > self._num_printed:
            self._write(text[self._num_printed :])
            self._num_printed = len(text)

    def end_line(self) -> None:
        """End the line of the continuation that is printed, also of one that is cut off."""
        if self._current < len(self.texts) and not self.texts[self._current].endswith("\n"):
            self._write("\n")

    @property
    def said(self) -> str:
        """What stays in a conversation."""
        return self.texts[0]

    @property
    def error(self) -> str | None:
        """Why a continuation failed; None if none did."""
        return next((str(why) for reason, why in self.ends.values() if reason == "error"), None)

    @property
    def summary(self) -> str:
        """Tokens, seconds and tokens a second, in a line."""
        metrics = self._metrics
        if metrics is None or metrics.first_token_time is None:
            return "no token"
        seconds = (metrics.finished_time or self._last_time) - metrics.arrival_time
        first = metrics.first_token_time - metrics.arrival_time
        cached = f", {self.num_cached_tokens} of them cached" if self.num_cached_tokens else ""
        return (
            f"{self.num_tokens} tokens in {seconds:.2f} s, {self.num_tokens / max(seconds, 1e-9):.1f} tokens/s, "
            f"the first after {first:.2f} s; {self.num_prompt_tokens} tokens of prompt{cached}"
        )
