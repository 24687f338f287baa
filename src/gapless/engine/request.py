"""A request and its sequences: one for each of its `n` choices."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum

from gapless.engine.events import RequestEvent
from gapless.sampling import SamplingParams

Sink = Callable[["Request", "list[RequestEvent]"], None]

_SEED_MASK = 2**64 - 1
# The golden ratio's bits: seeds of a request's choices lie far apart, and choice 0 has the request's own.
_SEED_STRIDE = 0x9E3779B97F4A7C15


class SequenceState(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(eq=False)
class Sequence:
    """One choice on its way through the engine. The scheduler alone changes it."""

    id: int
    request: Request = field(repr=False)
    index: int
    seed: int
    state: SequenceState = SequenceState.WAITING
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)
    num_tokens: int = 0  # prompt and new ones


@dataclass(eq=False)
class Request:
    """A checked prompt with its parameters. `max_tokens` and `stop_token_ids` are what the engine will apply.

    `sink` takes the events, in order, on the engine's threads: it must be quick and must not block.
    """

    id: str
    prompt_token_ids: SequenceOf[int]
    params: SamplingParams
    max_tokens: int
    stop_token_ids: SequenceOf[int] = ()
    prompt: str | None = None
    sink: Sink = field(default=lambda request, events: None, repr=False)
    arrival_s: float = field(default_factory=time.perf_counter)
    admitted_s: float | None = None
    sequences: list[Sequence] = field(default_factory=list, repr=False)

    @property
    def is_finished(self) -> bool:
        return all(sequence.state is SequenceState.FINISHED for sequence in self.sequences)

    def choice_seeds(self) -> list[int]:
        """A seed in [0, 2^64) for each choice; random ones when the request has none."""
        seed = self.params.seed
        if seed is None:
            seed = int.from_bytes(os.urandom(8), "little")
        return [(seed + index * _SEED_STRIDE) & _SEED_MASK for index in range(self.params.n)]
