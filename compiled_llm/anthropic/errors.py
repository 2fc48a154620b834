"""Errors in Anthropic's form. https://docs.anthropic.com/en/api/errors"""

from typing import Any

OVERLOADED_STATUS = 529  # where others say 503
# Status -> its type; others are a wrong request.
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}


def error_body(status: int, message: str) -> dict[str, Any]:
    """What a client is told, also as the last event of a stream."""
    return {"type": "error", "error": {"type": _TYPES.get(status, "invalid_request_error"), "message": message}}
