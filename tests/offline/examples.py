"""Rows and outputs that the tests of both formats share."""

from typing import Any

from compiled_llm import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from compiled_llm.offline.formats import row_of_object
from compiled_llm.offline.rows import Row, RowFormat

CHAT = [{"role": "user", "content": "hello"}]
LOGPROBS = [{7: Logprob(-0.5, 2, " a"), 9: Logprob(-0.25, 1, "b")}, {8: Logprob(-1.0, 1, "é")}]


def batch(body: dict[str, Any], **others: Any) -> dict[str, Any]:
    """A row of OpenAI's format."""
    url = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return {"custom_id": "a", "method": "POST", "url": url, "body": body, **others}


def output_of(*, n: int = 1, text: str = " aé", logprobs: Any = None) -> RequestOutput:
    completions = [
        CompletionOutput(index, text, [7, 8], None if logprobs is None else -1.5, logprobs, "stop", "x")
        for index in range(n)
    ]
    return RequestOutput("5", "prompt\n", [5, 6, 7], completions, True, RequestMetrics(0.0), None, 2)


def row(row_format: RowFormat = "row", **fields: Any) -> Row:
    return Row(5, "row 5", {"prompt": "prompt\n"}, format=row_format, **fields)


def error_of(values: Any) -> str:
    """Why these values of JSON cannot be served."""
    row = row_of_object(0, "row 0", values)
    assert row.error is not None
    assert (row.prompt, row.messages) == (None, None)
    return row.error
