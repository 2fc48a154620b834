"""Traces: a span for each prompt that was answered, under vLLM's names, for a collector of OpenTelemetry."""

import importlib.util
import time
from collections.abc import Mapping
from typing import Any

from compiled_llm.api.sampling_params import SamplingParams
from compiled_llm.server.messages import Times

_EXPORT_SECONDS = 2.0  # so long a collector that does not answer keeps the server from ending
_PACKAGES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def otlp_exporter(endpoint: str) -> Any:
    """Sends spans to a collector. ``ValueError``: a package is missing, or ``endpoint`` is no URL."""
    if not endpoint.startswith(("http://", "https://")):
        raise ValueError(
            f"otlp_traces_endpoint must be a URL of http or https, such as http://localhost:4318/v1/traces, given "
            f"{endpoint!r}"
        )
    try:
        missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    except ModuleNotFoundError:  # of the package above one of these
        missing = list(_PACKAGES)
    if missing:
        raise ValueError(
            f"otlp_traces_endpoint needs {', '.join(missing)}, given {endpoint!r}: pip install 'compiled-llm[trace]'"
        )
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_SECONDS)


class Traces:
    """Spans of one server, which a thread of OpenTelemetry exports in batches.

    Args:
        model: its name in spans.
    """

    def __init__(self, exporter: Any, model: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._model, self._kind = model, SpanKind.SERVER
        self._provider = TracerProvider(resource=Resource.create({"service.name": "compiled-llm"}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("compiled_llm.server")
        self._propagator = TraceContextTextMapPropagator()

    def add(
        self,
        headers: Mapping[str, str],
        request_id: str,
        params: SamplingParams,
        num_prompt_tokens: int,
        num_output_tokens: int,
        seconds: float,
        times: Times,
        adapter: str | None = None,
    ) -> None:
        """A prompt was answered just now.

        Args:
            headers: of the client's request; its ``traceparent`` is the parent of the span.
            seconds: since the request came.
            adapter: its name, which is then that of the model.
        """
        values = {
            "gen_ai.response.model": adapter or self._model,
            "gen_ai.request.id": request_id,
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.n": params.n,
            "gen_ai.usage.num_sequences": params.n,
            "gen_ai.usage.prompt_tokens": num_prompt_tokens,
            "gen_ai.usage.completion_tokens": num_output_tokens,
            "gen_ai.latency.time_in_queue": times.queue,
            "gen_ai.latency.time_to_first_token": times.first,
            "gen_ai.latency.time_in_model_prefill": times.prefill,
            "gen_ai.latency.time_in_model_decode": times.decode,
            "gen_ai.latency.e2e": seconds,
        }
        end = time.time_ns()
        span = self._tracer.start_span(
            "llm_request",
            context=self._propagator.extract(headers),
            kind=self._kind,
            attributes={name: value for name, value in values.items() if value is not None},
            start_time=end - int(seconds * 1e9),
        )
        span.end(end)

    def close(self) -> None:
        """Export what is left."""
        self._provider.shutdown()
