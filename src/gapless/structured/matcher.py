"""A compiled grammar, and the place that one output has reached in it."""

from __future__ import annotations

from collections.abc import Sequence

import llguidance
import numpy as np

from gapless.errors import GaplessError
from gapless.structured.messages import reason_of
from gapless.structured.tokens import Mask, TokenTable, allows


class GrammarError(GaplessError):
    """An output cannot go on under its grammar; the message is the reason, without a full stop."""


class Matcher:
    """Follows one output through its grammar. For one thread at a time; a failure is final."""

    def __init__(self, engine: llguidance.LLMatcher, tokens: TokenTable, mask: Mask | None = None) -> None:
        """`engine` has no error. `mask` is known when the matcher is a copy."""
        self._engine = engine
        self._tokens = tokens
        self._mask = mask
        self.failure: GrammarError | None = None
        """Why the output cannot go on."""
        self.is_finished = False
        """Whether an end token was accepted: nothing comes after it."""

    @property
    def mask(self) -> Mask:
        """Tokens that may come next, at least one: end tokens exactly where the grammar may end.

        GrammarError if there is none, or if finding them would cost too much.
        """
        if self._mask is None:
            if self.is_finished:
                raise GrammarError("the output has ended")
            if self.failure is None:
                _compute_masks([self])
            if self.failure is not None:
                raise self.failure
            assert self._mask is not None
        return self._mask

    def copy(self) -> Matcher:
        """A matcher at the same place, of one that can go on."""
        return Matcher(self._engine.deep_copy(), self._tokens, self.mask)

    def accept(self, token_id: int) -> None:
        """Goes on past a token of the mask. GrammarError for any other, or if nothing can follow."""
        self.mask  # noqa: B018  # without it nothing is allowed
        advance([(self, token_id)])
        if self.failure is not None:
            raise self.failure

    def _set_mask(self, mask: Mask) -> None:
        """Takes the engine's answer."""
        # In an error it has the end tokens: that must never pass for an end of the grammar.
        if error := self._engine.get_error():
            self.failure = GrammarError(reason_of(error))
            return
        may_end = (mask & self._tokens.end).any() and self._engine.is_accepting()
        mask = mask & self._tokens.text
        if may_end:
            mask |= self._tokens.end
        if mask.any():
            self._mask = mask
        else:
            self.failure = GrammarError("no token is allowed")


class Grammar:
    """A grammar that allows at least one first token; shared by all outputs that it constrains."""

    def __init__(self, start: Matcher) -> None:
        """GrammarError if it allows nothing at all. `start` is the grammar's own from now on."""
        start.mask  # noqa: B018  # computed once for all
        self._start = start

    def matcher(self) -> Matcher:
        """A matcher at the beginning of an output."""
        return self._start.copy()


def advance(steps: Sequence[tuple[Matcher, int]], pool: llguidance.LLExecutor | None = None) -> None:
    """Lets different matchers, whose masks are known, accept a token each, and computes their next masks.

    It runs in the threads of `pool`, without the GIL. Those that cannot go on have a `failure` afterwards.
    """
    going_on = []
    for matcher, token_id in steps:
        mask, matcher._mask = matcher._mask, None
        if mask is None or not allows(mask, token_id):
            matcher.failure = GrammarError(f"token {token_id} is not allowed here")
        elif allows(matcher._tokens.end, token_id):
            matcher.is_finished = True
        else:
            going_on.append((matcher, token_id))
    pairs = [(matcher._engine, token_id) for matcher, token_id in going_on]
    if pool is None:
        for engine, token_id in pairs:
            engine.consume_token(token_id)
    elif pairs:
        pool.consume_token_par(pairs)
    _compute_masks(
        [matcher for matcher, _ in going_on], pool
    )  # an engine that has refused stays in its error


def _compute_masks(matchers: Sequence[Matcher], pool: llguidance.LLExecutor | None = None) -> None:
    """Fills in the masks or the failures of matchers of one model."""
    if not matchers:
        return
    rows = np.zeros((len(matchers), len(matchers[0]._tokens.text)), dtype=np.uint32)
    first, row_bytes = rows.ctypes.data, rows.strides[0]
    if pool is None:
        for row, matcher in enumerate(matchers):
            matcher._engine.unsafe_compute_mask_ptr(first + row * row_bytes, row_bytes)
    else:
        targets = [(matcher._engine, row) for row, matcher in enumerate(matchers)]
        pool.unsafe_compute_mask_ptr(targets, first, row_bytes, len(matchers))
    for matcher, mask in zip(matchers, rows, strict=True):
        matcher._set_mask(mask)
