"""What two servers say to each other of requests: proofs that serve once, and refusals by name."""

import asyncio
import base64
from pathlib import Path
from typing import Any

import pytest

from compiled_llm.server import take_over as module
from compiled_llm.server.messages import Abort, AdapterRef, Generate, encode
from compiled_llm.server.take_over import OtherServer, TakenOver, adapter_digest

FACTS = {"model": "a model", "key": "a key"}


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMPILED_LLM_KV_KEY", "a key that both of them share")


def challenge(taken: TakenOver) -> str:
    said = {"challenge": "0" * 64, "adapters": ["unknown", 5]}
    answer = asyncio.run(taken.hello(said, FACTS, {}))
    assert answer["proof"] == module._proof(module.shared_secret(), "takes", "0" * 64, answer["facts"])
    return str(module.json.loads(answer["facts"])["challenge"])


def body(made: str, message: Any = None, secret: bytes | None = None) -> dict[str, str]:
    asked = Generate("theirs", [1, 2], {}, adapter=AdapterRef("x", "/there")) if message is None else message
    encoded = base64.b64encode(encode(asked)).decode()
    proof = module._proof(secret or module.shared_secret(), "gives", made, encoded)
    return {"challenge": made, "proof": proof, "request": encoded}


def test_a_request_needs_a_proof_and_random_bytes_serve_once(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, own = TakenOver(), {"x": AdapterRef("x", "/here")}
    given = body(challenge(taken))
    asked = taken.request(given, "ours", own)
    assert (asked.request_id, asked.adapter, asked.prompt_token_ids) == ("ours", own["x"], [1, 2])
    other = base64.b64encode(encode(Generate("theirs", [3], {}))).decode()
    for wrong in (
        given,
        body("1" * 64),
        body(challenge(taken), secret=b"another"),
        {**body(challenge(taken)), "request": other},
        {},
    ):
        with pytest.raises(PermissionError, match="must come with a proof"):
            taken.request(wrong, "ours", own)
    late = body(challenge(taken))
    monkeypatch.setattr(module, "_CHALLENGE_SECONDS", -1.0)
    with pytest.raises(PermissionError):
        taken.request(late, "ours", own)


def test_what_is_no_request_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = TakenOver()
    with pytest.raises(ValueError, match="of an adapter that is served here"):
        taken.request(body(challenge(taken)), "ours", {})
    with pytest.raises(ValueError, match="must be one for tokens"):
        taken.request(body(challenge(taken), Abort([])), "ours", {})
    with pytest.raises(ValueError, match="request must be one of this version's messages"):
        taken.request(body(challenge(taken), [1]), "ours", {})
    with pytest.raises(ValueError, match="challenge and adapters must be"):
        asyncio.run(taken.hello({"challenge": "x", "adapters": []}, FACTS, {}))
    monkeypatch.setenv("COMPILED_LLM_KV_KEY", "short")
    with pytest.raises(ValueError, match="COMPILED_LLM_KV_KEY must have at least 16 characters, the same for both"):
        asyncio.run(taken.hello({"challenge": "0" * 64, "adapters": []}, FACTS, {}))


@pytest.mark.parametrize("url", ["127.0.0.1:80", "ftp://a", "http://", "http://a\r\nb", "http://a?b"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="to must be the URL of a server"):
        OtherServer(url, None, FACTS)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "has the same COMPILED_LLM_KV_KEY"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]", "has the same COMPILED_LLM_KV_KEY"),
        (b"HTTP/1.1 200 OK\r\n\r\n{}", "has the same COMPILED_LLM_KV_KEY"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\n\r\nhello", "answers with status 404: hello"),
        (b'HTTP/1.1 500\r\nContent-Length: 12\r\n\r\n{"error": 5}', "answers with status 500"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "answers with status"),
    ],
    ids=["text", "list", "no length", "404", "500", "no HTTP"],
)
def test_what_is_no_such_server_is_refused_by_name(answer: bytes, said: str) -> None:
    async def meet() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            await OtherServer(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None, FACTS).meet()

    with pytest.raises(ValueError, match=said):
        asyncio.run(meet())


def test_certificates_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for each request: they would take time from all streams."""
    made: list[None] = []
    monkeypatch.setattr(module.ssl, "create_default_context", lambda: made.append(None))
    other = OtherServer("https://127.0.0.1:1", None, FACTS)
    for _ in range(2):
        with pytest.raises(ConnectionRefusedError):
            asyncio.run(other.meet())
    assert len(made) == 1


def test_a_header_has_no_second_line() -> None:
    with pytest.raises(ValueError, match="to_api_key must be visible ASCII"):
        OtherServer("http://a", "b\r\nc", FACTS)


def test_an_adapter_is_known_by_its_files(tmp_path: Path) -> None:
    digests = []
    for name, content in (("a", b"1"), ("b", b"1"), ("c", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "adapter_model.safetensors").write_bytes(content)
        digests.append(adapter_digest(AdapterRef(name, str(tmp_path / name))))
    assert digests[0] == digests[1] != digests[2]


def test_an_adapter_without_files_is_like_no_other(tmp_path: Path) -> None:
    """Of two servers that have both lost them, too."""
    gone, taken = AdapterRef("gone", str(tmp_path)), TakenOver()
    assert adapter_digest(gone) is None
    answer = asyncio.run(taken.hello({"challenge": "0" * 64, "adapters": ["gone"]}, FACTS, {"gone": gone}))
    assert module.json.loads(answer["facts"])["adapters"] == {"gone": None}


def test_a_name_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often a client that need not know the key repeats it."""
    asked: list[AdapterRef] = []
    monkeypatch.setattr(module, "adapter_digest", asked.append)
    said = {"challenge": "0" * 64, "adapters": ["x"] * 100}
    asyncio.run(TakenOver().hello(said, FACTS, {"x": AdapterRef("x", "/here")}))
    assert len(asked) == 1


def test_random_bytes_of_many_requests_at_once_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    taken, own = TakenOver(), {"x": AdapterRef("x", "/here")}
    made = [challenge(taken) for _ in range(3000)]
    assert taken.request(body(made[0]), "ours", own).request_id == "ours"
    now = module.time.monotonic() + 31
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    challenge(taken)
    assert len(taken._challenges) == 1, "what is too old is not kept"
