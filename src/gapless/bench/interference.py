"""What a long prompt does to the streams beside it: the time between their tokens without and with it."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass

from gapless.bench.streams import StreamGroup, percentile, random_prompts, token_gaps_s
from gapless.engine import Engine

# Steps that may pass around the window and the prefill, while this side notices and hands in.
_SLACK_TOKENS = 256


@dataclass(frozen=True)
class InterferenceSettings:
    """`new_tokens`: tokens of each stream in the windows without the long prompt, before and after it."""

    streams: int = 8
    prompt_tokens: int = 128
    long_prompt: int = 4000
    new_tokens: int = 64
    repeat: int = 3

    @property
    def max_num_seqs(self) -> int:
        return self.streams + 1

    @property
    def stream_tokens(self) -> int:
        """Enough for the whole run: the slowest prefill takes one row of each step."""
        return 2 * self.new_tokens + self.long_prompt + _SLACK_TOKENS

    @property
    def max_model_len(self) -> int:
        """What the streams need."""
        return self.prompt_tokens + self.stream_tokens


@dataclass(frozen=True)
class InterferenceResult:
    """Times between tokens (ITL) of all running streams: while the long prompt is prefilled, and in windows
    before and after it. What streams take grows with their context, so "alone" is the mean of before and
    after. Medians of all rounds; the ratio is of each round."""

    streams: int
    itl_p50_ms: float
    itl_p99_ms: float
    loaded_itl_p50_ms: float
    loaded_itl_p99_ms: float
    itl_p99_ratio: float
    long_ttft_ms: float


def measure_interference(engine: Engine, settings: InterferenceSettings) -> InterferenceResult:
    """One round to warm up, then `repeat` measured ones. EngineError if the engine fails."""
    rng = random.Random(0)
    rounds = [_round(engine, settings, rng) for _ in range(1 + settings.repeat)][1:]
    medians = {name: statistics.median(figures[name] for figures in rounds) for name in rounds[0]}
    return InterferenceResult(streams=settings.streams, **medians)


def _round(engine: Engine, settings: InterferenceSettings, rng: random.Random) -> dict[str, float]:
    vocab_size = engine.limits.vocab_size
    prompts = random_prompts(rng, vocab_size, settings.streams, settings.prompt_tokens)
    running = StreamGroup(engine, prompts, settings.stream_tokens)
    try:
        running.wait_until_all_decode()
        begin_s = time.perf_counter()
        running.wait_for_steps(settings.new_tokens)
        long = StreamGroup(engine, random_prompts(rng, vocab_size, 1, settings.long_prompt), 1)
        long_first_s = long.wait()[0].times_s[0]
        running.wait_for_steps(settings.new_tokens)
        end_s = time.perf_counter()
    finally:
        running.cancel()
    streams = running.wait()

    def gaps_ms(after_s: float, until_s: float) -> list[float]:
        return [gap_s * 1e3 for stream in streams for gap_s in token_gaps_s(stream, after_s, until_s)]

    before, after = gaps_ms(begin_s, long.started_s), gaps_ms(long_first_s, end_s)
    loaded = gaps_ms(long.started_s, long_first_s)

    def alone(percent: float) -> float:
        return (percentile(before, percent) + percentile(after, percent)) / 2

    p99_ms, loaded_p99_ms = alone(99), percentile(loaded, 99)
    return {
        "itl_p50_ms": alone(50),
        "itl_p99_ms": p99_ms,
        "loaded_itl_p50_ms": percentile(loaded, 50),
        "loaded_itl_p99_ms": loaded_p99_ms,
        "itl_p99_ratio": loaded_p99_ms / p99_ms,
        "long_ttft_ms": (long_first_s - long.started_s) * 1e3,
    }
