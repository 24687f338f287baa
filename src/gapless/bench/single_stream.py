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


class SingleStream:
    """Measures one speed at a time."""

    def __init__(self, engine: Engine, settings: SingleStreamSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._rng = random.Random(0)

    def prefill_speed(self) -> float:
        """Prompt tokens over the seconds to the first new token."""
        ttft_s, _ = self._times(self._settings.prompt_tokens, 1)
        return self._settings.prompt_tokens / ttft_s

    def decode_speed(self) -> float:
        """New tokens over their seconds; the prefill's own one comes before and starts the clock."""
        _, decode_s = self._times(self._settings.depth, self._settings.new_tokens + 1)
        return self._settings.new_tokens / decode_s

    def _times(self, num_prompt: int, num_new: int) -> tuple[float, float]:
        """Seconds to the first new token, and from there to the last one."""
        prompt = [self._rng.randrange(self._engine.limits.vocab_size) for _ in range(num_prompt)]
        params = SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True)
        metrics = self._engine.submit(prompt, params).result().metrics
        assert metrics.ttft_s is not None
        assert metrics.e2e_s is not None
        return metrics.ttft_s, metrics.e2e_s - metrics.ttft_s


def measure_single_stream(engine: Engine, settings: SingleStreamSettings) -> SingleStreamResult:
    """Prefill and decode in turns, after one round to warm up. EngineError if the engine fails."""
    stream = SingleStream(engine, settings)
    result = SingleStreamResult([], [])
    for number in range(1 + settings.repeat):
        pp, tg = stream.prefill_speed(), stream.decode_speed()
        if number > 0:
            result.pp_runs.append(pp)
            result.tg_runs.append(tg)
    return result
