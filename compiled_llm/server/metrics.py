"""Metrics: /metrics under vLLM's names, so that dashboards made for it work.

Latencies and tokens are observed here as requests end; counts and gauges are the engine's own, as it says when it is
asked.
"""

import bisect
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from compiled_llm.server.messages import Output, Started, Times

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160,
                640, 2560)  # fmt: skip
_NEXT_TOKEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_REQUEST = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_N = (1, 2, 5, 10, 20)
_LABELS = ("model_name", "engine")
# Name -> what it is, and the field of ``Answer.stats``.
_GAUGES = {
    "vllm:num_requests_running": ("Requests in steps", "num_running"),
    "vllm:num_requests_waiting": ("Requests that wait for a place in steps", "num_waiting"),
    "compiled_llm:kv_blocks_cached": ("Free KV blocks that can still be found", "cached_blocks"),
    "compiled_llm:graphs": ("Graphs that steps use or will use; 0: they run uncompiled", "num_graphs"),
    "compiled_llm:graphs_pending": ("Those of them that are still being loaded or compiled", "num_pending_graphs"),
}
_COUNTERS = {
    "vllm:prompt_tokens": ("Tokens of prompts", "num_prompt_tokens"),
    "vllm:generation_tokens": ("Tokens that were generated", "num_output_tokens"),
    "vllm:prefix_cache_queries": ("Tokens that were looked for in the prefix cache", "prefix_queried_tokens"),
    "vllm:prefix_cache_hits": ("Tokens that were found there", "prefix_hit_tokens"),
    "vllm:external_prefix_cache_queries": ("Tokens that were looked for below it", "external_queried_tokens"),
    "vllm:external_prefix_cache_hits": ("Tokens that host memory, files or other engines gave", "external_hit_tokens"),
    "compiled_llm:host_hit_tokens": ("Tokens that host memory gave", "host_hit_tokens"),
    "compiled_llm:disk_hit_tokens": ("Tokens that files gave", "disk_hit_tokens"),
    "compiled_llm:host_stored_bytes": ("Bytes of KV blocks copied to host memory", "host_stored_bytes"),
    "compiled_llm:host_loaded_bytes": ("Bytes of KV blocks copied back", "host_loaded_bytes"),
    "compiled_llm:disk_written_bytes": ("Bytes of KV blocks written to files", "disk_written_bytes"),
    "compiled_llm:disk_read_bytes": ("Bytes of KV blocks read from files", "disk_read_bytes"),
    "compiled_llm:disk_failures": ("Files of KV blocks that could not be used or written", "num_disk_failures"),
    "compiled_llm:fetches_dearer": ("Blocks computed since that was faster", "num_fetches_dearer"),
    "compiled_llm:fetches_late": ("Requests that waited too long for files", "num_fetches_late"),
    "compiled_llm:peer_hit_tokens": ("Tokens whose KV blocks other engines gave", "peer_hit_tokens"),
    "compiled_llm:peer_taken_bytes": ("Bytes of KV blocks taken from other engines", "peer_taken_bytes"),
    "compiled_llm:peer_given_bytes": ("Bytes of KV blocks laid ready for other engines", "peer_given_bytes"),
    "compiled_llm:takes_failed": ("KV blocks that other engines did not give", "num_takes_failed"),
    "compiled_llm:tier_file_seconds": ("Seconds of reading and writing files", "tier_file_seconds"),
    "compiled_llm:tier_idle_seconds": ("Seconds of it in which nothing ran", "tier_idle_seconds"),
    "vllm:num_preemptions": ("Preemptions", "num_preemptions"),
    "vllm:spec_decode_num_drafts": ("Times that a step verified drafts of a request", "num_drafts"),
    "vllm:spec_decode_num_draft_tokens": ("Tokens of a drafter", "num_draft_tokens"),
    "vllm:spec_decode_num_accepted_tokens": ("Accepted ones of these", "num_accepted_draft_tokens"),
    "compiled_llm:draft_seconds": ("Seconds in looking for drafts", "draft_seconds"),
    "compiled_llm:steps": ("Steps of the engine", "num_steps"),
    "compiled_llm:step_seconds": ("Seconds in steps, host time around them left out", "execute_seconds"),
    "compiled_llm:computed_tokens": ("Tokens in steps", "num_computed_tokens"),
    "compiled_llm:padding_tokens": ("Rows of steps without a token", "num_padding_tokens"),
    # Only where the machine's limits are known. Divided, the share of them.
    "compiled_llm:limit_seconds": ("Seconds that steps would have taken at the machine's limits", "limit_seconds"),
    "compiled_llm:device_seconds": ("Seconds that they took on the device", "device_seconds"),
}
# What the server does with requests of several engines: counts of ``Replicas``.
_OF_SERVER = {
    "requests_served_again": "Requests that another engine served after theirs had ended",
    "requests_handed_over": "Requests that went from a drained engine to others",
    "requests_handed_back": "Requests that another server did not serve to their end: they went on here",
    "prompts_apart": "Prompts that an engine of the role prefill computed",
    "prompts_back": "Prompts that none of these computed in time",
}


class Metrics:
    """Of one server.

    Attributes:
        rejections: requests that found the queue full.
    """

    def __init__(self, model: str) -> None:
        self._registry = CollectorRegistry()
        self._model = model
        labels = self._labels(0)
        names = [*labels]

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(name, text, [*names, *more], registry=self._registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Any:
            return Histogram(name, text, names, registry=self._registry, buckets=buckets)

        self.rejections = counter("vllm:admission_rejections", "Requests refused", "reason").labels(
            **labels, reason="queue_full"
        )
        self._success = counter("vllm:request_success", "Continuations that ended", "finished_reason")
        self._cached = counter("vllm:prompt_tokens_cached", "Tokens of prompts that were cached")
        self._first = histogram("vllm:time_to_first_token_seconds", "Until the first token", _FIRST_TOKEN)
        self.next = _TokenGaps("vllm:inter_token_latency_seconds", "Between tokens", _NEXT_TOKEN)
        self._registry.register(self.next)
        self._mean = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean of a request, after its first token", _NEXT_TOKEN
        )
        self._whole = histogram("vllm:e2e_request_latency_seconds", "Until the end", _REQUEST)
        self._parts = {
            part: histogram(f"vllm:request_{part}_time_seconds", text, _REQUEST)
            for part, text in (
                ("queue", "Until it runs"),
                ("prefill", "From there to the first token"),
                ("decode", "From there to the end"),
                ("inference", "While it runs"),
            )
        }
        self._histogram = histogram
        self._engines: list[_OfEngine] = []

    def _labels(self, engine: int) -> dict[str, str]:
        return {"model_name": self._model, "engine": str(engine)}

    def start(self, started: Started, number_of: int = 1) -> None:
        """So many engines serve: sizes of requests are counted up to their longest."""
        sizes, histogram = tuple(_one_two_five(started.max_model_len)), self._histogram
        self._prompt = histogram("vllm:request_prompt_tokens", "Tokens of a prompt", sizes)
        self._generated = histogram("vllm:request_generation_tokens", "Tokens of an answer", sizes)
        self._max_tokens = histogram("vllm:request_params_max_tokens", "max_tokens of a request", sizes)
        self._n = histogram("vllm:request_params_n", "n of a request", _N)
        self.of_engine(number_of - 1)

    def of_engine(self, number: int) -> "_OfEngine":
        """Those of an engine. Before the first request of one they say 0."""
        while number >= len(self._engines):
            self._engines.append(_OfEngine(self, self._labels(len(self._engines))))
        return self._engines[number]

    def text(
        self,
        stats: Sequence[Mapping[str, Any] | None],
        started: Started | None,
        counts: Mapping[str, int] | None = None,
    ) -> bytes:
        """All of it, as Prometheus reads it.

        Args:
            stats: of each engine; None: it does not answer.
            counts: of what the server did with requests, as ``Replicas.counts``; None: nothing.
        """
        registry = CollectorRegistry()
        of_engines = [(tuple(self._labels(engine).values()), one) for engine, one in enumerate(stats)]
        registry.register(_EngineCounts(of_engines, started, counts or {}))
        return generate_latest(self._registry) + generate_latest(registry)


class _GapsOfEngine:
    """Times between tokens of one engine.

    Attributes:
        counts: tokens by bucket; the last one has those above all bounds.
        seconds: the sum.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds, self.counts, self.seconds = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, seconds: float, count: int) -> None:
        """So many tokens, each so long after the one before."""
        self.counts[bisect.bisect_left(self._bounds, seconds)] += count
        self.seconds += seconds * count


class _TokenGaps(Collector):
    """A histogram of something that there is of each token: prometheus_client's own takes locks for each."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name, self._text, self._bounds = name, text, bounds
        self._found: dict[tuple[str, ...], _GapsOfEngine] = {}

    def of(self, labels: tuple[str, ...]) -> _GapsOfEngine:
        """Those of an engine, of whose labels these are the values."""
        return self._found.setdefault(labels, _GapsOfEngine(self._bounds))

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(self._name, self._text, labels=_LABELS)
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        for labels, found in self._found.items():
            family.add_metric(labels, list(zip(names, itertools.accumulate(found.counts), strict=True)), found.seconds)
        yield family


class _OfEngine:
    """The metrics of requests that one engine serves."""

    def __init__(self, metrics: Metrics, labels: Mapping[str, str]) -> None:
        def own(family: Any) -> Any:
            return family.labels(**labels)

        self.cached, self.first = own(metrics._cached), own(metrics._first)
        self.next = metrics.next.of(tuple(labels.values()))
        self.mean, self.whole, self.generated = own(metrics._mean), own(metrics._whole), own(metrics._generated)
        self.prompt, self.max_tokens, self.n = own(metrics._prompt), own(metrics._max_tokens), own(metrics._n)
        self.parts = {part: own(family) for part, family in metrics._parts.items()}
        self._success, self._labels = metrics._success, labels

    def succeed(self, finish_reason: str) -> None:
        self._success.labels(**self._labels, finished_reason=finish_reason).inc()


class RequestObserver:
    """Times of one engine's request as its outputs come.

    Attributes:
        num_prompt_tokens: of its prompt; num_tokens: that came.
    """

    def __init__(self, metrics: Metrics, num_prompt_tokens: int, max_tokens: int | None, n: int) -> None:
        self._metrics, self._arrived = metrics, time.monotonic()
        self.num_prompt_tokens, self._sizes = num_prompt_tokens, (max_tokens, n)
        self._last: dict[int, float] = {}  # of each continuation: when its last token came
        self.num_tokens = 0

    @property
    def seconds(self) -> float:
        """Since the request came."""
        return time.monotonic() - self._arrived

    def take(self, output: Output) -> None:
        """An output came. Of several tokens at once, each took its share of the time."""
        metrics, now = self._metrics.of_engine(output.engine), time.monotonic()
        for piece in output.pieces:
            num_tokens = len(piece.token_ids)
            self.num_tokens += num_tokens
            if num_tokens and piece.index in self._last:
                metrics.next.add((now - self._last[piece.index]) / num_tokens, num_tokens)
            self._last[piece.index] = now
            if piece.finish_reason is not None:
                metrics.succeed(piece.finish_reason)
        if output.times is not None:
            max_tokens, n = self._sizes
            metrics.prompt.observe(self.num_prompt_tokens)
            metrics.n.observe(n)
            if max_tokens is not None:
                metrics.max_tokens.observe(max_tokens)
            metrics.cached.inc(output.num_cached_tokens)
            metrics.generated.observe(self.num_tokens)
            metrics.whole.observe(now - self._arrived)
            self._observe_parts(metrics, output.times)

    def _observe_parts(self, metrics: _OfEngine, times: Times) -> None:
        """What the engine says: of an answer that comes at once, it alone knows when the first token was there."""
        parts = {"queue": times.queue, "prefill": times.prefill, "decode": times.decode}
        if times.first is not None:
            metrics.first.observe(times.first)
        if times.prefill is not None and times.decode is not None:
            parts["inference"] = times.prefill + times.decode
            if self.num_tokens > 1:
                metrics.mean.observe(times.decode / (self.num_tokens - 1))
        for part, seconds in parts.items():
            if seconds is not None:
                metrics.parts[part].observe(seconds)


class _EngineCounts:
    """What the engines count, for one reading. An engine's counts never fall, so these are counters.

    Args:
        stats: the values of each engine's labels, and its statistics, None where it does not answer.
    """

    def __init__(
        self,
        stats: Sequence[tuple[tuple[str, ...], Mapping[str, Any] | None]],
        started: Started | None,
        counts: Mapping[str, int],
    ) -> None:
        self._up = [(labels, float(one is not None)) for labels, one in stats]
        self._stats = [(labels, one) for labels, one in stats if one is not None]
        self._started, self._counts = started, counts

    def collect(self) -> Iterator[Metric]:
        up = GaugeMetricFamily("compiled_llm:engine_up", "1: the engine answers; 0: it does not", labels=_LABELS)
        for labels, value in self._up:
            up.add_metric(labels, value)
        yield up
        for name, text in _OF_SERVER.items():
            family = CounterMetricFamily(f"compiled_llm:{name}", text, labels=_LABELS[:1])
            family.add_metric(self._up[0][0][:1], self._counts.get(name, 0))
            yield family
        if self._started is None:
            return
        for name, (text, field) in _GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=_LABELS)
            for labels, stats in self._stats:
                gauge.add_metric(labels, stats[field])
            yield gauge
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1", labels=_LABELS)
        started = self._started
        config = {"block_size": str(started.block_size), "num_gpu_blocks": str(started.num_kv_blocks)}
        info = GaugeMetricFamily("vllm:cache_config_info", "Sizes of the KV cache", labels=[*_LABELS, *config])
        for labels, stats in self._stats:
            usage.add_metric(labels, stats["used_blocks"] / max(1, stats["num_kv_blocks"]))
            info.add_metric([*labels, *config.values()], 1)
        yield from (usage, info)
        if started.max_loras:
            yield self._adapters(started.max_loras)
        for name, (text, field) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=_LABELS)
            for labels, stats in self._stats:
                if field in stats:
                    counter.add_metric(labels, stats[field])
            if counter.samples:
                yield counter
        positions = CounterMetricFamily(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens of a drafter that were the first draft of a request and step (position 0), the second...",
            labels=[*_LABELS, "position"],
        )
        for labels, stats in self._stats:
            for position, count in enumerate(stats.get("num_accepted_by_position", ())):
                positions.add_metric([*labels, str(position)], count)
        yield positions

    def _adapters(self, max_loras: int) -> Metric:
        """As vLLM has it, without the label of an engine: those of all together."""
        found = [sorted({name for _, stats in self._stats for name in stats[f"{state}_adapters"]})
                 for state in ("running", "waiting")]  # fmt: skip
        loras = {"max_lora": str(max_loras)}
        loras |= zip(("running_lora_adapters", "waiting_lora_adapters"), map(",".join, found), strict=True)
        adapters = GaugeMetricFamily("vllm:lora_requests_info", "Adapters in use, at this time", labels=[*loras])
        adapters.add_metric([*loras.values()], time.time())
        return adapters


def _one_two_five(most: int) -> Iterator[int]:
    """1, 2, 5, 10, 20 and so on, up to ``most``."""
    power = 1
    while power <= most:
        yield from (factor * power for factor in (1, 2, 5) if factor * power <= most)
        power *= 10
