"""The token gap: from the end of a step's sampling to the first op of the next step, while all slots decode.

When every prompt has been prefilled, one window of steps is taken as it comes, and one while a Python thread
computes without end and so holds the GIL as much as it can. Times are the loop's own, from its trace.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

from gapless.bench.streams import StreamGroup, percentile, random_prompts
from gapless.engine import Engine
from gapless.engine.trace import StepRecord, Tracer
from gapless.errors import EngineError

# Steps that may pass between the windows and while the slots fill up, for each stream.
_SLACK_TOKENS = 256
_POLL_S = 0.02


@dataclass(frozen=True)
class TokenGapSettings:
    """`steps`: in each of the two windows."""

    streams: int = 256
    prompt_tokens: int = 16
    steps: int = 200

    @property
    def new_tokens(self) -> int:
        return 2 * self.steps + _SLACK_TOKENS

    @property
    def max_model_len(self) -> int:
        """What the streams need until the last window is over."""
        return self.prompt_tokens + self.new_tokens


@dataclass(frozen=True)
class GapFigures:
    """Gaps of one window. `busy_share`: time in steps over the window's. `gap_histogram`: how many gaps had
    [2^i, 2^(i+1)) microseconds, those below 1 in the first place."""

    steps: int
    gap_p50_us: float
    gap_p99_us: float
    gap_max_us: float
    busy_share: float
    step_p50_ms: float
    gap_histogram: list[int]


@dataclass(frozen=True)
class TokenGapResult:
    python_busy: GapFigures
    python_idle: GapFigures


def measure_token_gap(engine: Engine, tracer: Tracer, settings: TokenGapSettings) -> TokenGapResult:
    """`tracer` is the engine's. EngineError if the streams end before both windows are complete."""
    vocab_size = engine.limits.vocab_size
    prompts = random_prompts(random.Random(0), vocab_size, settings.streams, settings.prompt_tokens)
    group = StreamGroup(engine, prompts, settings.new_tokens)
    try:
        group.wait_until_all_decode()
        idle = _window(engine, tracer, group, settings)
        with burning_gil():
            busy = _window(engine, tracer, group, settings)
    finally:
        group.cancel()
    return TokenGapResult(python_busy=gap_figures(busy), python_idle=gap_figures(idle))


def gap_figures(steps: list[StepRecord]) -> GapFigures:
    """Of at least two steps that followed each other."""
    gaps_us = [(later.begin_s - step.end_s) * 1e6 for step, later in itertools.pairwise(steps)]
    histogram: list[int] = []
    for gap_us in gaps_us:
        bucket = max(0, int(gap_us).bit_length() - 1)
        histogram += [0] * (bucket + 1 - len(histogram))
        histogram[bucket] += 1
    return GapFigures(
        steps=len(steps),
        gap_p50_us=percentile(gaps_us, 50),
        gap_p99_us=percentile(gaps_us, 99),
        gap_max_us=max(gaps_us),
        busy_share=sum(step.end_s - step.begin_s for step in steps) / (steps[-1].end_s - steps[0].begin_s),
        step_p50_ms=percentile([(step.end_s - step.begin_s) * 1e3 for step in steps], 50),
        gap_histogram=histogram,
    )


@contextlib.contextmanager
def burning_gil() -> Iterator[None]:
    """A Python thread that computes without end."""
    ends = False

    def burn() -> None:
        number = 0
        while not ends:
            number += 1

    thread = threading.Thread(target=burn, name="burns-the-gil", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ends = True
        thread.join()


def _window(
    engine: Engine, tracer: Tracer, group: StreamGroup, settings: TokenGapSettings
) -> list[StepRecord]:
    """`settings.steps` successive steps, all from now on, in which every stream decodes and none is
    prefilled."""
    begin_s = time.perf_counter()
    first = len(tracer.steps)
    while True:
        engine.flush_trace()
        steps = [step for step in tracer.steps[first:] if step.begin_s >= begin_s]
        wrong = [index for index, step in enumerate(steps) if not _is_steady(step, settings.streams)]
        if wrong:  # the window begins behind it
            begin_s = steps[wrong[-1]].end_s
            continue
        if len(steps) >= settings.steps:
            return steps[: settings.steps]
        if group.has_ended:
            raise EngineError(
                f"{settings.streams} streams did not decode together for {2 * settings.steps} steps: the KV "
                "cache is too small for them. Measure fewer streams or steps."
            )
        time.sleep(_POLL_S)


def _is_steady(step: StepRecord, num_streams: int) -> bool:
    num_prefill = step.num_prefill_rows + step.num_sliced_rows
    return step.num_decode_rows == num_streams and num_prefill == 0
