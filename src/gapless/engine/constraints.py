"""Structured output, as the engine sees it: grammars when requests come in, masks while they run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from gapless.engine.executor import Executor
from gapless.engine.request import Sequence
from gapless.sampling import StructuredOutputs

if TYPE_CHECKING:
    from gapless.structured.compiler import GrammarCompiler
    from gapless.structured.masks import MaskFeeder
    from gapless.structured.matcher import Grammar
    from gapless.tokenizer import Tokenizer

# Masks are computed while all of the threads of the executor are busy with a step. A mask takes 0.1 ms and a
# step 3 ms or more: one thread in eight keeps up with a full table of constrained slots.
_STEP_THREADS_PER_MASK_THREAD = 8


class Constraints:
    """The grammars and masks of one engine. Costs nothing before the first constrained request.

    `fail` ends a sequence (by its id) that cannot go on; it is called in a thread of its own.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer,
        vocab_size: int,
        fail: Callable[[int, str], None],
    ) -> None:
        self._executor = executor
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._fail = fail
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._feeder: MaskFeeder | None = None

    def compile(self, constraint: StructuredOutputs | None) -> Grammar | None:
        """See `GrammarCompiler.compile`. Not to be called under the engine's lock: it takes its time."""
        if constraint is None:
            return None
        with self._lock:
            if self._compiler is None:
                from gapless.structured.compiler import GrammarCompiler

                self._compiler = GrammarCompiler(self._tokenizer, self._vocab_size)
        return self._compiler.compile(constraint)

    # --- under the engine's lock ---

    def admit(self, sequence: Sequence) -> None:
        """The executor has got the sequence, for the first time or after a preemption."""
        if (grammar := sequence.request.grammar) is None:
            return
        if self._feeder is None:
            from gapless.structured.masks import MaskFeeder

            num_threads = max(1, self._executor.num_threads // _STEP_THREADS_PER_MASK_THREAD)
            self._feeder = MaskFeeder(self._executor.set_mask, self._fail, num_threads)
        assert sequence.slot is not None
        self._feeder.admit(sequence.id, sequence.slot, grammar)

    def accept(self, tokens: list[tuple[Sequence, int]]) -> None:
        """New tokens of constrained sequences, out of one step."""
        if tokens and self._feeder is not None:
            self._feeder.accept([(sequence.id, token_id) for sequence, token_id in tokens])

    def drop(self, sequence: Sequence) -> None:
        """The sequence has ended."""
        if sequence.request.grammar is not None and self._feeder is not None:
            self._feeder.drop(sequence.id)

    # --- the end ---

    def close(self) -> None:
        """Waits for the masks' thread; not under the engine's lock. Idempotent."""
        if self._feeder is not None:
            self._feeder.close()
