"""The routes with which clients load and unload adapters, as vLLM has them; for --allow-lora-updates."""

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import PlainTextResponse, Response

from compiled_llm.api.lora_request import LoRAModule, LoRARequest
from compiled_llm.api.names import refuse_unknown_fields
from compiled_llm.api.readable import shown
from compiled_llm.server.answering import read_body
from compiled_llm.server.errors import ApiError
from compiled_llm.server.openapi import LOAD_FIELDS, UNLOAD_FIELDS, described
from compiled_llm.server.service import Service
from compiled_llm.server.unread import EngineEndedError


def add_adapters(app: FastAPI, service: Service) -> None:
    @app.post("/v1/load_lora_adapter", openapi_extra=described(str, "LoadAdapterRequest"))
    async def load(request: Request) -> Response:
        """Serve an adapter of this machine's disk from now on, under a name that clients give as their model."""
        module, in_place = await read_body(service, request, _loaded)
        name = module.lora_request.lora_name
        try:
            await service.adapters.load(module, in_place)
        except FileNotFoundError as error:
            raise ApiError(404, str(error)) from error
        except ValueError as error:
            raise ApiError.of(error) from error
        except EngineEndedError as error:
            raise ApiError(503, str(error)) from error
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    @app.post("/v1/unload_lora_adapter", openapi_extra=described(str, "UnloadAdapterRequest"))
    async def unload(request: Request) -> Response:
        """Serve an adapter no more. Requests that have it already are answered."""
        name = await read_body(service, request, _unloaded)
        try:
            service.adapters.unload(name)
        except KeyError:
            raise ApiError(404, f"adapter {name:.200} is not served here", code="model_not_found") from None
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _loaded(body: Mapping[str, Any]) -> tuple[LoRAModule, bool]:
    """An adapter, and whether it may replace one. ``ValueError``: the body gives none."""
    body = {name: value for name, value in body.items() if value is not None}
    refuse_unknown_fields(body, LOAD_FIELDS, {})
    in_place, base = body.get("load_inplace", False), body.get("base_model_name")
    if not isinstance(in_place, bool):
        raise ValueError(f"load_inplace must be true or false, given {shown(in_place)}")
    if base is not None and not isinstance(base, str):
        raise ValueError(f"base_model_name must be a str, given {shown(base)}")
    return LoRAModule(LoRARequest(body.get("lora_name", ""), body.get("lora_path", "")), base), in_place


def _unloaded(body: Mapping[str, Any]) -> str:
    """The name of an adapter. ``lora_int_id``, a number that vLLM knows it by, says nothing here."""
    refuse_unknown_fields(body, UNLOAD_FIELDS, {})
    name = body.get("lora_name")
    if not isinstance(name, str):
        raise ValueError(f"lora_name must be a str, given {shown(name)}")
    return name
