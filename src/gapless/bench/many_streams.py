"""Throughput and latency of many streams that arrive at the same time.

Each count of streams is measured in three runs, each with all streams at once:

- *prefill*: new random prompts, one new token each. `prefill_tokens_per_s` is the tokens of all prompts over
  the time until the last stream has its first token; no decoding is mixed in.
- *decode*: the same streams go on. Their prompts (each with the first new token) are in the prefix cache,
  so that all streams decode after a few steps. `decode_tokens_per_s` is the next `new_tokens` tokens of all
  streams over their time, from the moment at which the last stream has its first token. This is how
  llama.cpp's batched bench separates the phases. Without a prefix cache the window is the same, but streams
  that are prefilled first are further in their text when it begins.
- *together*: other new random prompts, `new_tokens` each, prefill and decode mixed as the engine likes.
  Times to first token (TTFT, from the arrival of all), times per output token of a stream after its first
  (TPOT), times between neighbouring tokens (ITL, all streams pooled); `output_tokens_per_s` is all new
  tokens over the whole run.

Every figure is the median of `repeat` such rounds; percentiles are taken within a round.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from gapless.bench.streams import StreamGroup, percentile, random_prompts, token_gaps_s
from gapless.engine import Engine
from gapless.engine.memory import rss_bytes
from gapless.errors import EngineError
from gapless.sampling import check

# Tokens that a stream may have when the last one gets its first, and still decode `new_tokens` beside it. A
# machine with other work may take 100 ms to hand the requests in: many steps of a small model.
_SLACK_TOKENS = 512


@dataclass(frozen=True)
class ManyStreamsSettings:
    """`streams`: the counts to measure, each on its own."""

    streams: tuple[int, ...]
    prompt_tokens: int = 128
    new_tokens: int = 64
    repeat: int = 3

    def __post_init__(self) -> None:
        for count in self.streams:
            check.integer("streams", count, 1)
        check.integer("new_tokens", self.new_tokens, 2)  # there is no time between tokens with one

    @property
    def max_num_seqs(self) -> int:
        return max(self.streams)

    @property
    def max_model_len(self) -> int:
        """What the longest of the runs needs."""
        return self.prompt_tokens + 1 + self.new_tokens + _SLACK_TOKENS


@dataclass(frozen=True)
class ManyStreamsResult:
    """See the module for what the figures mean. `rss_bytes`: memory of the process after the runs."""

    streams: int
    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    output_tokens_per_s: float
    ttft_p50_ms: float
    ttft_p90_ms: float
    ttft_p99_ms: float
    tpot_p50_ms: float
    tpot_p90_ms: float
    tpot_p99_ms: float
    itl_p50_ms: float
    itl_p99_ms: float
    rss_bytes: int


class ManyStreams:
    """Measures one phase at a time."""

    def __init__(self, engine: Engine, settings: ManyStreamsSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._rng = random.Random(0)

    def prefill_and_decode(self, num_streams: int) -> dict[str, float]:
        """Tokens per second of both phases."""
        prompts = self._prompts(num_streams)
        group = StreamGroup(self._engine, prompts, 1)
        streams = group.wait()
        prefill_s = max(stream.times_s[0] for stream in streams) - group.started_s
        for prompt, stream in zip(prompts, streams, strict=True):
            prompt += stream.token_ids
        return {
            "prefill_tokens_per_s": num_streams * self._settings.prompt_tokens / prefill_s,
            "decode_tokens_per_s": self._decode_speed(prompts),
        }

    def together(self, num_streams: int) -> dict[str, float]:
        """Latencies of the streams in ms, and tokens per second of the whole."""
        group = StreamGroup(self._engine, self._prompts(num_streams), self._settings.new_tokens)
        streams = group.wait()
        ttfts_ms = [(stream.times_s[0] - group.started_s) * 1e3 for stream in streams]
        gaps_ms = [[gap_s * 1e3 for gap_s in token_gaps_s(stream)] for stream in streams]
        tpots_ms = [statistics.fmean(gaps) for gaps in gaps_ms]
        itls_ms = [gap for gaps in gaps_ms for gap in gaps]
        num_tokens = sum(len(stream.token_ids) for stream in streams)
        last_s = max(stream.times_s[-1] for stream in streams)
        return {
            "output_tokens_per_s": num_tokens / (last_s - group.started_s),
            **{f"ttft_p{percent}_ms": percentile(ttfts_ms, percent) for percent in (50, 90, 99)},
            **{f"tpot_p{percent}_ms": percentile(tpots_ms, percent) for percent in (50, 90, 99)},
            **{f"itl_p{percent}_ms": percentile(itls_ms, percent) for percent in (50, 99)},
        }

    def _decode_speed(self, prompts: list[list[int]]) -> float:
        new_tokens = self._settings.new_tokens
        group = StreamGroup(self._engine, prompts, new_tokens + _SLACK_TOKENS)
        try:
            group.wait_until_all_decode()
            group.wait_for_steps(new_tokens)
        finally:
            group.cancel()
        streams = group.wait()
        begin_s = max(stream.times_s[0] for stream in streams)
        times_s = sorted(time_s for stream in streams for time_s in stream.times_s if time_s > begin_s)
        end_s = times_s[len(prompts) * new_tokens - 1]
        if min(stream.times_s[-1] for stream in streams) < end_s:
            raise EngineError(
                f"{len(prompts)} streams did not decode {new_tokens} tokens together: the KV cache is too "
                "small for them. Measure fewer streams or tokens."
            )
        return sum(time_s <= end_s for time_s in times_s) / (end_s - begin_s)

    def _prompts(self, num_streams: int) -> list[list[int]]:
        vocab_size = self._engine.limits.vocab_size
        return random_prompts(self._rng, vocab_size, num_streams, self._settings.prompt_tokens)


def measure_many_streams(engine: Engine, settings: ManyStreamsSettings) -> Iterator[ManyStreamsResult]:
    """One result for each count of streams, as it is ready. EngineError if the engine fails."""
    bench = ManyStreams(engine, settings)
    bench.prefill_and_decode(min(settings.streams))  # warms up
    for num_streams in settings.streams:
        rounds = [
            {**bench.prefill_and_decode(num_streams), **bench.together(num_streams)}
            for _ in range(settings.repeat)
        ]
        medians = {name: statistics.median(figures[name] for figures in rounds) for name in rounds[0]}
        yield ManyStreamsResult(streams=num_streams, rss_bytes=rss_bytes(), **medians)
