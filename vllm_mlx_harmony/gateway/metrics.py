"""The metrics at ``/metrics``: requests, times, tokens and the state of the engines.

What vLLM measures, too, has its name (https://docs.vllm.ai/en/latest/usage/metrics.html) after a
prefix of our own: with that of vLLM, an engine and the gateway in front of it would be counted
together. ``by_key`` adds the name of the key to requests and tokens; no metric contains a key.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, get_args

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from vllm_mlx_harmony.gateway.access_log import Access
from vllm_mlx_harmony.gateway.router import Backend, Fleet
from vllm_mlx_harmony.gateway.routing import Why

_NAME = "vllm_mlx_harmony"
_SECONDS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_PER_TOKEN = (0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)


class Metrics:
    """The metrics of one gateway."""

    def __init__(self, fleet: Fleet, *, by_key: bool = False) -> None:
        self.by_key = by_key
        labels = ["key"] if by_key else []
        self.registry = CollectorRegistry()
        options: dict[str, Any] = {"namespace": _NAME, "registry": self.registry}
        self.requests = Counter(
            "requests",
            "Finished requests, by API and result.",
            ["api", "stream", "result", *labels],
            **options,
        )
        self.running = Gauge("requests_running", "Requests in progress.", **options)
        self.seconds = Histogram(
            "e2e_request_latency_seconds",
            "Time from reading a request to its last token.",
            ["api"],
            buckets=_SECONDS,
            **options,
        )
        self.first = Histogram(
            "time_to_first_token_seconds",
            "Time from reading a request to its first token.",
            ["api"],
            buckets=_SECONDS,
            **options,
        )
        self.per_token = Histogram(
            "request_time_per_output_token_seconds",
            "Time between two tokens of an answer, on average.",
            ["api"],
            buckets=_PER_TOKEN,
            **options,
        )
        self.prompt = Counter("prompt_tokens", "Prompt tokens.", labels, **options)
        self.queries = Counter(
            "prefix_cache_queries", "Prompt tokens that may have been cached.", **options
        )
        self.hits = Counter(
            "prefix_cache_hits", "Prompt tokens that engines reported as cached.", **options
        )
        self.generated = Counter(
            "generation_tokens",
            "Generated tokens: in reasoning, in calls, and content, which includes all headers.",
            ["channel", *labels],
            **options,
        )
        self.reasoning_ended = Counter(
            "reasoning_ended",
            "Requests whose reasoning was cut short, by reason.",
            ["reason"],
            **options,
        )
        self.refused = Counter(
            "refused", "Requests rejected for their key or the rate limit.", ["reason"], **options
        )
        self.registry.register(_Engines(fleet))

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _Engines(Collector):
    """Metrics of the engines, read when they are scraped."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        rows: tuple[tuple[str, str, Callable[[Backend], float]], ...] = (
            ("up", "1 while the engine gets requests.", lambda each: float(each.up)),
            ("requests", "Requests in progress on the engine.", lambda each: float(each.in_flight)),
        )
        for name, about, value in rows:
            family = GaugeMetricFamily(f"{_NAME}_engine_{name}", about, labels=["engine"])
            sums: dict[str, float] = {}
            for each in self._fleet.backends:  # one URL may be both draining and configured again
                sums[each.spec.url] = sums.get(each.spec.url, 0.0) + value(each)
            for url, number in sums.items():
                family.add_metric([url], number)
            yield family
        routed = CounterMetricFamily(
            f"{_NAME}_routed",
            "Requests by the reason for their engine: it has the prefix, the conversation moved "
            "from an engine that is down or overloaded, or it is new.",
            labels=["why"],
        )
        for why in get_args(Why):
            routed.add_metric([why], self._fleet.routed[why])
        yield routed
        yield CounterMetricFamily(
            f"{_NAME}_retried", "Retries on another engine.", value=self._fleet.retried
        )


class RequestTracker:
    """Records one request; a ``server.host.Tracker``, where its methods are described."""

    def __init__(
        self,
        metrics: Metrics,
        api: str,
        *,
        stream: bool,
        access: Access | None = None,
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
        self._begun = time.monotonic()
        self._first: float | None = None
        self._finished = False
        metrics.running.inc()

    def observe_ttft(self) -> None:
        if self._first is None:
            self._first = time.monotonic()
            self._metrics.first.labels(self._api).observe(self._first - self._begun)
            if self._access is not None:
                self._access.first = time.monotonic() - self._access.begun

    def reasoning_ended(self, reason: str) -> None:
        self._metrics.reasoning_ended.labels(reason).inc()

    def finish(
        self,
        *,
        result: str,
        prompt_tokens: int = 0,
        completion_tokens: int = 0,
        cached_tokens: int = 0,
        reasoning_tokens: int = 0,
        call_tokens: int = 0,
    ) -> None:
        if self._finished:
            return
        self._finished = True
        metrics = self._metrics
        metrics.running.dec()
        metrics.requests.labels(self._api, self._stream, result, *self._key).inc()
        now = time.monotonic()
        metrics.seconds.labels(self._api).observe(now - self._begun)
        if self._first is not None and completion_tokens > 1:
            between = (now - self._first) / (completion_tokens - 1)
            metrics.per_token.labels(self._api).observe(between)
        (metrics.prompt.labels(*self._key) if self._key else metrics.prompt).inc(prompt_tokens)
        metrics.queries.inc(prompt_tokens)
        metrics.hits.inc(cached_tokens)
        for channel, tokens in (
            ("reasoning", reasoning_tokens),
            ("calls", call_tokens),
            ("content", completion_tokens - reasoning_tokens - call_tokens),
        ):
            metrics.generated.labels(channel, *self._key).inc(tokens)
        self._spend(prompt_tokens + completion_tokens)
        if (access := self._access) is not None:
            access.result, access.generating = result, False
            access.input, access.cached = prompt_tokens, cached_tokens
            access.output, access.reasoning = completion_tokens, reasoning_tokens
            access.ended()
