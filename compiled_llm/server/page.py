"""The page at /: files of ``static/``, the same for everyone.

They hold no secret and need no key. The page asks for the key and sends it with its own requests.
"""

import hashlib
from pathlib import Path
from typing import NamedTuple

from fastapi import FastAPI, Request
from starlette.responses import Response

_DIRECTORY = Path(__file__).with_name("static")
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
# The page loads and asks nothing but its own server, runs no script of a text, and is shown in no other page.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)


class _File(NamedTuple):
    content: bytes
    headers: dict[str, str]


def _read(path: Path) -> _File:
    content = path.read_bytes()
    headers = {
        "Content-Type": f"{_TYPES[path.suffix]}; charset=utf-8",
        "Content-Security-Policy": _POLICY,
        "Cache-Control": "no-cache",  # it is asked for again each time, and 304 unless it has changed
        "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Opener-Policy": "same-origin",
    }
    return _File(content, headers)


_FILES = {
    "/" if path.name == "index.html" else f"/page/{path.name}": _read(path) for path in sorted(_DIRECTORY.iterdir())
}
PAGE_PATHS = frozenset(_FILES)


def add_page(app: FastAPI) -> None:
    """Its routes."""

    async def answer(request: Request) -> Response:
        content, headers = _FILES[request.scope["path"]]
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers)

    for path in PAGE_PATHS:
        app.add_route(path, answer, include_in_schema=False)
