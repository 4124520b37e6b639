"""The server's figures in Prometheus' text format: the engine's counters as they stand, times as histograms."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from jrl.rollout.service import Snapshot

FIRST_TOKEN_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)


class _EngineFigures(Collector):
    """Reads the engine's snapshot whenever somebody looks."""

    def __init__(self, snapshot: Callable[[], Snapshot]):
        self._snapshot = snapshot

    def collect(self) -> Iterator[Metric]:
        now = self._snapshot()
        yield GaugeMetricFamily("jrl_requests_running", "requests with a first token and not yet answered", now.running)
        yield GaugeMetricFamily("jrl_requests_waiting", "requests without a first token", now.waiting)
        yield GaugeMetricFamily("jrl_weights_version", "version of the weights that are served", now.version)
        yield CounterMetricFamily("jrl_prompt_tokens", "prompt tokens of accepted requests", now.prompt_tokens)
        yield CounterMetricFamily("jrl_generated_tokens", "tokens sampled", now.generated_tokens)
        yield CounterMetricFamily("jrl_prefix_cache_hit_tokens", "prompt tokens found in the prefix cache", now.prefix_hit_tokens)
        yield CounterMetricFamily("jrl_preemptions", "samples that gave their pages back for a while", now.preemptions)
        pages = GaugeMetricFamily("jrl_pages", "pages of the KV pool by what they hold", labels=("state",))
        for state, count in now.pages.items():
            pages.add_metric((state,), count)
        yield pages


class ServerMetrics:
    """One server's figures.

    Args:
      snapshot: the engine's, as they stand.
    """

    def __init__(self, snapshot: Callable[[], Snapshot]):
        self._registry = CollectorRegistry()
        self._registry.register(_EngineFigures(snapshot))
        self._first_token = Histogram(
            "jrl_time_to_first_token_seconds", "from a request's acceptance to its first token", buckets=FIRST_TOKEN_S,
            registry=self._registry,
        )  # fmt: skip
        self._seconds = Histogram(
            "jrl_request_seconds", "from a request's arrival to the end of the answer", ("endpoint",), buckets=REQUEST_S,
            registry=self._registry,
        )  # fmt: skip
        self._requests = Counter("jrl_requests", "answered requests", ("endpoint", "outcome"), registry=self._registry)

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def answered(self, endpoint: str, outcome: str, seconds: float) -> None:
        """A request has been answered or its client has gone; `outcome` is the status, or `disconnected`."""
        self._requests.labels(endpoint, outcome).inc()
        self._seconds.labels(endpoint).observe(seconds)

    def text(self) -> bytes:
        return generate_latest(self._registry)
