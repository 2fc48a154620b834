"""What the server says of itself, and what only --dev allows."""

import threading

import httpx

from compiled_llm import CompiledEngine
from compiled_llm.api.version import __version__
from tests.server.conftest import Running, running_with
from tests.server.test_manners import LONG, open_request, until


def test_what_the_server_was_started_with(engine: CompiledEngine) -> None:
    with running_with(engine, api_key=("secret",), drain_seconds=7) as running:
        answer = running.http.get("/server_info", headers={"x-api-key": "secret"})
        assert "secret" not in answer.text
        info = answer.json()
        assert (info["version"], info["server"]["drain_seconds"]) == (__version__, 7)
        assert {"python", "torch"} <= info["versions"].keys()
        assert info["sizes"]["max_model_len"] == 512
        assert info["engine"]["max_logprobs"] == 20
        assert "api_key" not in info["server"]
        for path in ("/reset_prefix_cache", "/abort"):
            assert running.http.post(path, headers={"x-api-key": "secret"}).status_code == 404


def test_the_tokenizer(reference: CompiledEngine, running: Running) -> None:
    info = running.http.get("/tokenizer_info").json()
    tokenizer = reference.tokenizer
    assert tokenizer is not None
    assert info == {**tokenizer.named_tokens, "chat_template": tokenizer.chat_templates["default"]}


def test_the_prefix_cache_is_forgotten(engine: CompiledEngine) -> None:
    body = {"prompt": "import os\n" * 40, "max_tokens": 1}
    with running_with(engine, dev=True) as running:

        def cached() -> int:
            usage = running.http.post("/v1/completions", json=body).json()["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"]

        cached()
        assert cached() > 0
        assert running.http.post("/reset_prefix_cache").json() == {"reset": True}
        assert cached() == 0
        with open_request(running, {**LONG, "stream": True}):
            until(lambda: len(engine.scheduler.running) == 1)
            refused = running.http.post("/reset_prefix_cache")
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
            assert running.http.post("/abort", json={"abort_all": True}).json() == {"aborted": 1}
        until(lambda: not engine.scheduler.has_unfinished_requests())


def test_a_request_is_aborted_by_its_name(engine: CompiledEngine) -> None:
    with running_with(engine, dev=True) as running:
        answers: list[httpx.Response] = []

        def ask(name: str) -> None:
            answers.append(running.http.post("/v1/completions", json=LONG, headers={"x-request-id": name}))

        asking = threading.Thread(target=ask, args=("mine",))
        with open_request(running, {**LONG, "stream": True}, b"\r\nx-request-id: other"):
            asking.start()
            until(lambda: len(engine.scheduler.running) == 2)
            assert running.http.post("/abort", json={"request_id": "none"}).json() == {"aborted": 0}
            assert running.http.post("/abort", json={"request_id": "mine"}).json() == {"aborted": 1}
            asking.join()
            assert (answers[0].status_code, answers[0].headers["x-should-retry"]) == (500, "false")
            until(lambda: len(engine.scheduler.running) == 1)
            refused = running.http.post("/abort", json={"rid": "other"})
            assert "give request_id" in refused.json()["error"]["message"]
        until(lambda: not engine.scheduler.has_unfinished_requests())
