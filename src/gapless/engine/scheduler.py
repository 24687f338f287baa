"""Decides who runs: first come, first served within a priority, into a fixed table of slots.

A sequence enters when there are a slot and the blocks for the tokens it has; it gets more blocks as it grows.
When they run out, the last in line gives way: it is preempted, and later computed again from its tokens. The
first in line always gets through, since no request is accepted that the cache could not hold alone. Blocks of
equal beginnings are shared.

Nothing here talks to the executor: the methods take in what has happened, `schedule` says what is to be done.
All are to be called under the engine's lock.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from gapless.engine.block_pool import BlockPool
from gapless.engine.prefix_cache import PrefixCache, block_tokens, chain_hash
from gapless.engine.request import Request, Sequence, SequenceState
from gapless.errors import ContextLengthError

# Blocks are granted up to this far ahead of the last token, so that the loop never sits a step out for
# Python: 128 tokens are more than half a second at the speed of the fastest single stream. Less when free
# blocks are few.
LOOKAHEAD_TOKENS = 128


@dataclass(frozen=True)
class SchedulerConfig:
    max_num_seqs: int
    max_model_len: int
    num_blocks: int
    block_size: int = 16
    prefix_caching: bool = True


@dataclass(frozen=True)
class Admission:
    """`sequence` has got its slot and blocks; the first `num_cached` tokens are in them already."""

    sequence: Sequence
    num_cached: int


@dataclass
class Decisions:
    """What the executor is to be told, in this order."""

    extensions: list[tuple[Sequence, list[int]]] = field(default_factory=list)
    admissions: list[Admission] = field(default_factory=list)
    preemptions: list[Sequence] = field(default_factory=list)


class Scheduler:
    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.cache = PrefixCache()
        self.pool = BlockPool(config.num_blocks, self.cache.forget)
        self.running: dict[int, Sequence] = {}  # by sequence id
        self.num_waiting = 0
        self.num_prompt_tokens = self.num_cached_tokens = self.num_preemptions = 0  # ever
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []  # a heap; ended sequences are skipped
        self._parked: dict[
            bytes, list[Sequence]
        ] = {}  # waiting, by the block that somebody is computing for them
        self._computing: dict[bytes, Sequence] = {}  # who computes a block
        self._starved: set[Sequence] = set()  # those that stand still for want of blocks
        self._growing: list[Sequence] = []
        self._num_leaving = 0
        self._free_slots = list(range(config.max_num_seqs))  # a heap: low slots first
        self._next_id = 1

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    # --- what has happened ---

    def check(self, request: Request) -> None:
        """ContextLengthError for a request that could never run, however long it waited."""
        num_prompt, limit = len(request.prompt_token_ids), self.config.max_model_len
        if num_prompt + min(request.max_tokens, 1) > limit:
            room = "" if request.pooling is not None else ", and at least one new token must fit"
            raise ContextLengthError(  # clients know this case by the first words, or by "prompt is too long"
                f"This model's maximum context length is {limit} tokens (max_model_len), and the prompt is "
                f"too long with {num_prompt}{room}: shorten it or raise max_model_len.",
                param="prompt",
            )
        if self._num_blocks(num_prompt + request.max_tokens) > self.config.num_blocks:
            capacity = self.config.num_blocks * self.config.block_size
            tokens, remedy, param = f"{num_prompt} prompt tokens", "shorten the prompt", "prompt"
            if request.pooling is None:
                tokens += f" and max_tokens={request.max_tokens}"
                remedy, param = "lower max_tokens", "max_tokens"
            raise ContextLengthError(
                f"{tokens} do not fit into the KV cache of {capacity} tokens: {remedy} or raise "
                "kv_cache_gib.",
                param=param,
            )

    def add(self, request: Request) -> None:
        """Queue a request that `check` has passed, as one sequence for each choice."""
        for index, seed in enumerate(request.choice_seeds()):
            sequence = Sequence(self._next_id, request, index, seed, list(request.prompt_token_ids))
            self._next_id += 1
            request.sequences.append(sequence)
            self._wait(sequence)

    def token(self, sequence: Sequence, token_id: int) -> None:
        """A running sequence has a new token; all before it are computed."""
        num_computed = len(sequence.tokens)
        sequence.tokens.append(token_id)
        if sequence.state is SequenceState.PREFILL:
            sequence.state = SequenceState.DECODE
        elif num_computed % self.config.block_size:
            return
        self.prefilled(sequence, num_computed)
        if self._capacity(sequence) < num_computed + LOOKAHEAD_TOKENS // 2:
            self._growing.append(sequence)

    def prefilled(self, sequence: Sequence, num_computed: int) -> None:
        """The first `num_computed` tokens of a running sequence are in its blocks."""
        if not self.config.prefix_caching:
            return
        size = self.config.block_size
        while sequence.num_filled < num_computed // size:
            index = sequence.num_filled
            sequence.num_filled += 1
            hash_, block = self._hash(sequence, index), sequence.blocks[index]
            if self.cache.insert(hash_, block_tokens(sequence.tokens, index, size), block):
                self.pool.keep(block)
            self._give_up_claim(sequence, hash_)

    def needs_blocks(self, sequence: Sequence) -> None:
        """A running sequence has no block for its last token and stands still, unless some are on their
        way."""
        if self._num_missing(sequence) > 0:
            self._starved.add(sequence)

    def leave(self, sequence: Sequence) -> None:
        """The executor has been told to end a running sequence."""
        if not sequence.is_leaving:
            sequence.is_leaving = True
            self._num_leaving += 1

    def finish(self, sequence: Sequence, num_computed: int = 0) -> None:
        """Ends a waiting or running sequence: what it held is free at once."""
        if sequence.is_running:
            self._release(sequence, num_computed)
        else:
            self.num_waiting -= 1
        sequence.state = SequenceState.FINISHED

    def preempted(self, sequence: Sequence, num_computed: int) -> None:
        """The executor has put a running sequence out; it waits for its turn again."""
        self._release(sequence, num_computed)
        sequence.state = SequenceState.PREEMPTED
        sequence.request.num_preemptions += 1
        self.num_preemptions += 1
        self._wait(sequence)

    def open_sequences(self) -> list[Sequence]:
        """All that run or wait."""
        waiting = [sequence for _, sequence in self._waiting]
        parked = [sequence for sequences in self._parked.values() for sequence in sequences]
        return [
            *self.running.values(),
            *(sequence for sequence in waiting + parked if sequence.state is not SequenceState.FINISHED),
        ]

    # --- what is to be done ---

    def schedule(self) -> Decisions:
        decisions = Decisions()
        self._feed(decisions)
        if not self._starved:
            self._grow(decisions)
            self._admit(decisions)
        self._growing.clear()
        return decisions

    def _feed(self, decisions: Decisions) -> None:
        """Blocks for those that stand still, the first in line first; the last in line gives way."""
        for sequence in sorted(self._starved, key=lambda sequence: sequence.rank):
            count = self._num_missing(sequence)
            if not sequence.is_leaving and not self.pool.can_allocate(count):
                if not self._num_leaving:
                    self._preempt(self._last_in_line(), decisions)
                if not sequence.is_leaving:
                    return
            self._starved.remove(sequence)
            if not sequence.is_leaving:
                decisions.extensions.append((sequence, self._grant(sequence, count)))

    def _grow(self, decisions: Decisions) -> None:
        """Blocks ahead of need, as long as there are some to spare."""
        for sequence in self._growing:
            if not sequence.is_running or sequence.is_leaving:
                continue
            count = min(self._wanted_blocks(sequence) - len(sequence.blocks), self.pool.num_free)
            if count > 0:
                decisions.extensions.append((sequence, self._grant(sequence, count)))

    def _admit(self, decisions: Decisions) -> None:
        while self._waiting:
            _, sequence = self._waiting[0]
            if sequence.state is SequenceState.FINISHED:
                heapq.heappop(self._waiting)
                continue
            if not self._free_slots and self._outranked_by(sequence) is None:
                return  # before its blocks are looked up: this is so after every step of a full table
            shared = self._cached_blocks(sequence)
            if (hash_ := self._awaited_hash(sequence, len(shared))) is not None:
                heapq.heappop(self._waiting)
                self._parked.setdefault(hash_, []).append(sequence)
                continue
            if not self._fits(sequence, shared):
                if (outranked := self._outranked_by(sequence)) is not None:
                    self._preempt(outranked, decisions)
                return
            heapq.heappop(self._waiting)
            decisions.admissions.append(self._enter(sequence, shared))

    def _fits(self, sequence: Sequence, shared: list[int]) -> bool:
        """Whether there are a slot and enough blocks, without taking the next one from those that run."""
        new = self._least_blocks(sequence) - len(shared)
        free = self.pool.num_free - self.pool.num_unheld(shared)
        return bool(self._free_slots) and new + len(self.running) <= free

    def _enter(self, sequence: Sequence, shared: list[int]) -> Admission:
        self.num_waiting -= 1
        sequence.state = SequenceState.PREFILL
        sequence.slot = heapq.heappop(self._free_slots)
        self.running[sequence.id] = sequence
        self.pool.share(shared)
        sequence.blocks = list(shared)
        sequence.num_filled = len(shared)
        wanted = min(self._wanted_blocks(sequence), len(shared) + self.pool.num_free)
        self._grant(sequence, max(self._least_blocks(sequence), wanted) - len(shared))
        # The last token is always computed: its logits are wanted. If its block is shared, what is written
        # there are the very bits that are there.
        num_cached = min(len(shared) * self.config.block_size, sequence.num_tokens - 1)
        self._claim(sequence)
        if sequence.num_output == 0:
            self.num_prompt_tokens += sequence.num_tokens
            self.num_cached_tokens += num_cached
            if sequence.request.admitted_s is None:
                sequence.request.num_cached_tokens = num_cached
        return Admission(sequence, num_cached)

    def _outranked_by(self, sequence: Sequence) -> Sequence | None:
        """Who has to give way to a waiting sequence. Nobody as long as somebody is on its way out."""
        if self._num_leaving:
            return None
        last = self._last_in_line()
        return last if last is not None and last.request.priority > sequence.request.priority else None

    def _preempt(self, sequence: Sequence | None, decisions: Decisions) -> None:
        assert sequence is not None, "the cache is too small for a sequence that was accepted"
        self.leave(sequence)
        decisions.preemptions.append(sequence)

    def _last_in_line(self) -> Sequence | None:
        staying = (sequence for sequence in self.running.values() if not sequence.is_leaving)
        return max(staying, key=lambda sequence: sequence.rank, default=None)

    # --- shared prefixes ---

    def _cached_blocks(self, sequence: Sequence) -> list[int]:
        """The blocks of the longest known beginning of a waiting sequence."""
        blocks: list[int] = []
        for index in self._sharable(sequence):
            tokens = block_tokens(sequence.tokens, index, self.config.block_size)
            block = self.cache.find(self._hash(sequence, index), tokens)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def _awaited_hash(self, sequence: Sequence, num_cached: int) -> bytes | None:
        """The last of the next blocks that somebody, no less urgent, is computing at this moment."""
        awaited = None
        for index in self._sharable(sequence):
            if index < num_cached:
                continue
            owner = self._computing.get(hash_ := self._hash(sequence, index))
            if owner is None or owner.is_leaving or owner.request.priority > sequence.request.priority:
                break
            awaited = hash_
        return awaited

    def _sharable(self, sequence: Sequence) -> range:
        """Indices of the full blocks that a waiting sequence may have from others."""
        if not self.config.prefix_caching:
            return range(0)
        request = sequence.request
        if request.pooling is not None and request.pooling.needs_all_tokens:
            return range(0)
        needs_all_logits = sequence.index == 0 and request.params.prompt_logprobs is not None
        if needs_all_logits and sequence.num_output == 0:
            return range(0)
        return range(sequence.num_tokens // self.config.block_size)

    def _hash(self, sequence: Sequence, index: int) -> bytes:
        hashes = sequence.hashes
        while len(hashes) <= index:
            tokens = block_tokens(sequence.tokens, len(hashes), self.config.block_size)
            hashes.append(chain_hash(hashes[-1] if hashes else b"", tokens))
        return hashes[index]

    def _claim(self, sequence: Sequence) -> None:
        """Tells that this sequence is computing the blocks of the tokens it has."""
        for index in self._sharable(sequence):
            if index >= sequence.num_filled:
                self._computing.setdefault(self._hash(sequence, index), sequence)

    def _give_up_claim(self, sequence: Sequence, hash_: bytes) -> None:
        if self._computing.get(hash_) is sequence:
            del self._computing[hash_]
            for parked in self._parked.pop(hash_, ()):
                if parked.state is not SequenceState.FINISHED:
                    heapq.heappush(self._waiting, (parked.rank, parked))

    # --- slots and blocks ---

    def _wait(self, sequence: Sequence) -> None:
        self.num_waiting += 1
        heapq.heappush(self._waiting, (sequence.rank, sequence))

    def _release(self, sequence: Sequence, num_computed: int) -> None:
        assert sequence.slot is not None
        self.prefilled(sequence, num_computed)
        for hash_ in sequence.hashes[sequence.num_filled :]:
            self._give_up_claim(sequence, hash_)
        del self.running[sequence.id]
        self._starved.discard(sequence)
        self.pool.free(sequence.blocks)
        heapq.heappush(self._free_slots, sequence.slot)
        sequence.blocks, sequence.slot, sequence.num_filled = [], None, 0
        if sequence.is_leaving:
            sequence.is_leaving = False
            self._num_leaving -= 1

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.config.block_size)

    def _capacity(self, sequence: Sequence) -> int:
        return len(sequence.blocks) * self.config.block_size

    def _num_missing(self, sequence: Sequence) -> int:
        return self._num_blocks(sequence.num_tokens) - len(sequence.blocks)

    def _most_tokens(self, sequence: Sequence) -> int:
        return len(sequence.request.prompt_token_ids) + sequence.request.max_tokens

    def _worst_case(self, sequence: Sequence) -> int:
        return self._num_blocks(self._most_tokens(sequence))

    def _least_blocks(self, sequence: Sequence) -> int:
        """For the tokens that it has and the next one, if there will be one."""
        return self._num_blocks(min(sequence.num_tokens + 1, self._most_tokens(sequence)))

    def _wanted_blocks(self, sequence: Sequence) -> int:
        """For the tokens that it has and the look-ahead, which shrinks as free blocks become few."""
        fair_share = self.pool.num_free // (2 * len(self.running) + 2)
        lookahead = max(1, min(LOOKAHEAD_TOKENS // self.config.block_size, fair_share))
        return min(self._num_blocks(sequence.num_tokens) + lookahead, self._worst_case(sequence))

    def _grant(self, sequence: Sequence, count: int) -> list[int]:
        blocks = self.pool.allocate(max(count, 0))
        sequence.blocks += blocks
        return blocks
