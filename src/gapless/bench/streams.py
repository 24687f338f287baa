"""Streams that run at the same time, and when each of their tokens came."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from gapless.engine import Engine
from gapless.engine.events import FinishEvent, FinishReason, RequestEvent, TokenEvent
from gapless.engine.request import Request
from gapless.errors import EngineError
from gapless.sampling import SamplingParams

# How often a measurement looks whether it is time for the next thing: rarely enough to cost nothing.
_POLL_S = 0.01


@dataclass
class Stream:
    """The output of one stream. Times are `time.perf_counter` seconds at which the engine gave the tokens
    out."""

    token_ids: list[int] = field(default_factory=list)
    times_s: list[float] = field(default_factory=list)


class StreamGroup:
    """Starts one greedy stream for each prompt, all at once; each goes on for `max_tokens` tokens.

    One sink takes the events of all streams and only puts them on a list: measuring must not take the
    processor from the engine. `started_s` is when the first request was handed in.
    """

    def __init__(self, engine: Engine, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        self._engine = engine
        self._events: list[tuple[Request, list[RequestEvent]]] = []
        self._num_events = 0
        self._decoding: set[Request] = set()
        self._num_ended = 0
        self._ended = threading.Event()
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        self._requests = [engine.make_request(prompt, params) for prompt in prompts]
        self.started_s = time.perf_counter()
        for request in self._requests:
            engine.start(request, self._take)

    @property
    def all_decode(self) -> bool:
        """Whether every stream has had its first token."""
        return len(self._decoding) == len(self._requests)

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def wait_until_all_decode(self) -> None:
        """EngineError if a stream ends before."""
        while not self.all_decode:
            self._pause()

    def wait_for_steps(self, num_steps: int) -> None:
        """Waits while all streams get `num_steps` more tokens, on average. EngineError if they end before."""
        goal = self._num_events + num_steps * len(self._requests)
        while self._num_events < goal:
            self._pause()

    def wait(self) -> list[Stream]:
        """Waits for the end of all streams; in the order of the prompts. EngineError if the engine fails."""
        self._ended.wait()
        return self._streams()

    def cancel(self) -> None:
        """Ends all streams and waits for their ends."""
        for request in self._requests:
            self._engine.cancel(request)
        self._ended.wait()

    def _pause(self) -> None:
        if self._ended.wait(_POLL_S):
            self._streams()  # raises if the engine has failed
            raise EngineError("The streams ended before they could be measured: the KV cache is too small.")

    def _take(self, request: Request, events: list[RequestEvent]) -> None:
        self._events.append((request, events))
        self._num_events += len(events)
        self._decoding.add(request)
        if type(events[-1]) is FinishEvent:
            self._num_ended += 1
            if self._num_ended == len(self._requests):
                self._ended.set()

    def _streams(self) -> list[Stream]:
        streams = {request: Stream() for request in self._requests}
        for request, events in self._events:
            for event in events:
                if isinstance(event, TokenEvent):
                    streams[request].token_ids.append(event.token_id)
                    streams[request].times_s.append(event.time_s)
                elif isinstance(event, FinishEvent) and event.reason is FinishReason.ERROR:
                    raise EngineError(event.message)
        return list(streams.values())


def random_prompts(rng: random.Random, vocab_size: int, num_prompts: int, num_tokens: int) -> list[list[int]]:
    """Prompts that no cache has seen."""
    return [[rng.randrange(vocab_size) for _ in range(num_tokens)] for _ in range(num_prompts)]


def percentile(values: Sequence[float], percent: float) -> float:
    """With linear interpolation between neighbours; `values` must not be empty."""
    return float(np.percentile(values, percent))


def token_gaps_s(stream: Stream, after_s: float = -np.inf, until_s: float = np.inf) -> list[float]:
    """Times between neighbouring tokens of a stream, of which the later one came in (after_s, until_s]."""
    times_s = stream.times_s
    return [later - earlier for earlier, later in itertools.pairwise(times_s) if after_s < later <= until_s]
