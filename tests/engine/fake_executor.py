"""A scripted executor: the native one's contract in plain Python, one token per slot and `wait`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

BLOCK_SIZE = 16


def next_of_prompt(token_ids: list[int], num_prompt: int) -> int:
    """The default script: token i of the output is the prompt's token i, round and round."""
    return token_ids[(len(token_ids) - num_prompt) % num_prompt]


def nearest_allowed(mask: Any, token_id: int) -> int:
    """The token that a mask leaves to a model that wants `token_id`."""
    allowed = [t for t in range(32 * len(mask)) if int(mask[t // 32]) >> (t % 32) & 1]
    return min(allowed, key=lambda t: (abs(t - token_id), t))


def embedding_of(token_ids: list[int], pooling: str, normalize: bool) -> npt.NDArray[np.float32]:
    """The fake model's states are (token id, 1): pooled, as the native core does it."""
    states = np.array([(token_id, 1) for token_id in token_ids], np.float32)
    vector = {"last": states[-1], "mean": states.mean(axis=0), "cls": states[0]}[pooling]
    return vector / np.linalg.norm(vector) if normalize else vector


def make_sampling(**fields: Any) -> SimpleNamespace:
    return SimpleNamespace(**fields)


@dataclass
class Slot:
    sequence_id: int
    token_ids: list[int]
    num_prompt: int
    blocks: list[int]
    sampling: Any
    num_computed: int = 0
    waits_for_blocks: bool = False
    masks: dict[int, Any] = field(default_factory=dict)  # by output index
    awaits_mask: bool = False


@dataclass
class FakeExecutor:
    num_blocks: int = 64
    max_num_seqs: int = 4
    max_seq_len: int = 256
    script: Callable[[list[int], int], int] = next_of_prompt
    stalled: bool = False  # steps stand still while set
    step_s: float = 0.0  # how long a step takes
    slots: dict[int, Slot] = field(default_factory=dict)
    admissions: list[tuple[int, int]] = field(default_factory=list)  # (slot, sequence id)
    num_extends: int = 0
    contents: dict[tuple[int, int], tuple[int, ...]] = field(
        default_factory=dict
    )  # tokens up to (block, offset)
    target_tpot_s: float = 0.0
    block_size: int = BLOCK_SIZE
    kv_bytes: int = 0
    num_threads: int = 1

    def __post_init__(self) -> None:
        self._changed = threading.Condition()
        self._events: list[tuple[Any, ...]] = []
        self._trace: list[tuple[float, float, float, int, int, int]] = []
        self._closed = False

    def admit(
        self,
        slot: int,
        sequence_id: int,
        token_ids: Any,
        blocks: Any,
        sampling: Any,
        num_cached: int = 0,
        num_prompt: int = -1,
        priority: int = 0,
    ) -> None:
        with self._changed:
            assert slot not in self.slots, "slot taken twice"
            assert 0 <= slot < self.max_num_seqs
            ids = [int(token_id) for token_id in token_ids]
            assert ids
            num_prompt = len(ids) if num_prompt < 0 else num_prompt
            assert num_prompt + sampling.max_tokens <= self.max_seq_len
            assert 0 <= num_cached < len(ids)
            if sampling.pooling == "none":
                assert sampling.max_tokens > 0
            else:
                assert num_cached == 0 or sampling.pooling == "last", "states are not cached"
            entry = Slot(sequence_id, ids, num_prompt, [], sampling, num_computed=num_cached)
            self._check_cached(entry, blocks)
            self.slots[slot] = entry
            self._take_blocks(entry, blocks)
            self.admissions.append((slot, sequence_id))
            self._changed.notify()

    def preempt(self, slot: int, sequence_id: int) -> None:
        self._end_early(slot, sequence_id, "preempted")

    def set_mask(self, slot: int, sequence_id: int, output_index: int, mask: Any) -> None:
        with self._changed:
            entry = self.slots.get(slot)
            if entry is not None and entry.sequence_id == sequence_id:
                entry.masks[output_index] = mask
                entry.awaits_mask = False
            self._changed.notify()

    def set_target_tpot(self, seconds: float) -> None:
        self.target_tpot_s = seconds

    def take_trace(self) -> list[tuple[float, float, float, int, int, int]]:
        with self._changed:
            trace, self._trace = self._trace, []
            return trace

    def extend(self, slot: int, sequence_id: int, blocks: Any) -> None:
        with self._changed:
            self.num_extends += 1
            entry = self.slots.get(slot)
            if entry is not None and entry.sequence_id == sequence_id:
                self._take_blocks(entry, blocks)
            self._changed.notify()

    def cancel(self, slot: int, sequence_id: int) -> None:
        self._end_early(slot, sequence_id, "abort")

    def _end_early(self, slot: int, sequence_id: int, reason: str) -> None:
        with self._changed:
            entry = self.slots.get(slot)
            if entry is not None and entry.sequence_id == sequence_id:
                del self.slots[slot]
                self._events.append(("finished", sequence_id, reason, entry.num_computed))
            self._changed.notify()

    def fail(self, message: str) -> None:
        with self._changed:
            self._events.append(("failed", message))
            self._changed.notify()

    def resume(self) -> None:
        with self._changed:
            self.stalled = False
            self._changed.notify()

    def wait(self, timeout_s: float) -> list[tuple[Any, ...]]:
        with self._changed:
            self._changed.wait_for(lambda: self._events or self._closed or self._has_work(), timeout_s)
            if self._has_work():
                self._run_step()
            events, self._events = self._events, []
            return events

    def stats(self) -> dict[str, float]:
        return {"steps": 0.0}

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self.slots.clear()
            self._changed.notify()

    def _has_work(self) -> bool:
        return not self.stalled and any(
            not slot.waits_for_blocks and not slot.awaits_mask for slot in self.slots.values()
        )

    def _check_cached(self, entry: Slot, blocks: Any) -> None:
        """What the scheduler believes to be in the given blocks must be there."""
        for position in range(entry.num_computed):
            where = (int(blocks[position // BLOCK_SIZE]), position % BLOCK_SIZE)
            assert self.contents.get(where) == tuple(entry.token_ids[: position + 1]), "stale block"

    def _take_blocks(self, entry: Slot, blocks: Any) -> None:
        for block in blocks:
            assert 0 <= block < self.num_blocks
            entry.blocks.append(int(block))
        entry.waits_for_blocks = False

    def _compute(self, entry: Slot) -> None:
        """Fills blocks up to the last token. A block that somebody else reads must not change."""
        before = entry.num_computed
        for position in range(before, len(entry.token_ids)):
            where = (entry.blocks[position // BLOCK_SIZE], position % BLOCK_SIZE)
            value = tuple(entry.token_ids[: position + 1])
            if self.contents.get(where) != value:
                for other in self.slots.values():
                    held = other.blocks[: -(-other.num_computed // BLOCK_SIZE)]
                    assert other is entry or where[0] not in held, "wrote into a block that another one reads"
            self.contents[where] = value
        entry.num_computed = len(entry.token_ids)

    def _run_step(self) -> None:
        begin_s = time.perf_counter()
        before = {slot: entry.num_computed for slot, entry in self.slots.items()}
        entries = dict(self.slots)
        time.sleep(self.step_s)
        for slot in list(self.slots):
            self._step(slot)
        rows = {slot: entry.num_computed - before[slot] for slot, entry in entries.items()}
        decoding = [slot for slot, num_computed in before.items() if num_computed >= entries[slot].num_prompt]
        num_decode_rows = sum(rows[slot] for slot in decoding)
        forward_end_s = time.perf_counter()
        self._trace.append(
            (
                begin_s,
                forward_end_s,
                time.perf_counter(),
                num_decode_rows,
                sum(rows.values()) - num_decode_rows,
                0,
            )
        )

    def _step(self, slot: int) -> None:
        entry = self.slots[slot]
        missing = -(-len(entry.token_ids) // BLOCK_SIZE) - len(entry.blocks)
        if missing > 0:
            if not entry.waits_for_blocks:
                entry.waits_for_blocks = True
                self._events.append(("blocks_low", entry.sequence_id, missing))
            return
        if entry.num_computed == 0 and len(entry.token_ids) > 2 * BLOCK_SIZE:  # a prefill in two chunks
            tokens = entry.token_ids
            entry.token_ids = tokens[:BLOCK_SIZE]
            self._compute(entry)
            entry.token_ids = tokens
            self._events.append(("prefilled", entry.sequence_id, entry.num_computed))
            return
        self._compute(entry)
        if entry.sampling.pooling != "none":
            vector = embedding_of(entry.token_ids, entry.sampling.pooling, entry.sampling.normalize)
            self._events.append(("embedding", entry.sequence_id, vector))
            del self.slots[slot]
            self._events.append(("finished", entry.sequence_id, "stop", entry.num_computed))
            return
        mask = entry.masks.get(len(entry.token_ids) - entry.num_prompt)
        if entry.sampling.constrained and mask is None:
            entry.awaits_mask = True
            return
        sampling, first = entry.sampling, len(entry.token_ids) == entry.num_prompt
        if first and sampling.num_prompt_logprobs >= 0:
            for position in range(1, entry.num_prompt):
                self._events.append(("prompt_logprobs", entry.sequence_id, position, -0.5, 1, [(7, -0.5)]))
        token_id = self.script(entry.token_ids, entry.num_prompt)
        if sampling.constrained:
            token_id = nearest_allowed(mask, token_id)
        entry.token_ids.append(token_id)
        logprob = -0.25 if sampling.num_logprobs >= 0 else None
        top = [(token_id, -0.25), (3, -2.0)][: max(0, sampling.num_logprobs)]
        self._events.append(("token", entry.sequence_id, token_id, logprob, 1, top))
        reason = None
        if token_id in sampling.stop_token_ids:
            reason = "stop"
        elif len(entry.token_ids) - entry.num_prompt >= sampling.max_tokens:
            reason = "length"
        if reason is not None:
            del self.slots[slot]
            self._events.append(("finished", entry.sequence_id, reason, entry.num_computed))
