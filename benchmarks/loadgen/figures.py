"""What streams that ran together say about speed and latency.

The figures are those of `gapless.bench.many_streams`, taken from times at which text came:

- TTFT: from a request's start to its first text.
- TPOT: time from the first text to the last over the tokens after the first. A server may send several tokens
  in one chunk, so the tokens are those that it reports.
- ITL: times between neighbouring chunks of a stream, all streams pooled.
- The tokens of a stream are taken to be spread evenly over its chunks, where tokens of a period are counted.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gapless.bench.streams import percentile

PERCENTS = (50, 90, 99)


class MeasurementError(Exception):
    """A run says nothing about what was asked."""


@dataclass
class StreamTrace:
    """One stream as its client saw it; times by `time.perf_counter`."""

    started_s: float
    chunk_times_s: list[float] = field(default_factory=list)
    num_tokens: int = 0
    prompt_tokens: int = 0
    failure: str | None = None

    @property
    def tokens_per_later_chunk(self) -> float:
        """The first chunk is taken for the first token."""
        return (self.num_tokens - 1) / max(1, len(self.chunk_times_s) - 1)

    @property
    def ttft_s(self) -> float:
        return self.chunk_times_s[0] - self.started_s

    @property
    def tpot_s(self) -> float:
        return (self.chunk_times_s[-1] - self.chunk_times_s[0]) / max(1, self.num_tokens - 1)


def failures(streams: Iterable[StreamTrace]) -> Counter[str]:
    """How often each kind of failure occurred."""
    return Counter(stream.failure for stream in streams if stream.failure is not None)


def prefill_tokens_per_s(streams: Sequence[StreamTrace]) -> float:
    """The tokens of all prompts over the time until the last stream has its first text."""
    last_s = max(stream.chunk_times_s[0] for stream in streams)
    return sum(stream.prompt_tokens for stream in streams) / (
        last_s - min(stream.started_s for stream in streams)
    )


def decode_tokens_per_s(streams: Sequence[StreamTrace], new_tokens: int) -> float:
    """The next `new_tokens` tokens of all streams over their time, from the moment at which the last stream
    has its first text.

    MeasurementError if a stream ended before that many had come: not all decoded together.
    """
    begin_s = max(stream.chunk_times_s[0] for stream in streams)
    chunks = sorted(
        (time_s, stream.tokens_per_later_chunk)
        for stream in streams
        for time_s in stream.chunk_times_s
        if time_s > begin_s
    )
    goal = len(streams) * new_tokens
    num_tokens, end_s = 0.0, begin_s
    for time_s, weight in chunks:
        if num_tokens >= goal - 1e-6 and time_s > end_s:
            break
        num_tokens, end_s = num_tokens + weight, time_s
    if num_tokens < goal - 1e-6 or min(stream.chunk_times_s[-1] for stream in streams) < end_s:
        raise MeasurementError(f"{len(streams)} streams did not decode {new_tokens} tokens together.")
    return num_tokens / (end_s - begin_s)


def latencies(streams: Sequence[StreamTrace]) -> dict[str, float]:
    """Percentiles of TTFT, TPOT and ITL in ms, and requests and output tokens per second of the whole run."""
    begin_s = min(stream.started_s for stream in streams)
    duration_s = max(stream.chunk_times_s[-1] for stream in streams) - begin_s
    num_tokens = sum(stream.num_tokens for stream in streams)
    num_chunks = sum(len(stream.chunk_times_s) for stream in streams)
    seconds = {
        "ttft": [stream.ttft_s for stream in streams],
        "tpot": [stream.tpot_s for stream in streams if stream.num_tokens > 1],
        "itl": [
            later - earlier
            for stream in streams
            for earlier, later in itertools.pairwise(stream.chunk_times_s)
        ],
    }
    return {
        "requests_per_s": len(streams) / duration_s,
        "output_tokens_per_s": num_tokens / duration_s,
        "tokens_per_chunk": num_tokens / num_chunks,
        **{
            f"{name}_p{percent}_ms": percentile(values, percent) * 1e3 if values else 0.0
            for name, values in seconds.items()
            for percent in PERCENTS
        },
    }


def medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """The median of each figure over the rounds."""
    return {name: statistics.median(figures[name] for figures in rounds) for name in rounds[0]}
