"""Requests of a server that is to end, which go on in another one: both sides of that.

    the drained one -> the other    POST /take_over: random bytes, and digests of the adapters that a request needs
    the other -> the drained one    what it serves, its own random bytes, and an HMAC of all of that
    the drained one -> the other    POST /take_over/request: the request, and an HMAC of it and of those random bytes
    the other -> the drained one    a stream of outputs, as an engine's process gives them (``messages``)

The key of the HMACs is the environment's COMPILED_LLM_KV_KEY, which both have: the drained server says nothing of a
request before the other one has proved that it knows it, and random bytes serve once. Nothing is encrypted: across
machines use https. To end a connection ends its request.
"""

import asyncio
import base64
import contextlib
import functools
import hashlib
import hmac
import json
import os
import re
import secrets
import socket
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from compiled_llm.api.config import KV_KEY_VARIABLE, LEAST_KV_KEY
from compiled_llm.api.readable import shown
from compiled_llm.server.messages import VERSION, AdapterRef, Generate, Output, decode_for_engine, encode

_CHALLENGE_SECONDS, _MOST_CHALLENGES = 30.0, 1 << 16
_HELLO_SECONDS, _MOST_HELLO = 10.0, 1 << 20
_KEEP_ALIVE = ((socket.TCP_KEEPIDLE, 10), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 3))  # a machine may vanish
_ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
_NAMES = {
    "version": "version of messages",
    "model": "model",
    "key": "weights, tokenizer, code, torch, processor, threads and engine arguments (by their SHA-256)",
    "capacity": "most tokens of a request (max_model_len, or what its KV pool holds)",
}
_decode_output = msgspec.msgpack.Decoder(Output).decode


class OtherServerError(Exception):
    """The other server does not serve a request, or not to its end."""


def shared_secret() -> bytes:
    """``ValueError``: there is none, or it is too short."""
    secret = os.environ.get(KV_KEY_VARIABLE, "")
    if len(secret) < LEAST_KV_KEY:
        raise ValueError(
            f"the environment's {KV_KEY_VARIABLE} must have at least {LEAST_KV_KEY} characters, the same for both "
            f"servers, where requests go from one to another, given {len(secret)}"
        )
    return secret.encode()


def adapter_digest(adapter: AdapterRef) -> str | None:
    """SHA-256 of its files; None: they are not there any more. May wait."""
    with contextlib.suppress(OSError):
        paths = [path for name in _ADAPTER_FILES if (path := Path(adapter.path) / name).is_file()]
        found = tuple((path, path.stat().st_mtime_ns, path.stat().st_size) for path in paths)
        return _digest(found) if found else None
    return None


@functools.lru_cache(maxsize=256)
def _digest(files: tuple[tuple[Path, int, int], ...]) -> str:
    found = hashlib.sha256()
    for path, _, size in files:
        found.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                found.update(piece)
    return found.hexdigest()


def _proof(secret: bytes, side: str, *parts: str) -> str:
    return hmac.new(secret, json.dumps([side, *parts]).encode(), hashlib.sha256).hexdigest()


class TakenOver:
    """Of the server that takes requests over: what it says and checks of them.

    Attributes:
        name: of this server, random: no two have the same.
    """

    def __init__(self) -> None:
        self.name = secrets.token_hex(16)
        self._challenges: dict[str, float] = {}  # and when they were made, oldest first

    async def hello(
        self, body: Mapping[str, Any], facts: Mapping[str, str], own: Mapping[str, AdapterRef]
    ) -> dict[str, Any]:
        """The answer to a first message.

        Args:
            facts: "key": of all that tokens depend on, as ``Started`` has it; "model": what a person calls that;
                "capacity": most tokens of a request; "server": a ``name``.
            own: adapters by name.

        Raises:
            ValueError: the message is none.
        """
        challenge, adapters = body.get("challenge"), body.get("adapters")
        if not isinstance(challenge, str) or len(challenge) != 64 or not isinstance(adapters, list):
            raise ValueError(f"challenge and adapters must be 64 characters and a list, given {shown(body)}")
        secret, made = shared_secret(), secrets.token_hex(32)
        known = {name: own[name] for name in adapters if isinstance(name, str) and name in own}
        digests = {name: await asyncio.to_thread(adapter_digest, one) for name, one in known.items()}
        now = self._challenges[made] = time.monotonic()
        while len(self._challenges) > _MOST_CHALLENGES or now > self._oldest + _CHALLENGE_SECONDS:
            del self._challenges[next(iter(self._challenges))]
        said = json.dumps({"version": str(VERSION), **facts, "adapters": digests, "challenge": made})
        return {"facts": said, "proof": _proof(secret, "takes", challenge, said)}

    @property
    def _oldest(self) -> float:
        return next(iter(self._challenges.values()))

    def request(self, body: Mapping[str, Any], request_id: str, own: Mapping[str, AdapterRef]) -> Generate:
        """A request that is to be served, by a name of this server's own.

        Raises:
            PermissionError: nothing proves that it comes from a server with the same key.
            ValueError: it is none.
        """
        secret = shared_secret()
        challenge, proof, encoded = (str(body.get(name)) for name in ("challenge", "proof", "request"))
        made = self._challenges.pop(challenge, -_CHALLENGE_SECONDS)
        is_right = hmac.compare_digest(proof.encode(), _proof(secret, "gives", challenge, encoded).encode())
        if not is_right or time.monotonic() > made + _CHALLENGE_SECONDS:
            raise PermissionError(f"a request of another server must come with a proof by its {KV_KEY_VARIABLE}")
        try:
            asked = decode_for_engine(base64.b64decode(encoded))
        except (ValueError, msgspec.MsgspecError) as error:
            raise ValueError(f"request must be one of this version's messages: {error}") from error
        if not isinstance(asked, Generate) or (asked.adapter is not None and asked.adapter.name not in own):
            raise ValueError("request must be one for tokens, of an adapter that is served here")
        adapter = None if asked.adapter is None else own[asked.adapter.name]
        return msgspec.structs.replace(asked, request_id=request_id, adapter=adapter)


def output_event(output: Output) -> bytes:
    """An output as an event of a stream."""
    return b"data: " + base64.b64encode(encode(output)) + b"\n\n"


class OtherServer:
    """The server that takes requests over, for the one that is drained.

    Args:
        url: its address, such as https://10.0.0.2:8000; ``api_key``: None: it asks for none.
        facts: what this server says of itself, as in ``TakenOver.hello``.

    Raises:
        ValueError: ``url`` is none, or there is no secret.
    """

    def __init__(self, url: str, api_key: str | None, facts: Mapping[str, str]) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or not re.fullmatch(r"[\w.:/\[\]-]+", url):
            raise ValueError(f"to must be the URL of a server, as http://127.0.0.1:8000, given {shown(url)}")
        if api_key is not None and not re.fullmatch(r"[\x21-\x7e]+", api_key):
            raise ValueError("to_api_key must be visible ASCII characters")
        self.url, self._secret = url.rstrip("/"), shared_secret()
        # Made once: to read all certificates takes some 20 ms, in which nobody gets a token.
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname, parts.port or (443 if self._tls else 80)
        self._path, self._netloc = parts.path.rstrip("/"), parts.netloc
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._facts = {"version": str(VERSION), **facts}

    async def meet(self, *adapters: AdapterRef) -> str:
        """Have it prove that it knows the secret, and that its tokens are these. Returns random bytes for one request.

        Raises:
            ValueError: it has another key, model or adapter, or is this server.
            OSError, EOFError: it does not answer.
        """
        challenge = secrets.token_hex(32)
        said = {"challenge": challenge, "adapters": [adapter.name for adapter in adapters]}
        async with asyncio.timeout(_HELLO_SECONDS), self._answer("/take_over", said) as (reader, length):
            content, found = await reader.readexactly(min(length, _MOST_HELLO)), None
            with contextlib.suppress(ValueError):  # else it is no such server, and proves nothing
                found = json.loads(content)
        answer = found if isinstance(found, dict) else {}
        text = str(answer.get("facts"))
        expected = _proof(self._secret, "takes", challenge, text)
        if not hmac.compare_digest(str(answer.get("proof")).encode(), expected.encode()):
            raise ValueError(f"to must name a server that has the same {KV_KEY_VARIABLE}, given {self.url}")
        facts = json.loads(text)
        own = self._facts
        if facts.get("server") == own.get("server"):
            raise ValueError(f"to must name another server than this one, given {self.url}")
        for name, words in _NAMES.items():
            here, there = str(own.get(name)), str(facts.get(name))
            # The model's directory may be another one.
            if here != there and (name != "model" or facts.get("key") != own["key"]):
                raise ValueError(
                    f"to must name a server of the same {words}, given {here:.100} here and {there:.100} there"
                )
        for adapter in adapters:
            digest = await asyncio.to_thread(adapter_digest, adapter)
            if digest is None or facts["adapters"].get(adapter.name) != digest:
                raise ValueError(f"to must name a server that has the same adapter {shown(adapter.name)}")
        return str(facts["challenge"])

    async def outputs(self, asked: Generate) -> AsyncGenerator[Output, None]:
        """What it gives a request, to the end. ``OtherServerError``: that does not come."""
        try:
            challenge = await self.meet(*([asked.adapter] if asked.adapter is not None else ()))
            encoded = base64.b64encode(encode(asked)).decode()
            proof = _proof(self._secret, "gives", challenge, encoded)
            body = {"challenge": challenge, "proof": proof, "request": encoded}
            async with self._answer("/take_over/request", body) as (reader, _):
                async for line in _lines(reader):
                    if line.startswith(b"data: "):
                        output = _decode_output(base64.b64decode(line[6:]))
                        if output.error is not None:
                            raise ValueError(output.error)
                        yield output
                        if output.has_ended:
                            return
            raise EOFError("the answer has ended too soon")
        except Exception as error:  # of its connection, or of what it says
            raise OtherServerError(f"{self.url}: {type(error).__name__}: {error}") from error

    @contextlib.asynccontextmanager
    async def _answer(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[tuple[asyncio.StreamReader, int]]:
        """The body of its answer, which has so many bytes, or comes in chunks. ``ValueError``: it refuses."""
        async with asyncio.timeout(_HELLO_SECONDS):
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        try:
            own = writer.get_extra_info("socket")
            own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for option, value in _KEEP_ALIVE:
                own.setsockopt(socket.IPPROTO_TCP, option, value)
            content = json.dumps(body).encode()
            headers = {"Host": self._netloc, "Connection": "close", "Content-Type": "application/json"}
            headers |= {"Content-Length": str(len(content)), **self._headers}
            lines = [f"POST {self._path}{path} HTTP/1.1", *(f"{name}: {text}" for name, text in headers.items())]
            writer.write("".join(f"{line}\r\n" for line in [*lines, ""]).encode() + content)
            status, length = (await reader.readuntil(b"\r\n")).split(), 0
            while line := (await reader.readuntil(b"\r\n")).strip().lower():
                if line.startswith(b"content-length:"):
                    length = int(line[15:])
            if status[1:2] != [b"200"]:
                said = (await reader.readexactly(min(length, _MOST_HELLO))).decode(errors="replace")
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    said = str(json.loads(said)["error"]["message"])
                raise ValueError(f"{self.url} answers with status {b' '.join(status[1:2]).decode()}: {said[:300]}")
            yield reader, length
        finally:
            writer.close()


async def _lines(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The lines of a body that comes in chunks."""
    rest = b""
    while size := int((await reader.readuntil(b"\r\n")).partition(b";")[0], 16):
        rest += await reader.readexactly(size)
        await reader.readexactly(2)
        *lines, rest = rest.split(b"\n")
        for line in lines:
            yield line
