"""/openapi.json: what is answered is what it describes, and bodies that work are allowed by it."""

from typing import Any

import jsonschema
import msgspec
import pytest

from compiled_llm.server import schemas
from tests.server.conftest import Running
from tests.server.test_manners import events
from tests.server.test_openai import CHAT

BODIES: list[tuple[str, Any, Any, dict[str, Any]]] = [
    ("/v1/completions", schemas.Completion, schemas.CompletionChunk, {"prompt": ["a", [1, 2]]}),
    ("/v1/completions", schemas.Completion, schemas.CompletionChunk,
     {"prompt": "import os", "echo": True, "logprobs": 2, "n": 2, "return_token_ids": True}),
    ("/v1/completions", schemas.Completion, schemas.CompletionChunk,
     {"prompt": "import os", "prompt_logprobs": 1, "stop": ["a"], "logit_bias": {"5": -100}, "model": None}),
    ("/v1/chat/completions", schemas.ChatCompletion, schemas.ChatCompletionChunk, {"messages": CHAT, "max_tokens": 5}),
    ("/v1/chat/completions", schemas.ChatCompletion, schemas.ChatCompletionChunk,
     {"messages": CHAT, "max_tokens": 5, "logprobs": True, "top_logprobs": 2, "return_token_ids": True,
      "prompt_logprobs": 0}),
    ("/v1/chat/completions", schemas.ChatCompletion, schemas.ChatCompletionChunk,
     {"messages": CHAT, "response_format": {"type": "json_object"}, "max_completion_tokens": 5, "user": "me"}),
    ("/tokenize", schemas.Tokens, None, {"prompt": "a", "return_token_strs": True}),
    ("/tokenize", schemas.Tokens, None, {"messages": CHAT}),
    ("/detokenize", schemas.Text, None, {"tokens": [1, 2]}),
]  # fmt: skip


@pytest.fixture(scope="module")
def document(running: Running) -> Any:
    return running.http.get("/openapi.json").json()


def check_allowed(document: dict[str, Any], path: str, body: dict[str, Any]) -> None:
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    jsonschema.Draft202012Validator({**content["schema"], "components": document["components"]}).validate(body)


@pytest.mark.parametrize(("path", "answer", "chunk", "body"), BODIES)
def test_answers_are_as_described(
    path: str, answer: Any, chunk: Any, body: dict[str, Any], document: Any, running: Running
) -> None:
    check_allowed(document, path, body)
    assert document["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"] == {
        "$ref": f"#/components/schemas/{answer.__name__}"
    }
    msgspec.convert(running.http.post(path, json=body).json(), answer)
    if chunk is not None:
        body = {**body, "stream": True, "stream_options": {"continuous_usage_stats": True}}
        check_allowed(document, path, body)
        msgspec.convert(events(running.http.post(path, json=body).text), list[chunk])


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/compiled-llm-demo", "/health", "/version", "/load"])
def test_so_are_states(path: str, running: Running) -> None:
    kinds = {"models": schemas.Models, "compiled-llm-demo": schemas.Model, "health": schemas.State,
             "version": schemas.Version, "load": schemas.Load}  # fmt: skip
    msgspec.convert(running.http.get(path).json(), kinds[path.rpartition("/")[2]])


@pytest.mark.parametrize(
    "body",
    [
        *({"prompt": prompt} for prompt in ("", [], [[]], [1.5], 7, None)),
        *({"prompt": "a", "temperature": value} for value in ("1", -1, 101)),
        *({"prompt": "a", "top_p": value} for value in (0, 1.1)),
        *({"prompt": "a", name: 1} for name in ("stream", "stop", "echo", "logit_bias", "suffix", "unknown")),
        {"prompt": "a", "stream": True, "stream_options": {"usage": True}},
        {"prompt": "a", "structured_outputs": {"regexp": "a"}},
    ],
)
def test_what_it_forbids_is_refused(body: dict[str, Any], document: Any, running: Running) -> None:
    with pytest.raises(jsonschema.ValidationError):
        check_allowed(document, "/v1/completions", body)
    refused = running.http.post("/v1/completions", json=body)
    assert refused.status_code == 400
    msgspec.convert(refused.json(), schemas.Error)
