"""OutputReader: takes the outputs of a request from the engine's thread to the event loop that reads them."""

import asyncio
import dataclasses
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from threading import Lock

from compiled_llm.api.outputs import RequestOutput
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.text.prompts import Prompt

# Outputs of a request that wait to be read. For a slower reader the newest unread one is replaced, or grows by a delta.
_MAX_UNREAD = 16


class OutputReader:
    """The outputs of one request, for the event loop in which this is made.

    Attributes:
        prompt, n: of the request; None for a chat.
        request_id: None until the engine's thread has set it; only that thread uses it.
        is_dropped: whether its outputs are not read any more.
        news: set when there may be an output to read; in the reader's loop.
    """

    def __init__(self, prompt: Prompt | None, params: SamplingParams | None) -> None:
        self.prompt = prompt
        self.n, self._is_delta = 1, False
        if isinstance(params, SamplingParams):  # others are refused when the request is prepared
            self.n, self._is_delta = params.n, params.output_kind == "delta"
        self.loop = asyncio.get_running_loop()
        self.request_id: str | None = None
        self.is_dropped = False
        self._lock = Lock()
        self._unread: deque[RequestOutput | Exception] = deque()
        self._is_woken = False  # or about to be
        self.news = asyncio.Event()

    def put(self, item: RequestOutput | Exception) -> bool:
        """In any thread: what ``next`` will return, or raise. Returns whether the reader is to be woken."""
        with self._lock:
            if len(self._unread) >= _MAX_UNREAD and isinstance(item, RequestOutput):
                newest = self._unread.pop()
                if self._is_delta and isinstance(newest, RequestOutput):
                    item = _joined(newest, item)
            self._unread.append(item)
            wakes, self._is_woken = not self._is_woken, True
        return wakes

    async def next(self) -> RequestOutput:
        """The oldest output that is unread."""
        while True:
            with self._lock:
                if self._unread:
                    item = self._unread.popleft()
                    break
                self._is_woken = False
                self.news.clear()
            await self.news.wait()
        if isinstance(item, Exception):
            raise item
        return item


def hand_out(items: Sequence[tuple[OutputReader, RequestOutput | Exception]]) -> None:
    """Each to its reader; one call wakes all readers of a loop."""
    waking: dict[asyncio.AbstractEventLoop, list[OutputReader]] = {}
    for reader, item in items:
        if reader.put(item):
            waking.setdefault(reader.loop, []).append(reader)
    for loop, readers in waking.items():
        with suppress(RuntimeError):  # the loop was closed: its readers are gone
            loop.call_soon_threadsafe(_wake, readers)


def _wake(readers: Sequence[OutputReader]) -> None:
    """In their loop."""
    for reader in readers:
        reader.news.set()


def _joined(earlier: RequestOutput, later: RequestOutput) -> RequestOutput:
    """Two deltas as one. The lists of ``earlier``, which is not read yet, become those of the result."""
    outputs = []
    for first, second in zip(earlier.outputs, later.outputs, strict=True):
        first.token_ids.extend(second.token_ids)
        if first.logprobs is not None:
            first.logprobs.extend(second.logprobs or ())
        text = first.text + second.text
        outputs.append(dataclasses.replace(second, text=text, token_ids=first.token_ids, logprobs=first.logprobs))
    return dataclasses.replace(later, outputs=outputs, prompt_logprobs=earlier.prompt_logprobs)
