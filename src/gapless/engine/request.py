"""A request and its sequences: one for each of its `n` choices."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from gapless.engine.events import RequestEvent
from gapless.sampling import Pooling, SamplingParams

if TYPE_CHECKING:
    from gapless.structured.matcher import Grammar

Sink = Callable[["Request", "list[RequestEvent]"], None]

_SEED_MASK = 2**64 - 1
# The golden ratio's bits: seeds of a request's choices lie far apart, and choice 0 has the request's own.
_SEED_STRIDE = 0x9E3779B97F4A7C15


class SequenceState(Enum):
    """Where a sequence, or a request as a whole, is on its way."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"  # gave its blocks to others and waits to go on
    FINISHED = "finished"


# Of a request's choices, the one that is in the first of these states speaks for the request.
_PRECEDENCE = (SequenceState.DECODE, SequenceState.PREFILL, SequenceState.PREEMPTED, SequenceState.WAITING)


@dataclass(eq=False)
class Sequence:
    """One choice on its way through the engine. The scheduler alone changes it."""

    id: int
    request: Request = field(repr=False)
    index: int
    seed: int
    tokens: list[int] = field(default_factory=list, repr=False)  # prompt and output
    state: SequenceState = SequenceState.WAITING
    slot: int | None = None
    blocks: list[int] = field(default_factory=list)
    is_leaving: bool = False  # its cancellation or preemption is under way
    is_cancelled: bool = False
    failure: str | None = None  # why it was cancelled, if not by its consumer
    hashes: list[bytes] = field(
        default_factory=list, repr=False
    )  # of its first full blocks, as far as they are known
    num_filled: int = 0  # blocks that are computed, and known to the prefix cache

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.request.prompt_token_ids)

    @property
    def is_running(self) -> bool:
        return self.slot is not None

    @property
    def rank(self) -> tuple[int, int]:
        """The smaller, the earlier its turn."""
        return self.request.priority, self.id


@dataclass(eq=False)
class Request:
    """A checked prompt with its parameters. `max_tokens` and `stop_token_ids` are what the engine will apply.

    With `pooling` the prompt is embedded, as a vector of length 1 if `normalize`, and nothing is generated.

    `sink` takes the events, in order, on the engine's threads: it must be quick and must not block.
    """

    id: str
    prompt_token_ids: SequenceOf[int]
    params: SamplingParams
    max_tokens: int
    stop_token_ids: SequenceOf[int] = ()
    prompt: str | None = None
    priority: int = 0
    grammar: Grammar | None = field(default=None, repr=False)  # every choice is sampled under its masks
    pooling: Pooling | None = None
    normalize: bool = True
    sink: Sink = field(default=lambda request, events: None, repr=False)
    arrival_s: float = field(default_factory=time.perf_counter)
    admitted_s: float | None = None
    num_cached_tokens: int = 0  # of the prompt, when its first choice entered
    num_preemptions: int = 0
    sequences: list[Sequence] = field(default_factory=list, repr=False)

    @property
    def is_finished(self) -> bool:
        return self.state is SequenceState.FINISHED

    @property
    def state(self) -> SequenceState:
        if not self.sequences:
            return SequenceState.WAITING
        states = {sequence.state for sequence in self.sequences}
        return next((state for state in _PRECEDENCE if state in states), SequenceState.FINISHED)

    def choice_seeds(self) -> list[int]:
        """A seed in [0, 2^64) for each choice; random ones when the request has none."""
        seed = self.params.seed
        if seed is None:
            seed = int.from_bytes(os.urandom(8), "little")
        return [(seed + index * _SEED_STRIDE) & _SEED_MASK for index in range(self.params.n)]
