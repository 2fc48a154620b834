"""The client of ``bench serve``, against a server that says exactly what a test tells it to."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from compiled_llm.__main__ import main
from compiled_llm.bench.http_load import Target, drive
from tests.scripted_server import END, SSE, Script, chat, chunked, completion, events, json_answer

USAGE = {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}


def send(server: Script, count: int = 1, **options: Any) -> Any:
    target = Target.of(f"{server.url}/v1/completions", ["Authorization: Bearer k"])
    return drive(target, [b'{"n": 1}'] * count, [0.0] * count, **options)


LINES = b": a comment\r\n\r\n" + events(
    completion("a"), completion("bé"), completion(None), completion("c"), {"choices": [], "usage": USAGE}
)


@pytest.mark.parametrize("size", [1, 7, 64, len(LINES)])
def test_tokens_are_those_of_the_usage_and_times_those_of_events_with_text(
    script: Callable[..., Script], size: int
) -> None:
    """However the bytes are cut. One connection serves all requests that come one after the other."""
    pieces = [chunked(LINES[start : start + size]) for start in range(0, len(LINES), size)]
    server = script(lambda path, body: iter([SSE, *pieces, END]))
    served, seconds, cpu = send(server, 3, max_concurrency=1)
    assert [(one.error, one.text, one.output_len, one.input_len) for one in served] == [("", "abéc", 4, 5)] * 3
    for one in served:
        assert len(one.token_times) == 3
        assert one.sent <= one.added <= one.token_times[0] <= one.finished == one.token_times[-1]
        assert one.tpot == pytest.approx((one.finished - one.token_times[0]) / 3)
    assert served[1].sent >= served[0].finished, "it waited for a place"
    assert (server.connections, len(server.requests)) == (1, 3)
    assert "Authorization: Bearer k" in server.requests[0][1]
    assert 0 < cpu < seconds + 1


def test_chats_count_thoughts_and_no_role(script: Callable[..., Script]) -> None:
    given = (chat(role="assistant", content=""), chat(reasoning="hm"), chat(reasoning_content="m"), chat(content="yes"))
    text = events(*given, {"choices": [], "usage": USAGE})
    (one,), *_ = send(script(lambda path, body: iter([SSE, chunked(text), END])))
    assert (one.text, len(one.token_times), one.error) == ("hmmyes", 3, "")


def test_an_answer_without_text_came_when_it_ended(script: Callable[..., Script]) -> None:
    text = events(completion(""), {"choices": [], "usage": USAGE})
    (one,), *_ = send(script(lambda path, body: iter([SSE, chunked(text), END])))
    assert (one.error, one.output_len, one.ttft) == ("", 4, one.e2el)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nwait", "status 429: wait"),
        (SSE + chunked(events(completion("a"), {"error": {"message": "broke"}})) + END, "broke"),
        (SSE + chunked(events(completion("a"))) + END, "without usage"),
        (SSE + chunked(events(completion("a"), done=False)) + b"0", "closed the connection"),
        (SSE + chunked(b"data: {\n\n"), "DecodeError"),
        (b"nonsense\r\n\r\n", "HttpParser"),
    ],
)
def test_what_fails_is_told_and_the_others_go_on(script: Callable[..., Script], answer: bytes, said: str) -> None:
    good = SSE + chunked(LINES) + END
    count = iter(range(10))

    def answered(path: str, body: dict[str, Any]) -> Iterator[bytes]:
        if next(count) == 1:
            yield answer
            raise ConnectionAbortedError  # which closes it
        yield good

    server = script(answered)
    server.handle_error = lambda *given: None  # type: ignore[method-assign]
    served, *_ = send(server, 3, max_concurrency=1)
    assert [bool(one.error) for one in served] == [False, True, False]
    assert said in served[1].error


def test_a_connection_that_the_server_has_closed_meanwhile_fails_nothing(script: Callable[..., Script]) -> None:
    def answered(path: str, body: dict[str, Any]) -> Iterator[bytes]:
        yield SSE + chunked(LINES) + END
        raise ConnectionAbortedError  # which closes it

    server = script(answered)
    server.handle_error = lambda *given: None  # type: ignore[method-assign]
    served, *_ = send(server, 20, max_concurrency=1)
    assert [one.error for one in served] == [""] * 20
    assert server.connections == 20


def test_a_server_that_is_not_there() -> None:
    (one,), *_ = drive(Target.of("http://127.0.0.1:1/v1/completions", ()), [b"{}"], [0.0])
    assert "Connect" in one.error or "connect" in one.error


def test_https_and_paths() -> None:
    target = Target.of("https://example.org/proxy/v1/completions", ())
    assert (target.host, target.port, target.tls is not None) == ("example.org", 443, True)
    assert target.request(b"{}").startswith(b"POST /proxy/v1/completions HTTP/1.1\r\nHost: example.org\r\n")


def serving(script: Callable[..., Script]) -> Script:
    """Serves any request with 4 tokens in 3 events."""

    def answer(path: str, body: dict[str, Any]) -> Iterator[bytes]:
        if path == "/v1/models":
            yield json_answer({"data": [{"id": "compiled-llm-demo"}]})
        else:
            yield SSE + chunked(LINES) + END

    return script(answer)


def run(capsys: pytest.CaptureFixture[str], *words: object, status: int = 0) -> dict[str, Any]:
    assert main(["bench", "serve", *map(str, words)]) == status
    return json.loads(capsys.readouterr().out.splitlines()[-1])


SMALL = ("--num-prompts", "6", "--input-len", "8", "--output-len", "4")


def test_the_command(
    script: Callable[..., Script], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = serving(script)
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    words = ("--base-url", server.url, *SMALL, "--ignore-eos", "--goodput", "ttft:1e5 tpot:1e5", "--save-result")
    more = ("--save-detailed", "--result-dir", tmp_path, "--result-filename", "a.json", "--request-rate", "500")
    extra = ("--extra-body", '{"priority": 1}', "--header", "x-a=b=c", "--picture", tmp_path / "a.svg")
    result = run(capsys, *words, *more, *extra)
    assert (result["completed"], result["failed"], result["goodput_share"]) == (6, 0, 1.0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (6 * 5, 6 * 4)
    assert result["client"]["events"] == 18
    assert {
        f"{kind}_{name}_ms" for kind in ("mean", "median", "p50", "p90", "p99") for name in ("ttft", "tpot")
    } <= set(result)
    saved = json.loads((tmp_path / "a.json").read_text())
    assert (saved["output_lens"], saved["generated_texts"]) == ([4] * 6, ["abéc"] * 6)
    assert "<svg" in (tmp_path / "a.svg").read_text()
    (models, head, _), warm_up, *sent = server.requests
    assert (models, "Bearer secret" in head, len(sent)) == ("/v1/models", True, 6)
    path, head, body = sent[0]
    assert (path, "x-a: b=c" in head, "Bearer secret" in head) == ("/v1/completions", True, True)
    assert body | {"prompt": []} == {
        "model": "compiled-llm-demo",
        "prompt": [],
        "max_tokens": 4,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "priority": 1,
    }
    prompts = [body["prompt"] for _, _, body in sent]  # as they came in, which need not be the order they were sent in
    assert warm_up[2]["prompt"][::-1] in prompts
    assert warm_up[2]["prompt"] not in prompts, "no request finds its prompt cached"
    assert len(set(map(tuple, prompts))) == 6
    assert "secret" not in json.dumps(saved)


def test_rates_chats_and_conversations(
    script: Callable[..., Script], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    server = serving(script)
    talks = [[{"from": "human", "value": f"number {n} of them all"}, {"value": "I see it, yes"}] for n in range(9)]
    (tmp_path / "talks.json").write_text(json.dumps([{"conversations": talk} for talk in (*talks, talks[0][:1])]))
    words = ("--base-url", server.url, "--backend", "openai-chat", "--dataset-name", "sharegpt", "--num-prompts", "5")
    flags = ("--dataset-path", tmp_path / "talks.json", "--rates", "200,400", "--picture", tmp_path / "a.png")
    result = run(capsys, *words, *flags, "--num-warmups", "0")
    assert [run["request_rate"] for run in result["sweep"]] == [200, 400]
    assert (tmp_path / "a.png").stat().st_size > 1000
    _, (path, _, body), *_ = server.requests
    assert path == "/v1/chat/completions"
    assert body["messages"][0]["content"] in [talk[0]["value"] for talk in talks]
    assert body["max_completion_tokens"] >= 4
    assert "ignore_eos" not in body
    result = run(capsys, "--base-url", server.url, *SMALL, "--goodput", "e2el:1e9", "--find-goodput")
    assert result["goodput_search"]["max_request_rate"] == "inf"


def test_a_failure_at_any_rate_is_the_status(script: Callable[..., Script], capsys: pytest.CaptureFixture[str]) -> None:
    count = iter(range(100))

    def answer(path: str, body: dict[str, Any]) -> Iterator[bytes]:
        if path == "/v1/models":
            yield json_answer({"data": [{"id": "compiled-llm-demo"}]})
        else:
            yield SSE + chunked(LINES if next(count) else events(completion("a"))) + END

    words = ("--base-url", script(answer).url, *SMALL, "--num-warmups", "0", "--rates", "500,600")
    result = run(capsys, *words, status=1)
    assert ([each["failed"] for each in result["sweep"]], result["failed"]) == ([1, 0], 0)


def test_a_server_that_refuses_ends_it(script: Callable[..., Script], capsys: pytest.CaptureFixture[str]) -> None:
    server = serving(script)
    for words, said, status in (
        (("--dataset-path", "nowhere.jsonl"), "nowhere.jsonl", 2),
        (("--model", "other"), "--tokenizer must be that of the model 'other'", 2),
        (("--endpoint", "/v1/models", *SMALL), "a first request failed", 1),
    ):
        with pytest.raises(SystemExit, match=str(status)):
            main(["bench", "serve", "--base-url", server.url, *words])
        assert said in capsys.readouterr().err
