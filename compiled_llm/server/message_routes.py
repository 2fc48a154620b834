"""The routes for Anthropic's clients: /v1/messages and /v1/messages/count_tokens."""

from fastapi import FastAPI, Request
from starlette.responses import Response

from compiled_llm.anthropic.events import MessageEvents
from compiled_llm.anthropic.requests import read_message
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.server import schemas
from compiled_llm.server.answering import answered, read_body
from compiled_llm.server.errors import ApiError
from compiled_llm.server.event_answer import EventAnswer
from compiled_llm.server.http import JsonResponse, unless_gone
from compiled_llm.server.openapi import described
from compiled_llm.server.service import Served, Service

_ANSWER = described(schemas.Message, "MessageRequest", chunk=schemas.MessageEvent, error=schemas.MessageError)
_COUNT = described(schemas.MessageTokens, "CountTokensRequest", error=schemas.MessageError)


def add_messages(app: FastAPI, service: Service) -> None:
    @app.post("/v1/messages", openapi_extra=_ANSWER)
    async def messages(request: Request) -> Response:
        """Answer a conversation, as Anthropic does."""
        asked = await read_body(service, request, read_message)
        model = service.check_model(asked.model)

        def make(served: Served) -> EventAnswer:
            (prompt,) = served.prompts
            events = MessageEvents(f"msg_{request.state.request_id}", model, len(prompt.token_ids))
            return EventAnswer(served, events, service.texts)

        return await answered(service, request, asked, make)

    @app.post("/v1/messages/count_tokens", openapi_extra=_COUNT)
    async def count_tokens(request: Request) -> Response:
        """The number of tokens that a message's prompt has."""
        asked = await read_body(service, request, lambda body: read_message(body, counts=True))
        service.check_model(asked.model)
        try:
            (prompt,) = await unless_gone(request.receive, service.encode(asked, SamplingParams()))
        except ValueError as error:
            raise ApiError.of(error) from error
        return JsonResponse({"input_tokens": len(prompt.token_ids)})
