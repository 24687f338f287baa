"""Decode of several targets within one run, in turns: while one computes, the others' processes are stopped.

A machine that others use too changes its speed within seconds, and more than what is to be seen. Neighbouring
turns of a second or two see it alike, and there are many of them.
"""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from loadgen.figures import MeasurementError, StreamTrace
from loadgen.targets import Run, Target

_MIN_TURNS = 3


def decode_in_turns(
    targets: Sequence[Target], prompts: Sequence[str], max_tokens: int, turn_s: float
) -> list[list[float]]:
    """Tokens per second of each target in each of its turns; the n-th turns of all are neighbours.

    A turn counts if all streams of all targets have begun, and nine in ten will still have text: tokens
    without any, as after an end token that is ignored, cost a server nothing. MeasurementError if those are
    less than three turns each, or if a stream fails.
    """
    for target in targets:  # the prompts are in its prefix cache then: all streams begin together
        target.run(prompts, 1)
    threads = [_Running(lambda target=target: target.run(prompts, max_tokens)) for target in targets]  # type: ignore[misc]
    turns: list[list[tuple[float, float]]] = [[] for _ in targets]
    with _all_running_in_the_end(targets):
        # Requests arrive first: a server that stood still now would close its idle connections instead.
        time.sleep(turn_s)
        for index in _order(len(targets)):
            for place, target in enumerate(targets):
                if place != index:
                    target.pause()
            begin_s = time.perf_counter()
            targets[index].resume()
            threads[index].join(turn_s)
            turns[index].append((begin_s, time.perf_counter()))
            if any(not thread.is_alive() for thread in threads):
                break
    streams = [thread.result().streams for thread in threads]
    for stream in itertools.chain.from_iterable(streams):
        if stream.failure is not None:
            raise MeasurementError(f"A stream failed: {stream.failure}")
    begin_s = max(stream.chunk_times_s[0] for own in streams for stream in own)
    end_s = min(sorted(stream.chunk_times_s[-1] for stream in own)[len(own) // 10] for own in streams)
    rates = [
        [_rate(own, *turn) if begin_s <= turn[0] and turn[1] <= end_s else None for turn in own_turns]
        for own, own_turns in zip(streams, turns, strict=True)
    ]
    complete = [row for row in zip(*rates, strict=False) if None not in row]
    if len(complete) < _MIN_TURNS:
        raise MeasurementError(
            f"Only {len(complete)} turns of {turn_s:g} s in which all streams decoded. Raise --new-tokens."
        )
    return [[rate for rate in column if rate is not None] for column in zip(*complete, strict=True)]


class _Running(threading.Thread):
    """A target's run, in the background."""

    def __init__(self, run: Callable[[], Run]) -> None:
        super().__init__(daemon=True)
        self._call = run
        self._result: Run | None = None
        self._error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._result = self._call()
        except BaseException as error:
            self._error = error

    def result(self) -> Run:
        self.join()
        if self._result is None:
            raise self._error or MeasurementError("A run gave no result.")
        return self._result


@contextmanager
def _all_running_in_the_end(targets: Sequence[Target]) -> Iterator[None]:
    try:
        yield
    finally:
        for target in targets:
            target.resume()


def _order(count: int) -> Iterator[int]:
    """Forwards and backwards in turns: none is always the one that comes after the other."""
    forwards = range(count)
    return itertools.cycle([*forwards, *reversed(forwards)])


def _rate(streams: Sequence[StreamTrace], begin_s: float, end_s: float) -> float | None:
    """Tokens per second in a turn, from the first chunk of a stream to its last there.

    Every stream gains a token in each step, but some tokens have no text: the median stream counts for all.
    """
    rates = []
    for stream in streams:
        times_s = stream.chunk_times_s
        first, last = bisect_left(times_s, begin_s), bisect_right(times_s, end_s) - 1
        if last > first:
            rates.append((last - first) / (times_s[last] - times_s[first]))
    return len(streams) * statistics.median(rates) if rates else None
