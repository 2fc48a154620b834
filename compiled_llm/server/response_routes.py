"""The routes for OpenAI's responses: /v1/responses, and those for answers that are stored or under way."""

import secrets
import weakref
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import Response

from compiled_llm.api.readable import shown
from compiled_llm.openai.response_events import ResponseEvents
from compiled_llm.openai.responses import ResponseRequest, read_response
from compiled_llm.server import schemas
from compiled_llm.server.answering import answered, read_body
from compiled_llm.server.errors import ApiError
from compiled_llm.server.event_answer import EventAnswer
from compiled_llm.server.http import JsonResponse
from compiled_llm.server.openapi import described
from compiled_llm.server.response_store import ResponseStore, Stored
from compiled_llm.server.service import Served, Service


def add_responses(app: FastAPI, service: Service) -> None:
    responses = _Responses(service)

    @app.post(
        "/v1/responses", openapi_extra=described(schemas.Response, "ResponseRequest", chunk=schemas.ResponseEvent)
    )
    async def create(request: Request) -> Response:
        """Answer a conversation of items."""
        asked = await read_body(service, request, responses.read)
        model = service.check_model(asked.chat.model)
        return await answered(service, request, asked.chat, lambda served: responses.begin(served, asked, model))

    @app.get("/v1/responses/{response_id}", openapi_extra=described(schemas.Response))
    async def retrieve(response_id: str, request: Request) -> Response:
        """An answer that is stored or under way."""
        if request.query_params.get("stream") == "true":
            raise ApiError(400, "stream must be false: a stored response is given as a whole")
        return JsonResponse(responses.get(response_id))

    @app.delete("/v1/responses/{response_id}", openapi_extra=described(schemas.DeletedResponse))
    async def delete(response_id: str) -> Response:
        """Forget an answer that is stored."""
        responses.delete(response_id)
        return JsonResponse({"id": response_id, "object": "response", "deleted": True})

    @app.post("/v1/responses/{response_id}/cancel", openapi_extra=described(schemas.Response))
    async def cancel(response_id: str) -> Response:
        """End an answer that is under way."""
        return JsonResponse(responses.cancel(response_id))


class _Responses:
    """Answers that are stored or under way."""

    def __init__(self, service: Service) -> None:
        settings = service.settings
        self._service = service
        bounds = settings.max_stored_responses, settings.max_stored_bytes, settings.stored_seconds
        self._store = ResponseStore(*bounds)
        # An answer whose client goes away is dropped, wherever that is seen.
        self._under_way: weakref.WeakValueDictionary[str, EventAnswer] = weakref.WeakValueDictionary()

    def read(self, body: Mapping[str, Any]) -> ResponseRequest:
        """What a body asks for. ``ValueError``: it is wrong; ``ApiError``: the response before it is not stored."""
        earlier_id = body.get("previous_response_id")
        if earlier_id is not None and not isinstance(earlier_id, str):
            raise ApiError(400, f"previous_response_id must be a str, given {shown(earlier_id)}")
        stored = None if earlier_id is None else self._store.get(earlier_id)
        if earlier_id is not None and stored is None:
            text = f"previous_response_id must be that of a response that is stored, given {shown(earlier_id)}"
            raise ApiError(400, text, code="previous_response_not_found")
        return read_response(body, () if stored is None else stored.items)

    def begin(self, served: Served, asked: ResponseRequest, model: str) -> EventAnswer:
        """The answer to a request that the engine is to serve."""
        (prompt,), params = served.prompts, served.params
        response_id = f"resp_{secrets.token_hex(16)}"  # nobody else can guess it
        repeated = {
            **asked.repeated,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "presence_penalty": params.presence_penalty,
            "frequency_penalty": params.frequency_penalty,
        }
        events = ResponseEvents(response_id, model, len(prompt.token_ids), repeated, asked.tools)

        def store(response: dict[str, Any]) -> None:
            if asked.is_stored:
                self._store.put(response_id, Stored(response, [*asked.items, *response["output"]]))

        answer = EventAnswer(served, events, self._service.texts, store)
        self._under_way[response_id] = answer
        return answer

    def get(self, response_id: str) -> dict[str, Any]:
        """``ApiError`` if there is none of that id."""
        stored = self._store.get(response_id)
        if stored is not None:
            return stored.response
        if response_id in self._under_way:
            return self._under_way[response_id].answer
        raise ApiError(404, f"response {response_id:.100} is not stored, or not any more", code="response_not_found")

    def delete(self, response_id: str) -> None:
        """``ApiError`` if none of that id is stored."""
        if not self._store.delete(response_id):
            raise ApiError(404, f"response {response_id:.100} is not stored, or not any more")

    def cancel(self, response_id: str) -> dict[str, Any]:
        """The answer, which ends."""
        response = self.get(response_id)
        if response["status"] != "in_progress":
            given = f"given one that is {response['status']}"
            raise ApiError(400, f"a response must be in progress to be cancelled, {given}")
        answer = self._under_way[response_id]
        response["status"] = "cancelled"  # which the failure of its stream leaves
        answer.ended(response)
        self._service.client.abort(answer.request_ids)
        return response
