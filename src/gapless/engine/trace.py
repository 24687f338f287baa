"""A trace of the engine's work for Chrome's about:tracing and ui.perfetto.dev.

One lane shows the loop: each step with its forward pass and its sampling, so that the gaps between steps
can be seen. One lane per slot shows whose prompt is prefilled and who decodes, with cached tokens,
preemptions and ends as marks; one shows what ended without ever having had a slot. Counters follow rows,
sequences and KV blocks.

The loop's times are its own. Those of the slots are the moments at which the engine's thread learned of an
event: a busy Python shows there, and only there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gapless.errors import InvalidRequestError

# About 200 bytes each: 60 MB at most, and an hour of one stream at 80 steps/s.
_MAX_RECORDS = 300_000

_PID = 1
_LOOP_LANE, _QUEUE_LANE, _FIRST_SLOT_LANE = 1, 2, 10


class StepRecord(NamedTuple):
    """A step's first op, the start of its last sampling and the end of that. Seconds of
    `time.perf_counter`."""

    begin_s: float
    forward_end_s: float
    end_s: float
    num_decode_rows: int
    num_prefill_rows: int
    num_sliced_rows: int  # of prompts, which went through some layers but not through the last


class _Span(NamedTuple):
    slot: int
    name: str
    begin_s: float
    end_s: float
    args: dict[str, Any]


class _Mark(NamedTuple):
    slot: int | None  # None: not in a slot
    name: str
    time_s: float
    args: dict[str, Any]


class _Counts(NamedTuple):
    num_running: int
    num_waiting: int
    num_used_blocks: int


@dataclass
class _Open:
    """What goes on in a slot."""

    slot: int
    name: str
    begin_s: float
    args: dict[str, Any]


class Tracer:
    """Takes notes of what the engine does, and writes them to `path` (None: nowhere) when it is closed.

    Not thread-safe: the engine calls it under its lock. After `max_records` notes it takes no more, and the
    file says so. InvalidRequestError if `path` cannot be written.
    """

    def __init__(self, path: str | Path | None = None, max_records: int = _MAX_RECORDS) -> None:
        self.steps: list[StepRecord] = []
        self._file = None
        if path is not None:
            try:
                self._file = Path(path).open("w", encoding="utf-8")  # noqa: SIM115  # open until close()
            except OSError as error:
                raise InvalidRequestError(
                    f"The trace cannot be written to {path}: {error.strerror}.", param="trace"
                ) from None
        self._max_records = max_records
        self._start_s = time.perf_counter()
        self._spans: list[_Span] = []
        self._marks: list[_Mark] = []
        self._counts: list[tuple[float, _Counts]] = []
        self._open: dict[int, _Open] = {}  # by sequence id
        self._cut_s: float | None = None  # when the limit was reached

    # --- what the engine tells ---

    def add_steps(self, steps: Iterable[tuple[float, float, float, int, int, int]]) -> None:
        """The steps since the last call, as the executor's `take_trace` gives them."""
        for step in steps:
            if self._has_room(step[0]):
                self.steps.append(StepRecord(*step))

    def admitted(
        self, sequence_id: int, slot: int, request_id: str, num_tokens: int, num_cached: int, time_s: float
    ) -> None:
        """A sequence of `num_tokens` tokens has entered a slot; the cache held the first `num_cached`."""
        args = {"request": request_id, "tokens": num_tokens, "cached": num_cached}
        self._open[sequence_id] = _Open(slot, "prefill", time_s, args)
        if num_cached > 0:
            self._mark(slot, f"{num_cached} tokens cached", time_s, {"request": request_id})

    def token(self, sequence_id: int, time_s: float) -> None:
        """A new token: with the first one after an admission the prefill is over."""
        entry = self._open.get(sequence_id)
        if entry is None:
            return
        if entry.name == "prefill":
            self._end_span(entry, time_s)
            args = {"request": entry.args["request"], "new_tokens": 0}
            entry = self._open[sequence_id] = _Open(entry.slot, "decode", time_s, args)
        entry.args["new_tokens"] += 1

    def ended(self, sequence_id: int, request_id: str, reason: str, time_s: float) -> None:
        """A sequence has left its slot, or the queue, for `reason`: a finish reason or "preempted"."""
        entry = self._open.pop(sequence_id, None)
        if entry is not None:
            self._end_span(entry, time_s)
        self._mark(None if entry is None else entry.slot, reason, time_s, {"request": request_id})

    def counted(self, num_running: int, num_waiting: int, num_used_blocks: int, time_s: float) -> None:
        """How many sequences and blocks there are; noted when it has changed."""
        counts = _Counts(num_running, num_waiting, num_used_blocks)
        if (not self._counts or self._counts[-1][1] != counts) and self._has_room(time_s):
            self._counts.append((time_s, counts))

    def close(self) -> None:
        """Writes the file. Idempotent."""
        if self._file is None:
            return
        file, self._file = self._file, None
        with file:
            file.write('{"displayTimeUnit": "ms", "otherData": ')
            file.write(json.dumps({"note": self._note()}))
            file.write(', "traceEvents": [')
            for number, event in enumerate(self._events()):
                file.write(",\n" if number else "\n")
                file.write(json.dumps(event, separators=(",", ":")))
            file.write("\n]}\n")

    # --- records ---

    def _has_room(self, time_s: float) -> bool:
        if self._cut_s is None:
            num_records = len(self.steps) + len(self._spans) + len(self._marks) + len(self._counts)
            if num_records < self._max_records:
                return True
            self._cut_s = time_s
        return False

    def _end_span(self, entry: _Open, time_s: float) -> None:
        if self._has_room(time_s):
            self._spans.append(_Span(entry.slot, entry.name, entry.begin_s, time_s, entry.args))

    def _mark(self, slot: int | None, name: str, time_s: float, args: dict[str, Any]) -> None:
        if self._has_room(time_s):
            self._marks.append(_Mark(slot, name, time_s, args))

    def _note(self) -> str:
        if self._cut_s is None:
            return "complete"
        cut_s = self._cut_s - self._start_s
        return (
            f"cut after {self._max_records} records, {cut_s:.3f} s after the start: later events are missing"
        )

    # --- events of the file ---

    def _events(self) -> Iterator[dict[str, Any]]:
        slots = {span.slot for span in self._spans} | {
            mark.slot for mark in self._marks if mark.slot is not None
        }
        lanes = {_LOOP_LANE: "loop", _QUEUE_LANE: "queue"}
        lanes |= {_slot_lane(slot): f"slot {slot}" for slot in sorted(slots)}
        yield {"ph": "M", "pid": _PID, "name": "process_name", "args": {"name": "gapless"}}
        for lane, name in lanes.items():
            yield {"ph": "M", "pid": _PID, "tid": lane, "name": "thread_name", "args": {"name": name}}
            yield {
                "ph": "M",
                "pid": _PID,
                "tid": lane,
                "name": "thread_sort_index",
                "args": {"sort_index": lane},
            }
        last_end_s = None
        for step in self.steps:
            yield from self._step_events(step, last_end_s)
            last_end_s = step.end_s
        for span in self._spans:
            yield self._span(_slot_lane(span.slot), span.name, span.begin_s, span.end_s, span.args)
        for mark in self._marks:
            lane = _QUEUE_LANE if mark.slot is None else _slot_lane(mark.slot)
            yield {**self._at("i", lane, mark.name, mark.time_s), "s": "t", "args": mark.args}
        for time_s, counts in self._counts:
            sequences = {"running": counts.num_running, "waiting": counts.num_waiting}
            yield {**self._at("C", _LOOP_LANE, "sequences", time_s), "args": sequences}
            used = {"used": counts.num_used_blocks}
            yield {**self._at("C", _LOOP_LANE, "KV blocks", time_s), "args": used}
        if self._cut_s is not None:
            yield {**self._at("i", _LOOP_LANE, "the trace was cut here", self._cut_s), "s": "g"}

    def _step_events(self, step: StepRecord, last_end_s: float | None) -> Iterator[dict[str, Any]]:
        num_prefill, num_sliced = step.num_prefill_rows, step.num_sliced_rows
        rows = {"decode": step.num_decode_rows, "prefill": num_prefill, "sliced": num_sliced}
        args: dict[str, Any] = {f"{kind}_rows": count for kind, count in rows.items()}
        if last_end_s is not None:
            args["us_since_last_step"] = round((step.begin_s - last_end_s) * 1e6, 3)
        yield self._span(_LOOP_LANE, "step", step.begin_s, step.end_s, args)
        yield self._span(_LOOP_LANE, "forward", step.begin_s, step.forward_end_s, {})
        yield self._span(_LOOP_LANE, "sampling", step.forward_end_s, step.end_s, {})
        yield {**self._at("C", _LOOP_LANE, "rows", step.begin_s), "args": rows}

    def _span(
        self, lane: int, name: str, begin_s: float, end_s: float, args: dict[str, Any]
    ) -> dict[str, Any]:
        event = self._at("X", lane, name, begin_s)
        return {**event, "dur": round(self._us(end_s) - event["ts"], 3), "args": args}

    def _at(self, phase: str, lane: int, name: str, time_s: float) -> dict[str, Any]:
        return {"ph": phase, "pid": _PID, "tid": lane, "name": name, "ts": self._us(time_s)}

    def _us(self, time_s: float) -> float:
        return round((time_s - self._start_s) * 1e6, 3)


def _slot_lane(slot: int) -> int:
    return _FIRST_SLOT_LANE + slot
