"""ServerClient: a server with OpenAI's interface, asked one request at a time."""

import http.client
import json
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

_CONNECT_SECONDS = 10.0


class ServerClient:
    """Streams of events and plain answers over HTTP, with the standard library alone.

    Args:
        url: as clients of OpenAI have it, with or without ``/v1``.
        api_key: None: the server asks for none.

    Raises:
        ValueError: ``url`` is none.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query:
            raise ValueError(f"the server's URL must be as http://127.0.0.1:8000, given {url!r:.200}")
        self.url = f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}"
        self._parts, self._path, self._port = parts, urlsplit(self.url).path, port
        self.headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}

    def models(self) -> list[dict[str, Any]]:
        """What /v1/models says of each. ``OSError``: the server does not answer so."""
        with self._answer("GET", "/v1/models") as answer:
            try:
                return list(json.load(answer)["data"])
            except (ValueError, KeyError, TypeError) as error:
                raise OSError(f"{self.url}/v1/models is no list of models: {error}") from error

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """What it answers to a body. Errors as ``stream``."""
        with self._answer("POST", path, json.dumps(body).encode()) as answer:
            return dict(json.load(answer))

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The events of a streamed answer. To close it ends the request.

        Raises:
            ValueError: the server refuses the request, or ends it with an error.
            OSError: it cannot be reached, or has gone away.
        """
        with self._answer("POST", path, json.dumps({**body, "stream": True}).encode()) as answer:
            try:
                for line in answer:
                    if line.startswith(b"data:") and b"[DONE]" not in line[:16]:
                        event = json.loads(line[5:])
                        if "error" in event:
                            raise ValueError(_message_of(event))
                        yield event
            except http.client.HTTPException as error:
                raise OSError(f"{self.url} ended the answer: {error!r}") from error

    def _answer(self, method: str, path: str, body: bytes | None = None) -> "_Answer":
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._port, timeout=_CONNECT_SECONDS)
        try:
            connection.connect()
            connection.sock.settimeout(None)  # a long prompt takes its time
            connection.request(method, self._path + path, body, {**self.headers, "Content-Type": "application/json"})
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise OSError(f"{self.url} does not answer: {error}") from error
        except BaseException:
            connection.close()
            raise
        if answer.status != 200:
            text = answer.read()
            connection.close()
            raise ValueError(f"{self.url} answers with status {answer.status}: {_message_of(text)}")
        return _Answer(connection, answer)


class _Answer:
    """Of a connection that its end closes, so that the server sees it."""

    def __init__(self, connection: http.client.HTTPConnection, answer: http.client.HTTPResponse) -> None:
        self._connection, self._response = connection, answer

    def __enter__(self) -> http.client.HTTPResponse:
        return self._response

    def __exit__(self, *error: object) -> None:
        self._response.close()
        self._connection.close()


def _message_of(given: Any) -> str:
    """The message of an error in OpenAI's form, or whatever else came."""
    try:
        found = json.loads(given) if isinstance(given, bytes) else given
        return str(found["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return given.decode(errors="replace")[:300] if isinstance(given, bytes) else str(given)[:300]
