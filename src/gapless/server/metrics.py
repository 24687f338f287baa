"""Prometheus metrics: vLLM's names where they mean the same, so that dashboards work; else our own."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from gapless.server.messages import Metrics, ModelFacts, Stats
    from gapless.server.stream import Generation

_LATENCY_BUCKETS_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
)
_TOKEN_TIME_BUCKETS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1,
    2.5,
    5,
)
_E2E_BUCKETS_S = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_COUNT_BUCKETS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)

# Gauges and counters that mirror the engine's own: name, help, and the counter's name in `Engine.stats`.
_GAUGES = (
    ("vllm:num_requests_running", "Sequences that have a slot.", "num_running"),
    ("vllm:num_requests_waiting", "Sequences that wait for a slot.", "num_waiting"),
)
_COUNTERS = (
    ("vllm:num_preemptions", "Sequences that gave their blocks to others.", "num_preemptions"),
    (
        "vllm:prefix_cache_queries",
        "Prompt tokens that were looked for in the prefix cache.",
        "num_prompt_tokens",
    ),
    ("vllm:prefix_cache_hits", "Prompt tokens that were found there.", "num_cached_tokens"),
    ("gapless:steps", "Steps of the executor.", "num_steps"),
    ("gapless:step_rows", "Rows (tokens) that steps have computed.", "num_rows"),
    ("gapless:busy_seconds", "Time in steps.", "busy_s"),
)


class ServerMetrics:
    """All metrics of one server. Nothing is global: servers in one process do not meet."""

    def __init__(self, model_name: str) -> None:
        self.registry = CollectorRegistry()
        self._labels = {"model_name": model_name}
        self._kv_usage = self._gauge("vllm:kv_cache_usage_perc", "Used share of the KV cache, 0 to 1.")
        self._gauges = {key: self._gauge(name, text) for name, text, key in _GAUGES}
        self._counters = {key: self._counter(name, text) for name, text, key in _COUNTERS}
        self._last_values: dict[str, float] = {}
        self._has_told_cache = False
        self._prompt_tokens = self._counter(
            "vllm:prompt_tokens", "Prompt tokens of requests that have ended."
        )
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens that were generated.")
        self._success = Counter(
            "vllm:request_success",
            "Choices that have ended, by the reason.",
            [*self._labels, "finished_reason"],
            registry=self.registry,
        )
        self._refused = self._counter(
            "gapless:requests_refused", "Requests refused because the queue was full."
        )
        self._restarts = self._counter(
            "gapless:worker_restarts", "Processes that died, and are started again."
        )
        self._open = self._gauge("gapless:open_requests", "Prompts whose answer is not complete.")
        self._token_gaps = TokenGaps(self._labels)
        self.registry.register(self._token_gaps)
        histogram = self._histogram
        self._ttft = histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", _LATENCY_BUCKETS_S
        )
        self._itl = PlainHistogram(
            "vllm:inter_token_latency_seconds",
            "Between the tokens of a choice.",
            _TOKEN_TIME_BUCKETS_S,
            self._labels,
        )
        self.registry.register(self._itl)
        self._tpot = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean of a request's tokens.", _TOKEN_TIME_BUCKETS_S
        )
        self._e2e = histogram(
            "vllm:e2e_request_latency_seconds", "From arrival to the last token.", _E2E_BUCKETS_S
        )
        self._queue = histogram(
            "vllm:request_queue_time_seconds", "From arrival to the slot.", _E2E_BUCKETS_S
        )
        self._prefill = histogram(
            "vllm:request_prefill_time_seconds", "From the slot to the first token.", _E2E_BUCKETS_S
        )
        self._decode = histogram(
            "vllm:request_decode_time_seconds", "From first to last token.", _E2E_BUCKETS_S
        )
        self._prompt_length = histogram(
            "vllm:request_prompt_tokens", "Prompt tokens of a request.", _COUNT_BUCKETS
        )
        self._output_length = histogram(
            "vllm:request_generation_tokens", "New tokens of a request.", _COUNT_BUCKETS
        )
        self._rate = RateMeter()

    def generated(self, num_tokens: int, now_s: float) -> None:
        """So many new tokens have come, of all choices together."""
        self._generation_tokens.inc(num_tokens)
        self._rate.add(now_s, num_tokens)

    def gained(self, generation: Generation, index: int, num_tokens: int, now_s: float) -> None:
        """A choice gained tokens."""
        if num_tokens:
            times_s = generation.last_chunk_s
            if (last_s := times_s.get(index)) is not None:
                self._itl.observe((now_s - last_s) / num_tokens)
            times_s[index] = now_s

    def finished(self, reason: str, num_choices: int) -> None:
        """So many choices have ended."""
        if num_choices:
            self._success.labels(**self._labels, finished_reason=reason).inc(num_choices)

    def ended(self, metrics: Metrics) -> None:
        """A generation has ended by itself."""
        self._prompt_tokens.inc(metrics.num_prompt_tokens)
        self._prompt_length.observe(metrics.num_prompt_tokens)
        self._output_length.observe(metrics.num_output_tokens)
        times = (
            (self._ttft, metrics.ttft_s),
            (self._e2e, metrics.e2e_s),
            (self._tpot, metrics.tpot_s),
            (self._queue, metrics.queue_s),
        )
        for histogram, value in times:
            if value is not None:
                histogram.observe(value)
        if metrics.ttft_s is not None and metrics.queue_s is not None and metrics.e2e_s is not None:
            self._prefill.observe(metrics.ttft_s - metrics.queue_s)
            self._decode.observe(metrics.e2e_s - metrics.ttft_s)

    def embedded(self, num_prompt_tokens: int) -> None:
        """A prompt was embedded."""
        self._prompt_tokens.inc(num_prompt_tokens)
        self._prompt_length.observe(num_prompt_tokens)
        self.finished("stop", 1)

    def refused(self) -> None:
        """A request came too many."""
        self._refused.inc()

    def watch_open(self, count: Callable[[], int]) -> None:
        """`count` tells how many prompts have no complete answer."""
        self._open.set_function(count)

    def restarted(self) -> None:
        """A process died."""
        self._restarts.inc()

    @property
    def tokens_per_s(self) -> float:
        """Generated of late."""
        return self._rate.per_second(time.perf_counter())

    def render(self, stats: Stats | None, facts: ModelFacts | None) -> bytes:
        """The text format of Prometheus."""
        if stats is not None:
            self._mirror(stats.values)
            self._token_gaps.counts = stats.gap_histogram
        if facts is not None:
            self._tell_cache(facts)
        return generate_latest(self.registry)

    def _mirror(self, values: Mapping[str, float]) -> None:
        for key, gauge in self._gauges.items():
            gauge.set(values[key])
        self._kv_usage.set(kv_usage(values))
        for key, counter in self._counters.items():
            value = values[key]
            # An engine that was started again counts from zero.
            counter.inc(max(0.0, value - self._last_values.get(key, 0.0)))
            self._last_values[key] = value

    def engine_restarted(self) -> None:
        """The engine's counters begin anew."""
        self._last_values.clear()

    def _tell_cache(self, facts: ModelFacts) -> None:
        if not self._has_told_cache:
            self._has_told_cache = True
            labels = {
                "block_size": str(facts.block_size),
                "num_gpu_blocks": str(facts.num_blocks),  # vLLM's name on every kind of device
                "cache_dtype": facts.kv_dtype,
            }
            info = Gauge(
                "vllm:cache_config_info",
                "Shape of the KV cache.",
                [*self._labels, *labels],
                registry=self.registry,
            )
            info.labels(**self._labels, **labels).set(1)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(name, text, list(self._labels), registry=self.registry).labels(**self._labels)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, list(self._labels), registry=self.registry).labels(**self._labels)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        histogram = Histogram(name, text, list(self._labels), buckets=buckets, registry=self.registry)
        return histogram.labels(**self._labels)


class PlainHistogram(Collector):
    """A histogram for what happens with every token: of one thread, and so without locks."""

    def __init__(self, name: str, text: str, bounds: Sequence[float], labels: Mapping[str, str]) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._labels = labels
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Counts a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        buckets = [(name, float(total)) for name, total in zip(names, accumulate(self._counts), strict=True)]
        family = HistogramMetricFamily(self._name, self._text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), buckets, self._sum)
        yield family


class TokenGaps(Collector):
    """The engine's histogram of the time between steps: `counts[i]` gaps in [2^i, 2^(i+1)) us."""

    def __init__(self, labels: Mapping[str, str]) -> None:
        self._labels = labels
        self.counts: Sequence[int] = ()

    def collect(self) -> Iterator[Metric]:
        """For the registry."""
        buckets = [
            (str(2 ** (place + 1) / 1e6), float(total)) for place, total in enumerate(accumulate(self.counts))
        ]
        family = HistogramMetricFamily(
            "gapless:token_gap_seconds", "Time between two steps.", labels=list(self._labels)
        )
        family.add_metric(list(self._labels.values()), [*buckets, ("+Inf", float(sum(self.counts)))], None)
        yield family


class RateMeter:
    """Events per second over the last few seconds."""

    WINDOW_S = 4

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}  # second → events

    def add(self, now_s: float, count: int) -> None:
        second = int(now_s)
        if second not in self._counts:
            self._counts = {at: n for at, n in self._counts.items() if at > second - self.WINDOW_S}
            self._counts[second] = 0
        self._counts[second] += count

    def per_second(self, now_s: float) -> float:
        """Over the whole seconds before this one."""
        second = int(now_s)
        return sum(n for at, n in self._counts.items() if second - self.WINDOW_S < at < second) / (
            self.WINDOW_S - 1
        )


def kv_usage(values: Mapping[str, float]) -> float:
    """Used share of the KV cache. Blocks that only the prefix cache still knows count as free."""
    num_blocks = values["num_blocks"]
    return (num_blocks - values["num_free_blocks"]) / num_blocks if num_blocks else 0.0
