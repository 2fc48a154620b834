"""A conversation with a server: what it is asked, what is kept of its answers, and what is told when it fails."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from compiled_llm.terminal.server_client import ServerClient
from compiled_llm.terminal.server_conversation import ServerConversation
from tests.scripted_server import END, SSE, Script, chat, chunked, events, json_answer

MODELS = {"data": [{"id": "first", "max_model_len": 50}, {"id": "second"}]}
USAGE = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}


def end(reason: str) -> dict[str, Any]:
    return {"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]}


def talk(
    script: Callable[..., Script], *answers: bytes, model: str | None = None, **sampling: Any
) -> tuple[ServerConversation, Script, list[str]]:
    rest, written = iter(answers), list[str]()

    def answer(path: str, body: dict[str, Any]) -> Iterator[bytes]:
        yield json_answer(MODELS) if path == "/v1/models" else next(rest)

    server = script(answer)
    client = ServerClient(f"{server.url}/v1/", "key")
    return ServerConversation(client, model, sampling, written.append, "be brief"), server, written


def streamed(*given: dict[str, Any]) -> bytes:
    return SSE + chunked(events(*given, {"choices": [], "usage": USAGE})) + END


def test_what_is_asked_and_kept(script: Callable[..., Script]) -> None:
    first = streamed(
        chat(role="assistant"), chat(reasoning="hm. "), chat(content="Yes"), chat(content="."), end("stop")
    )
    second = streamed(chat(content="No"), end("length"))
    conversation, server, written = talk(script, first, second, second, temperature=0.5)
    assert conversation.say("well?") is None
    assert "".join(written) == "hm. Yes.\n", "thoughts are shown"
    assert conversation.messages[1] == {"role": "assistant", "content": "Yes."}, "and not kept"
    assert conversation.last is not None
    assert conversation.last.summary.startswith("3 tokens in ")
    assert conversation.last.summary.endswith("9 tokens of prompt, 4 of them cached")
    assert conversation.size() == "12 of 50 tokens"
    conversation.set("max_tokens", 3)
    assert conversation.say("sure?") == "cut at max_tokens=3: /set max_tokens 6, then /retry"
    conversation.set("max_tokens", 20)
    assert conversation.retry() == "the model's context is full: /clear begins anew, /save FILE keeps what was said"
    path, head, body = server.requests[-1]
    assert (path, "Authorization: Bearer key" in head) == ("/v1/chat/completions", True)
    assert body == {
        "model": "first",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "well?"},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": "sure?"},
        ],
        "temperature": 0.5,
        "max_tokens": 20,
        "stream_options": {"include_usage": True},
        "stream": True,
    }


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        (
            b"HTTP/1.1 404 No\r\nContent-Length: 31\r\n\r\n" + b'{"error": {"message": "no such"}}'[:31],
            ValueError,
            "404",
        ),
        (SSE + chunked(events(chat(content="a"), {"error": {"message": "broke"}})) + END, ValueError, "broke"),
        (SSE + b"1", OSError, "ended the answer"),
        (b"", OSError, "does not answer"),
    ],
)
def test_a_message_that_fails_is_not_kept(
    script: Callable[..., Script], answer: bytes, error: type[Exception], said: str
) -> None:
    def answered(path: str, body: dict[str, Any]) -> Iterator[bytes]:
        yield json_answer(MODELS) if path == "/v1/models" else answer
        if path != "/v1/models":
            raise ConnectionAbortedError  # which closes it

    server = script(answered)
    server.handle_error = lambda *given: None  # type: ignore[method-assign]
    conversation = ServerConversation(ServerClient(server.url), "second", {}, lambda piece: None)
    with pytest.raises(error, match=said):
        conversation.say("well?")
    assert conversation.messages == []


def test_ctrl_c_keeps_what_came_and_closes_the_connection(script: Callable[..., Script]) -> None:
    closed = threading.Event()

    def answer(path: str, body: dict[str, Any]) -> Iterator[bytes]:
        if path == "/v1/models":
            yield json_answer(MODELS)
            return
        yield SSE
        try:
            while True:
                yield chunked(events(chat(content="on "), done=False))
        finally:  # nothing more can be written
            closed.set()

    server = script(answer)
    server.handle_error = lambda *given: None  # type: ignore[method-assign]

    pieces: list[str] = []

    def write(piece: str) -> None:
        pieces.append(piece)
        if len(pieces) == 3:
            raise KeyboardInterrupt

    conversation = ServerConversation(ServerClient(server.url), None, {}, write)
    assert (conversation.say("go") or "").startswith("stopped; what came of the answer stays")
    assert conversation.messages[1]["content"] == "on on on "
    assert conversation.last is not None
    assert conversation.last.summary == "stopped before the server had counted its tokens"
    assert closed.wait(30), "the server sees that nobody reads"


def test_a_model_that_it_does_not_serve(script: Callable[..., Script]) -> None:
    with pytest.raises(ValueError, match="first, second, given other"):
        talk(script, model="other")
    with pytest.raises(OSError, match="no list of models"):
        ServerClient(script(lambda path, body: iter([json_answer([])])).url).models()
