"""Speed by context length: prefill up to a length, decode at that depth, and the memory of the KV cache."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

from gapless.bench.streams import StreamGroup, random_prompts
from gapless.engine import Engine
from gapless.engine.memory import rss_bytes

_WARM_UP_TOKENS = 512


@dataclass(frozen=True)
class ContextLengthSettings:
    """`contexts` are prompt lengths; they are measured from the shortest to the longest."""

    contexts: tuple[int, ...]
    new_tokens: int = 64
    repeat: int = 1

    @property
    def max_model_len(self) -> int:
        return max(self.contexts) + self.new_tokens + 1


@dataclass(frozen=True)
class ContextLengthResult:
    """`prefill_tokens_per_s`: the prompt's tokens over its time to first token; `decode_tokens_per_s`: of
    the tokens after that. `kv_bytes`: what so many tokens should take in the KV cache; `rss_growth_bytes`:
    by how much the process has grown since it had served nothing but its warm-up, whose share of the cache
    is counted in."""

    context: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    ttft_s: float
    kv_bytes: int
    rss_growth_bytes: int


def measure_context_length(
    engine: Engine, settings: ContextLengthSettings, kv_bytes_per_token: float
) -> Iterator[ContextLengthResult]:
    """One result for each length, as it is ready. The engine must not have a prefix cache: it would keep the
    blocks of earlier prompts, and the memory could not be compared. EngineError if the engine fails."""
    rng = random.Random(0)
    warm_up = min(_WARM_UP_TOKENS, *settings.contexts)
    _times_s(engine, rng, warm_up, 1)
    base_bytes = rss_bytes() - int(warm_up * kv_bytes_per_token)
    for context in sorted(settings.contexts):
        runs = [_times_s(engine, rng, context, settings.new_tokens) for _ in range(settings.repeat)]
        ttft_s = statistics.median(ttft_s for ttft_s, _ in runs)
        decode_s = statistics.median(decode_s for _, decode_s in runs)
        yield ContextLengthResult(
            context=context,
            prefill_tokens_per_s=context / ttft_s,
            decode_tokens_per_s=settings.new_tokens / decode_s,
            ttft_s=ttft_s,
            kv_bytes=int((context + settings.new_tokens) * kv_bytes_per_token),
            rss_growth_bytes=rss_bytes() - base_bytes,
        )


def _times_s(engine: Engine, rng: random.Random, context: int, new_tokens: int) -> tuple[float, float]:
    """Seconds to the first token, and from there until `new_tokens` more have come."""
    prompts = random_prompts(rng, engine.limits.vocab_size, 1, context)
    group = StreamGroup(engine, prompts, new_tokens + 1)
    (stream,) = group.wait()
    return stream.times_s[0] - group.started_s, stream.times_s[-1] - stream.times_s[0]
