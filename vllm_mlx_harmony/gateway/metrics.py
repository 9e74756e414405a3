"""The metrics at ``/metrics``: requests, times, tokens and the state of the engines.

What vLLM measures, too, has its name (https://docs.vllm.ai/en/latest/usage/metrics.html) after a
prefix of our own: with that of vLLM, an engine and the gateway in front of it would be counted
together. ``by_key`` adds the name of the key to requests and tokens; no metric contains a key.

With several workers (`workers`), prometheus_client writes every value to a file, and the worker
that is scraped sums them up. What a ``Collector`` reads from its own process cannot be summed:
whether engines are up is what this worker knows, and calls of tools are not shown.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Iterator
from functools import cache, partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from vllm_mlx_harmony.core.deltas import Usage
from vllm_mlx_harmony.gateway.access_log import Entry
from vllm_mlx_harmony.gateway.fleet import NAMESPACE, Fleet
from vllm_mlx_harmony.gateway.workers import METRICS_VARIABLE

_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_PER_TOKEN = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)


class Metrics:
    """The metrics of one gateway."""

    def __init__(self, fleet: Fleet, *, by_key: bool = False) -> None:
        self.by_key = by_key
        labels = ["key"] if by_key else []
        self.registry = CollectorRegistry()
        counter = partial(Counter, namespace=NAMESPACE, registry=self.registry)
        histogram = partial(
            Histogram, labelnames=["api"], namespace=NAMESPACE, registry=self.registry
        )
        self.requests = counter(
            "requests",
            "Finished requests, by API and result.",
            ["api", "stream", "result", *labels],
        )
        self.running = Gauge(
            "requests_running",
            "Requests in progress.",
            multiprocess_mode="livesum",
            namespace=NAMESPACE,
            registry=self.registry,
        )
        self.seconds = histogram(
            "e2e_request_latency_seconds",
            "Time from reading a request to its last token.",
            buckets=_SECONDS,
        )
        self.first = histogram(
            "time_to_first_token_seconds",
            "Time from reading a request to its first token.",
            buckets=_SECONDS,
        )
        self.per_token = histogram(
            "request_time_per_output_token_seconds",
            "Time between two tokens of an answer, on average.",
            buckets=_PER_TOKEN,
        )
        self.prompt = counter("prompt_tokens", "Prompt tokens.", labels)
        self.queries = counter("prefix_cache_queries", "Prompt tokens that may have been cached.")
        self.hits = counter("prefix_cache_hits", "Prompt tokens that engines reported as cached.")
        self.generated = counter(
            "generation_tokens",
            "Generated tokens by channel; headers count as content.",
            ["channel", *labels],
        )
        self.predicted = counter(
            "prediction_tokens",
            "Tokens that engines guessed, by whether they were accepted or rejected.",
            ["result"],
        )
        self.reasoning_ended = counter(
            "reasoning_ended", "Requests whose reasoning was cut short, by reason.", ["reason"]
        )
        self.refused = counter(
            "refused", "Requests rejected for their key or the rate limit.", ["reason"]
        )
        for reason in ("key", "rate limit"):  # a rate needs a zero before the first rejection
            self.refused.labels(reason)
        for metric in (fleet.routed, fleet.retried, fleet.requests):
            self.registry.register(metric)
        for labelled in (
            *(self.requests, self.seconds, self.first, self.per_token, self.prompt),
            *(self.generated, self.predicted, fleet.routed, fleet.requests),
        ):  # a request looks up about 15, which takes a tenth as long from a cache
            labelled.labels = cache(labelled.labels)  # type: ignore[method-assign, assignment]
        self.shown = self.registry
        if METRICS_VARIABLE in os.environ:
            self.shown = CollectorRegistry()
            MultiProcessCollector(self.shown)  # type: ignore[no-untyped-call]
        self.shown.register(_Engines(fleet))

    def start(self, keys: Collection[str]) -> None:
        """Creates the series of tokens of these keys: Prometheus' ``increase`` cannot know that a
        series began at 0 unless it has seen that."""
        for key in [(name,) for name in keys or ("",)] if self.by_key else [()]:
            for channel in Usage(0, 0).by_channel:
                self.generated.labels(channel, *key)
            if key:
                self.prompt.labels(*key)

    def text(self) -> bytes:
        return generate_latest(self.shown)


class _Engines(Collector):
    """The state of the engines, read when it is scraped."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[GaugeMetricFamily]:
        about = "1 while the engine gets requests."
        family = GaugeMetricFamily(f"{NAMESPACE}_engine_up", about, labels=["engine"])
        up: dict[str, bool] = {}
        for backend in self._fleet.backends:  # one URL may be both draining and configured again
            up[backend.name] = up.get(backend.name, False) or backend.up
        for name, is_up in up.items():
            family.add_metric([name], float(is_up))
        yield family


class RequestTracker:
    """Records one request; a ``server.host.Tracker``, where its methods are described."""

    def __init__(
        self,
        metrics: Metrics,
        api: str,
        *,
        stream: bool,
        access: Entry | None = None,
        spend: Callable[[int], None],
    ) -> None:
        self._access = access
        self._spend = spend
        self._key = (access.key or "" if access else "",) if metrics.by_key else ()
        if access is not None:
            access.generating = True
        self._metrics = metrics
        self._api = api
        self._stream = "true" if stream else "false"
        self._started = time.monotonic()
        self._first: float | None = None
        self._finished = False
        metrics.running.inc()

    def observe_ttft(self) -> None:
        if self._first is None:
            self._first = time.monotonic()
            self._metrics.first.labels(self._api).observe(self._first - self._started)
            if self._access is not None:
                self._access.first = time.monotonic() - self._access.started

    def reasoning_ended(self, reason: str) -> None:
        self._metrics.reasoning_ended.labels(reason).inc()

    def finish(self, result: str, usage: Usage) -> None:
        if self._finished:
            return
        self._finished = True
        metrics = self._metrics
        metrics.running.dec()
        metrics.requests.labels(self._api, self._stream, result, *self._key).inc()
        now = time.monotonic()
        metrics.seconds.labels(self._api).observe(now - self._started)
        if self._first is not None and usage.completion_tokens > 1:
            between = (now - self._first) / (usage.completion_tokens - 1)
            metrics.per_token.labels(self._api).observe(between)
        (metrics.prompt.labels(*self._key) if self._key else metrics.prompt).inc(
            usage.prompt_tokens
        )
        metrics.queries.inc(usage.prompt_tokens)
        metrics.hits.inc(usage.cached_tokens)
        for channel, tokens in usage.by_channel.items():
            metrics.generated.labels(channel, *self._key).inc(tokens)
        metrics.predicted.labels("accepted").inc(usage.accepted_prediction_tokens)
        metrics.predicted.labels("rejected").inc(usage.rejected_prediction_tokens)
        self._spend(usage.prompt_tokens + usage.completion_tokens)
        if (access := self._access) is not None:
            access.result, access.generating = result, False
            access.input, access.cached = usage.prompt_tokens, usage.cached_tokens
            access.output, access.reasoning = usage.completion_tokens, usage.reasoning_tokens
            access.ended()
