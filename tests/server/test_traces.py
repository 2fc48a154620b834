"""A collector of a few lines gets what the server sends to it."""

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from compiled_llm import CompiledEngine
from compiled_llm.server.traces import otlp_exporter
from tests.server.conftest import running_with

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector() -> Iterator[tuple[str, list[bytes]]]:
    """Its address, and the bodies that it got."""
    bodies: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            bodies.append(gzip.decompress(body) if self.headers.get("content-encoding") == "gzip" else body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/v1/traces", bodies
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_span_for_each_prompt(engine: CompiledEngine, collector: tuple[str, list[bytes]]) -> None:
    trace = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
    url, bodies = collector
    body = {"prompt": ["import os", "import"], "max_tokens": 4, "temperature": 0, "top_p": 0.5, "ignore_eos": True}
    with running_with(engine, otlp_traces_endpoint=url) as running:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "named"}
        assert running.http.post("/v1/completions", json=body, headers=headers).status_code == 200
        assert running.http.post("/v1/completions", json={**body, "max_tokens": 0}).status_code == 400
    requests = [trace.ExportTraceServiceRequest.FromString(body) for body in bodies]
    (resource,) = (resource for request in requests for resource in request.resource_spans)
    (scope,) = resource.scope_spans
    assert len(scope.spans) == 2
    for span in scope.spans:
        found = {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}
        assert (span.name, span.trace_id.hex(), span.parent_span_id.hex()) == ("llm_request", TRACE, PARENT)
        assert found["gen_ai.request.id"].startswith("named-")
        assert found["gen_ai.usage.prompt_tokens"] in (1, 2, 3)
        names = "usage.completion_tokens", "request.max_tokens", "request.n", "request.top_p", "request.temperature"
        assert [found[f"gen_ai.{name}"] for name in names] == [4, 4, 1, 0.5, 0]
        parts = [found[f"gen_ai.latency.time_in_{part}"] for part in ("queue", "model_prefill", "model_decode")]
        assert (
            0
            <= sum(parts)
            <= found["gen_ai.latency.e2e"]
            == pytest.approx((span.end_time_unix_nano - span.start_time_unix_nano) / 1e9, abs=1e-3)
        )
        assert found["gen_ai.latency.time_to_first_token"] == pytest.approx(parts[0] + parts[1])


def test_an_endpoint_is_a_url() -> None:
    with pytest.raises(ValueError, match="otlp_traces_endpoint must be a URL of http or https"):
        otlp_exporter("localhost:4318")
