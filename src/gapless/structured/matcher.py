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
    """Follows one output through its grammar. For one thread at a time; an error is final."""

    def __init__(self, engine: llguidance.LLMatcher, tokens: TokenTable, mask: Mask | None = None) -> None:
        """`engine` has no error. `mask` is known when the matcher is a copy."""
        self._engine = engine
        self._tokens = tokens
        self._mask = mask
        self.is_finished = False
        """Whether an end token was accepted: nothing comes after it."""

    @property
    def mask(self) -> Mask:
        """Tokens that may come next, at least one: end tokens exactly where the grammar may end.

        GrammarError if there is none, or if finding them would cost too much.
        """
        if self._mask is None:
            _compute_masks(llguidance.LLExecutor(1), [self])
            if self._mask is None:
                raise self._error()
        return self._mask

    def copy(self) -> Matcher:
        """A matcher at the same place."""
        return Matcher(self._engine.deep_copy(), self._tokens, self._mask)

    def accept(self, token_id: int) -> None:
        """Goes on past a token of the mask. GrammarError for any other."""
        self.mask  # noqa: B018  # without it nothing is allowed
        if (error := advance(llguidance.LLExecutor(1), [(self, token_id)])[0]) is not None:
            raise error

    def _error(self) -> GrammarError:
        return GrammarError(reason_of(self._engine.get_error() or "no token is allowed"))


class Grammar:
    """A grammar that allows at least one first token; shared by all outputs that it constrains."""

    def __init__(self, start: Matcher) -> None:
        """GrammarError if it allows nothing at all. `start` is the grammar's own from now on."""
        start.mask  # noqa: B018  # computed once for all
        self._start = start

    def matcher(self) -> Matcher:
        """A matcher at the beginning of an output."""
        return self._start.copy()


def advance(pool: llguidance.LLExecutor, steps: Sequence[tuple[Matcher, int]]) -> list[GrammarError | None]:
    """Lets different matchers, whose masks are known, accept a token each, and computes their next masks.

    It runs in the threads of `pool`, without the GIL. An error for each matcher that cannot go on.
    """
    errors: dict[Matcher, GrammarError] = {}
    going_on = []
    for matcher, token_id in steps:
        mask, matcher._mask = matcher._mask, None
        if mask is None or matcher.is_finished or not allows(mask, token_id):
            errors[matcher] = GrammarError(f"token {token_id} is not allowed here")
        elif allows(matcher._tokens.end, token_id):
            matcher.is_finished = True
        else:
            going_on.append((matcher, token_id))
    pairs = [(matcher._engine, token_id) for matcher, token_id in going_on]
    accepted = pool.consume_token_par(pairs) if pairs else []
    alive = []
    for (matcher, _), ok in zip(going_on, accepted, strict=True):
        if ok:
            alive.append(matcher)
        else:
            errors[matcher] = matcher._error()
    _compute_masks(pool, alive)
    errors |= {matcher: matcher._error() for matcher in alive if matcher._mask is None}
    return [errors.get(matcher) for matcher, _ in steps]


def _compute_masks(pool: llguidance.LLExecutor, matchers: Sequence[Matcher]) -> None:
    """Fills in the masks of matchers of one model; None where no token is allowed."""
    if not matchers:
        return
    tokens = matchers[0]._tokens
    rows = np.zeros((len(matchers), len(tokens.text)), dtype=np.uint32)
    targets = [(matcher._engine, row) for row, matcher in enumerate(matchers)]
    pool.unsafe_compute_mask_ptr(targets, rows.ctypes.data, rows.strides[0], len(matchers))
    for matcher, row in zip(matchers, rows, strict=True):
        # In an error the engine's mask has the end tokens: that must never pass for an end of the grammar.
        if matcher._engine.get_error():
            continue
        may_end = (row & tokens.end).any() and matcher._engine.is_accepting()
        row &= tokens.text
        if may_end:
            row |= tokens.end
        matcher._mask = row.copy() if row.any() else None
