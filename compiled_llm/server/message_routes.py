"""The routes for Anthropic's clients: /v1/messages and /v1/messages/count_tokens."""

from fastapi import FastAPI, Request
from starlette.responses import Response

from compiled_llm.anthropic.events import MessageEvents
from compiled_llm.anthropic.requests import read_message
from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.openai.requests import OpenAIRequest
from compiled_llm.server.answering import answered
from compiled_llm.server.errors import ApiError
from compiled_llm.server.event_answer import EventAnswer
from compiled_llm.server.http import JsonResponse, read_json, unless_gone
from compiled_llm.server.openapi import body_of
from compiled_llm.server.service import Served, Service


def add_messages(app: FastAPI, service: Service) -> None:
    async def read(request: Request, counts: bool = False) -> tuple[OpenAIRequest, str]:
        """What a body asks for, and the model's name."""
        _ = service.started  # before a long body is read
        body = await read_json(request, service.settings)
        try:
            asked = read_message(body, counts)
        except ValueError as error:
            raise ApiError.of(error) from error
        return asked, service.check_model(asked.model)

    @app.post("/v1/messages", openapi_extra=body_of("message"))
    async def messages(request: Request) -> Response:
        """Answer a conversation, as Anthropic does."""
        asked, model = await read(request)

        def make(served: Served) -> EventAnswer:
            (prompt,) = served.prompts
            events = MessageEvents(f"msg_{request.state.request_id}", model, len(prompt.token_ids))
            return EventAnswer(served, events, service.texts)

        return await answered(service, request, asked, make)

    @app.post("/v1/messages/count_tokens", openapi_extra=body_of("message"))
    async def count_tokens(request: Request) -> Response:
        """The number of tokens that a message's prompt has."""
        asked, _ = await read(request, counts=True)
        try:
            (prompt,) = await unless_gone(request.receive, service.encode(asked, SamplingParams()))
        except ValueError as error:
            raise ApiError.of(error) from error
        return JsonResponse({"input_tokens": len(prompt.token_ids)})
