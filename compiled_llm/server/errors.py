"""ApiError: what a client is told when its request cannot be answered, in OpenAI's form."""

import re
from collections.abc import Mapping
from typing import Any

from compiled_llm.openai.requests import FIELDS
from compiled_llm.openai.responses import FIELDS as RESPONSE_FIELDS

FAULT = "the server failed: its log says how"
_FIELDS = frozenset(name for names in (*FIELDS.values(), RESPONSE_FIELDS) for name in names)
# Status -> OpenAI's type and code of it.
KINDS = {
    400: ("invalid_request_error", None),
    401: ("invalid_request_error", "invalid_api_key"),
    404: ("invalid_request_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    408: ("timeout_error", "timeout"),
    409: ("invalid_request_error", "conflict"),
    413: ("invalid_request_error", "body_too_large"),
    429: ("rate_limit_error", "rate_limit_exceeded"),
    431: ("invalid_request_error", "headers_too_large"),
    500: ("server_error", None),
    503: ("server_error", "unavailable"),
}


class ApiError(Exception):
    """A request that ends with ``status`` and ``message``.

    Args:
        headers: of the answer, such as Retry-After.
        code: OpenAI's name of the error, where it is not that of the status.
    """

    def __init__(
        self, status: int, message: str, headers: Mapping[str, str] | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.headers, self.code = status, message, dict(headers or {}), code

    @classmethod
    def of(cls, error: ValueError | ImportError) -> "ApiError":
        """For what is wrong with a request."""
        return cls(400, str(error))

    def body(self) -> dict[str, Any]:
        kind, code = KINDS[self.status]
        # Errors of arguments begin with the argument's name.
        first = re.match(r"\w+", self.message)
        param = first[0] if first is not None and self.status == 400 and first[0] in _FIELDS else None
        return {"error": {"message": self.message, "type": kind, "param": param, "code": self.code or code}}
