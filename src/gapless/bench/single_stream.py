"""Prefill and decode speed of one stream, measured as llama-bench measures them."""

from __future__ import annotations

import random
import statistics
from dataclasses import dataclass

from gapless.engine import Engine
from gapless.sampling import SamplingParams


@dataclass(frozen=True)
class SingleStreamSettings:
    """`depth` tokens (at least 1) are in the cache when decoding starts; `repeat` runs are measured."""

    prompt_tokens: int = 512
    new_tokens: int = 64
    depth: int = 1
    repeat: int = 5

    @property
    def max_model_len(self) -> int:
        """What the longest of the runs needs."""
        return max(self.prompt_tokens + 1, self.depth + self.new_tokens + 1)


@dataclass(frozen=True)
class SingleStreamResult:
    """Tokens per second of each run, in order."""

    pp_runs: list[float]
    tg_runs: list[float]

    @property
    def pp_tokens_per_s(self) -> float:
        """Median."""
        return statistics.median(self.pp_runs)

    @property
    def tg_tokens_per_s(self) -> float:
        """Median."""
        return statistics.median(self.tg_runs)


def measure_single_stream(engine: Engine, settings: SingleStreamSettings) -> SingleStreamResult:
    """Runs prefill and decode alternately, after one round to warm up. EngineError if the engine fails."""
    rng = random.Random(0)
    pp_runs, tg_runs = [], []
    for round_number in range(1 + settings.repeat):
        pp, tg = _prefill_speed(engine, settings, rng), _decode_speed(engine, settings, rng)
        if round_number > 0:
            pp_runs.append(pp)
            tg_runs.append(tg)
    return SingleStreamResult(pp_runs, tg_runs)


def _prefill_speed(engine: Engine, settings: SingleStreamSettings, rng: random.Random) -> float:
    """Prompt tokens over the time to the first new token."""
    ttft_s, _ = _times(engine, settings.prompt_tokens, 1, rng)
    return settings.prompt_tokens / ttft_s


def _decode_speed(engine: Engine, settings: SingleStreamSettings, rng: random.Random) -> float:
    """New tokens over their time; the first one belongs to the prefill and starts the clock."""
    _, decode_s = _times(engine, settings.depth, settings.new_tokens + 1, rng)
    return settings.new_tokens / decode_s


def _times(engine: Engine, num_prompt: int, num_new: int, rng: random.Random) -> tuple[float, float]:
    """Seconds to the first new token, and from there to the last one."""
    prompt = [rng.randrange(engine.limits.vocab_size) for _ in range(num_prompt)]
    params = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True)
    metrics = engine.submit(prompt, params).result().metrics
    assert metrics.ttft_s is not None
    assert metrics.e2e_s is not None
    return metrics.ttft_s, metrics.e2e_s - metrics.ttft_s
