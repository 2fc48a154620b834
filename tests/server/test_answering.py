"""Requests whose clients go away at moments that a client on this machine does not choose."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request

from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.openai.answers import TokenTexts
from compiled_llm.openai.requests import OpenAIRequest, read_request
from compiled_llm.server.answering import answered
from compiled_llm.server.answers import OpenAIAnswer
from compiled_llm.server.direct_body import EXTENSION
from compiled_llm.server.http import ClientGoneError
from compiled_llm.server.messages import Output, Piece
from compiled_llm.server.metrics import Metrics
from compiled_llm.server.service import Served, ServedPrompt
from compiled_llm.server.settings import ServerSettings
from compiled_llm.server.unread import Unread
from tests.server.test_replicas import STARTED


class EndlessService:
    """A service whose one request never ends by itself. ``unread``: the engine's place for it, None when it has none.

    As engines' clients do, it knows the request until its outputs are closed.
    """

    unread: Unread | None = None

    def __init__(self) -> None:
        self.settings, self.metrics, self.traces = ServerSettings(client_seconds=0.2), Metrics("m"), None
        self.metrics.start(STARTED)

    @contextlib.contextmanager
    def admitted(self, asked: OpenAIRequest) -> Iterator[None]:
        yield

    async def serve(self, asked: OpenAIRequest, request_id: str, deadline: float) -> Served:
        self.unread = Unread()
        prompts = [ServedPrompt("r", "a", [1])]
        return Served(asked, SamplingParams(), None, prompts, self._outputs(), unread=self.unread)

    async def _outputs(self) -> AsyncIterator[Output]:
        try:
            while True:
                yield Output("r", [Piece(0, "b", [2])])
        finally:
            self.unread = None


@pytest.mark.parametrize(("stream", "goes"), [(True, False), (True, True), (False, True)])
def test_the_engine_serves_nobody_who_went_while_no_output_was_awaited(stream: bool, goes: bool) -> None:
    """While an event was being sent, or an answer's parts were made. Or a client does not read, and stays."""
    service, is_there, sent = EndlessService(), asyncio.Event(), list[Any]()

    async def send(message: Any) -> None:
        sent.append(message)
        if len(sent) == 3:
            if goes:
                is_there.set()
            await asyncio.Event().wait()

    async def receive() -> Any:
        await is_there.wait()
        return {"type": "http.disconnect"}

    async def run() -> None:
        facts: dict[str, Any] = {}
        state = {"facts": facts, "request_id": "q", "send": send}
        body = SimpleNamespace(is_writable=False)
        scope = {"type": "http", "headers": [], "state": state, "extensions": {EXTENSION: body}}
        asked = read_request("completion", {"prompt": "a", "stream": stream})

        def make(served: Served) -> OpenAIAnswer:
            return OpenAIAnswer(served, "m", "q", TokenTexts(None))

        if not stream:
            asyncio.get_running_loop().call_later(0.05, is_there.set)
        with contextlib.nullcontext() if stream else pytest.raises(ClientGoneError):
            response = await answered(service, Request(scope, receive), asked, make)  # type: ignore[arg-type]
            await response(scope, receive, send)
        assert service.unread is None, "the engine still serves it"
        assert facts["output_tokens"] >= 2

    asyncio.run(asyncio.wait_for(run(), 30))
