"""First come, first served into a fixed table of slots.

A sequence enters when a slot is free and the pool can promise all blocks it may ever need; so none ever waits
for another's blocks in mid-stream and nothing has to be preempted. Blocks are handed out as it grows. All
methods are to be called under the engine's lock.
"""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass

from gapless.engine.block_pool import BlockPool
from gapless.engine.request import Request, Sequence, SequenceState
from gapless.errors import ContextLengthError

# Blocks are granted this far ahead of the last token, so that the loop never sits a step out for Python: 128
# tokens are more than half a second at the speed of the fastest single stream.
LOOKAHEAD_TOKENS = 128


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int
    max_model_len: int
    num_blocks: int
    block_size: int = 16


class Scheduler:
    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self.waiting: deque[Sequence] = deque()
        self.running: dict[int, Sequence] = {}  # by sequence id
        self._free_slots = list(range(config.max_num_seqs))  # a heap: low slots first
        self._num_promised = 0  # blocks that running sequences may still ask for
        self._next_id = 1

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    def check(self, request: Request) -> None:
        """ContextLengthError for a request that could never run, however long it waited."""
        num_prompt, limit = len(request.prompt_token_ids), self.config.max_model_len
        if num_prompt >= limit:
            raise ContextLengthError(
                f"The prompt has {num_prompt} tokens, but max_model_len is {limit} and at least one new "
                "token must fit: shorten the prompt or raise max_model_len.",
                param="prompt",
            )
        needed = self._blocks(num_prompt + request.max_tokens)
        if needed > self.config.num_blocks:
            capacity = self.config.num_blocks * self.config.block_size
            raise ContextLengthError(
                f"{num_prompt} prompt tokens and max_tokens={request.max_tokens} do not fit into the KV "
                f"cache of {capacity} tokens: lower max_tokens or raise kv_cache_gib.",
                param="max_tokens",
            )

    def add(self, request: Request) -> None:
        """Queue a request that `check` has passed, as one sequence for each choice."""
        for index, seed in enumerate(request.choice_seeds()):
            sequence = Sequence(self._next_id, request, index, seed, num_tokens=len(request.prompt_token_ids))
            self._next_id += 1
            request.sequences.append(sequence)
            self.waiting.append(sequence)

    def admit(self) -> list[Sequence]:
        """The sequences that enter now, each with its slot and first blocks."""
        entering = []
        while self.waiting and self._free_slots:
            sequence = self.waiting[0]
            worst_case = self._worst_case(sequence)
            if not self.pool.can_allocate(self._num_promised + worst_case):
                break
            self.waiting.popleft()
            sequence.state = SequenceState.RUNNING
            sequence.slot = heapq.heappop(self._free_slots)
            self.running[sequence.id] = sequence
            self._num_promised += worst_case
            self._grant(sequence, self._wanted(sequence))
            entering.append(sequence)
        return entering

    def wants_blocks(self, sequence: Sequence) -> bool:
        """Whether the blocks of a running sequence end within half the look-ahead, and it may need more."""
        capacity = len(sequence.blocks) * self.config.block_size
        return capacity < sequence.num_tokens + LOOKAHEAD_TOKENS // 2 and len(
            sequence.blocks
        ) < self._worst_case(sequence)

    def extend(self, sequence: Sequence, at_least: int = 0) -> list[int]:
        """More blocks for a running sequence, out of those promised to it; empty when it has all of them."""
        count = max(self._wanted(sequence) - len(sequence.blocks), at_least)
        return self._grant(sequence, min(count, self._worst_case(sequence) - len(sequence.blocks)))

    def finish(self, sequence: Sequence) -> None:
        """Ends a waiting or running sequence: what it held is free at once."""
        if sequence.state is SequenceState.WAITING:
            self.waiting.remove(sequence)
        else:
            assert sequence.state is SequenceState.RUNNING
            assert sequence.slot is not None
            del self.running[sequence.id]
            self._num_promised -= self._worst_case(sequence) - len(sequence.blocks)
            self.pool.free(sequence.blocks)
            heapq.heappush(self._free_slots, sequence.slot)
            sequence.blocks = []
            sequence.slot = None
        sequence.state = SequenceState.FINISHED

    def _blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def _worst_case(self, sequence: Sequence) -> int:
        return self._blocks(len(sequence.request.prompt_token_ids) + sequence.request.max_tokens)

    def _wanted(self, sequence: Sequence) -> int:
        return min(self._blocks(sequence.num_tokens + LOOKAHEAD_TOKENS), self._worst_case(sequence))

    def _grant(self, sequence: Sequence, count: int) -> list[int]:
        blocks = self.pool.allocate(max(count, 0))
        self._num_promised -= len(blocks)
        sequence.blocks += blocks
        return blocks
