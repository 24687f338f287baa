"""What the prefix cache saves: the time to first token of a first and a second request over one prefix."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass

from gapless.bench.streams import StreamGroup, random_prompts
from gapless.engine import Engine

TAIL_TOKENS = 16


@dataclass(frozen=True)
class SharedPrefixSettings:
    """`prefix_tokens` that two requests share; each goes on with a tail of its own."""

    prefix_tokens: int = 2000
    repeat: int = 5

    @property
    def max_model_len(self) -> int:
        return self.prefix_tokens + TAIL_TOKENS + 1


@dataclass(frozen=True)
class SharedPrefixResult:
    """Medians over distinct prefixes; the ratio (second over first) is of each pair."""

    prefix_tokens: int
    first_ttft_ms: float
    second_ttft_ms: float
    ttft_ratio: float


def measure_shared_prefix(engine: Engine, settings: SharedPrefixSettings) -> SharedPrefixResult:
    """One prefix to warm up, then `repeat` measured ones. EngineError if the engine fails."""
    rng = random.Random(0)
    pairs = [_pair(engine, settings, rng) for _ in range(1 + settings.repeat)][1:]
    return SharedPrefixResult(
        prefix_tokens=settings.prefix_tokens,
        first_ttft_ms=statistics.median(first for first, _ in pairs),
        second_ttft_ms=statistics.median(second for _, second in pairs),
        ttft_ratio=statistics.median(second / first for first, second in pairs),
    )


def _pair(engine: Engine, settings: SharedPrefixSettings, rng: random.Random) -> tuple[float, float]:
    vocab_size = engine.limits.vocab_size
    (prefix,) = random_prompts(rng, vocab_size, 1, settings.prefix_tokens)
    first, second = (
        _ttft_ms(engine, prefix + tail) for tail in random_prompts(rng, vocab_size, 2, TAIL_TOKENS)
    )
    return first, second


def _ttft_ms(engine: Engine, prompt: list[int]) -> float:
    group = StreamGroup(engine, [prompt], 1)
    return (group.wait()[0].times_s[0] - group.started_s) * 1e3
