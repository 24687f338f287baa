"""Sends the executor the masks of the outputs that a grammar constrains, from a thread of its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import llguidance

from gapless.structured.matcher import Grammar, Matcher, advance

logger = logging.getLogger("gapless.structured")

SetMask = Callable[[int, int, int, Any], None]  # slot, sequence id, output index, mask
Fail = Callable[[int, str], None]  # sequence id, why it cannot go on


class _Admit(NamedTuple):
    sequence_id: int
    slot: int
    grammar: Grammar


class _Token(NamedTuple):
    sequence_id: int
    token_id: int


class _Drop(NamedTuple):
    sequence_id: int


@dataclass
class _Output:
    slot: int
    matcher: Matcher
    num_tokens: int = 0


class MaskFeeder:
    """Keeps a matcher for each constrained sequence, and computes the mask of its next token as soon as its
    last one is known: while the forward pass for the next one runs.

    The methods only leave a message and return. `set_mask` and `fail` are called in the feeder's thread,
    which holds no lock then. A sequence that fails gets no mask any more; `fail` has to end it.
    """

    def __init__(self, set_mask: SetMask, fail: Fail, num_threads: int = 1) -> None:
        """`num_threads`: at most that many masks are computed at the same time."""
        self._set_mask = set_mask
        self._fail = fail
        self._num_threads = num_threads
        self._arrived = threading.Condition()
        self._inbox: list[_Admit | _Token | _Drop] = []
        self._closing = False
        self._thread: threading.Thread | None = None

    def admit(self, sequence_id: int, slot: int, grammar: Grammar) -> None:
        """The sequence has got a slot. One that had one before (it was preempted) goes on where it was."""
        self._put(_Admit(sequence_id, slot, grammar))

    def accept(self, tokens: Iterable[tuple[int, int]]) -> None:
        """Sequences (by their ids) have got their next tokens."""
        self._put(*(_Token(sequence_id, token_id) for sequence_id, token_id in tokens))

    def drop(self, sequence_id: int) -> None:
        """The sequence has ended. Nothing happens if it is not known."""
        self._put(_Drop(sequence_id))

    def close(self) -> None:
        """Ends the thread; no mask is sent any more. Idempotent."""
        with self._arrived:
            self._closing = True
            self._arrived.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _put(self, *messages: _Admit | _Token | _Drop) -> None:
        with self._arrived:
            if self._closing:
                return
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gapless-masks", daemon=True)
                self._thread.start()
            self._inbox += messages
            self._arrived.notify()

    # --- the feeder's thread ---

    def _run(self) -> None:
        pool = llguidance.LLExecutor(self._num_threads)
        outputs: dict[int, _Output] = {}
        while (messages := self._take()) is not None:
            try:
                self._handle(pool, outputs, messages)
            except Exception as error:  # noqa: PERF203  # none of them would ever get a mask again
                logger.exception("Computing token masks failed")
                for sequence_id in {*outputs, *(message.sequence_id for message in messages)}:
                    self._give_up(outputs, sequence_id, f"Computing token masks failed: {error!r}")

    def _take(self) -> list[_Admit | _Token | _Drop] | None:
        """The messages that have arrived; None at the end."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._inbox or self._closing)
            messages, self._inbox = self._inbox, []
            return None if self._closing else messages

    def _handle(
        self,
        pool: llguidance.LLExecutor,
        outputs: dict[int, _Output],
        messages: list[_Admit | _Token | _Drop],
    ) -> None:
        tokens: dict[int, int] = {}  # by sequence: the one after it can only come under the mask sent below
        due: dict[int, None] = {}  # sequences that need a mask, in order
        for message in messages:
            sequence_id = message.sequence_id
            if isinstance(message, _Admit):
                if (output := outputs.get(sequence_id)) is None:
                    outputs[sequence_id] = _Output(message.slot, message.grammar.matcher())
                else:
                    output.slot = message.slot
                due[sequence_id] = None
            elif isinstance(message, _Drop):
                outputs.pop(sequence_id, None)
                tokens.pop(sequence_id, None)
                due.pop(sequence_id, None)
            elif sequence_id in outputs:
                tokens[sequence_id] = message.token_id
                due[sequence_id] = None
        advance([(outputs[key].matcher, token_id) for key, token_id in tokens.items()], pool)
        for sequence_id in tokens:
            outputs[sequence_id].num_tokens += 1
            if (failure := outputs[sequence_id].matcher.failure) is not None:
                self._give_up(outputs, sequence_id, f"The output cannot go on under its grammar: {failure}.")
        for sequence_id in due:
            if (output := outputs.get(sequence_id)) is not None and not output.matcher.is_finished:
                self._send(outputs, sequence_id, output)

    def _send(self, outputs: dict[int, _Output], sequence_id: int, output: _Output) -> None:
        try:
            self._set_mask(output.slot, sequence_id, output.num_tokens, output.matcher.mask)
        except Exception as error:
            with self._arrived:
                if self._closing:
                    return  # the executor has ended first
            logger.exception("A token mask was refused")
            self._give_up(outputs, sequence_id, f"A token mask was refused: {error}")

    def _give_up(self, outputs: dict[int, _Output], sequence_id: int, message: str) -> None:
        outputs.pop(sequence_id, None)
        self._fail(sequence_id, message)
