"""Routes about the server itself: what it was started with, its tokenizer, and with --dev what changes its state."""

import dataclasses
import importlib.metadata
import platform
from collections.abc import Mapping
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from compiled_llm.api.names import refuse_unknown_fields
from compiled_llm.api.readable import shown
from compiled_llm.api.version import __version__
from compiled_llm.server import schemas
from compiled_llm.server.answering import read_body
from compiled_llm.server.drain_routes import add_drain
from compiled_llm.server.errors import ApiError
from compiled_llm.server.http import JsonResponse
from compiled_llm.server.openapi import ABORT_FIELDS, described
from compiled_llm.server.service import Service
from compiled_llm.server.unread import EngineEndedError

_SECRETS = ("api_key", "ssl_keyfile")
_SIZES = ("capacity", "max_model_len", "max_num_seqs", "vocab_size", "block_size", "num_kv_blocks")
_PACKAGES = ("torch", "transformers", "tokenizers", "fastapi", "uvicorn")


def add_server(app: FastAPI, service: Service) -> None:
    @app.get("/server_info", openapi_extra=described(schemas.ServerInfo))
    async def server_info() -> Response:
        """Arguments of the engine and the server without secrets, sizes that follow from them, and versions."""
        return JsonResponse(_server_info(service))

    @app.get("/tokenizer_info", openapi_extra=described(schemas.TokenizerInfo))
    async def tokenizer_info() -> Response:
        """Names of special tokens, and the chat template, as vLLM has them."""
        _ = service.started
        if service.tokenizer is None:
            raise ApiError(404, "the model has no tokenizer")
        template = service.tokenizer.chat_templates.get("default")
        return JsonResponse({**service.tokenizer.named_tokens, "chat_template": template})

    if service.settings.allow_drain:
        add_drain(app, service)
    if service.settings.dev:
        _add_dev(app, service)


def _server_info(service: Service) -> dict[str, Any]:
    sizes = msgspec.structs.asdict(service.started)
    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    settings = dataclasses.asdict(service.settings)
    return {
        "version": __version__,
        "versions": {"python": platform.python_version(), **versions},
        "models": service.names,
        "engine": dataclasses.asdict(service.client.config),
        "sizes": {name: sizes[name] for name in _SIZES},
        "server": {name: value for name, value in settings.items() if name not in _SECRETS},
    }


def _add_dev(app: FastAPI, service: Service) -> None:
    @app.post("/reset_prefix_cache", openapi_extra=described(schemas.Reset))
    async def reset_prefix_cache() -> Response:
        """Forget cached prompts. 409 while requests are served."""
        _ = service.started
        try:
            await service.client.reset_prefix_cache()
        except RuntimeError as error:
            raise ApiError(409, str(error), {"x-should-retry": "false"}) from error
        except EngineEndedError as error:
            raise ApiError(503, str(error)) from error
        return JsonResponse({"reset": True})

    @app.post("/abort", openapi_extra=described(schemas.Aborted, "AbortRequest"))
    async def abort(request: Request) -> Response:
        """End the request of an id, the answer's header x-request-id, or all of them."""
        name = await read_body(service, request, _aborted)
        found = [one for one in service.client.unfinished if name is None or one.rpartition("-")[0] == name]
        service.client.abort(found)
        return JsonResponse({"aborted": len(found)})


def _aborted(body: Mapping[str, Any]) -> str | None:
    """The name of a request; None: of all. ``ValueError``: the body has neither."""
    refuse_unknown_fields(body, ABORT_FIELDS, {"rid": "give request_id"})
    if body.keys() == {"request_id"} and isinstance(body["request_id"], str):
        return body["request_id"]
    if body == {"abort_all": True}:
        return None
    raise ValueError(f"request_id must be a str, or abort_all true, given {shown(body)}")
