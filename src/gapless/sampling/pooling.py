"""How the final states of a text's tokens become one vector, its embedding."""

from __future__ import annotations

from enum import Enum

from gapless.sampling import check


class Pooling(Enum):
    """Whose state is taken. `value` is what users write and what the native core reads."""

    LAST = "last"
    """The last token's, which has seen all others."""
    MEAN = "mean"
    """The mean of all."""
    CLS = "cls"
    """The first token's."""

    @staticmethod
    def of(value: Pooling | str) -> Pooling:
        """A kind by its name. InvalidRequestError (with `param`) if there is no such kind."""
        if isinstance(value, Pooling):
            return value
        check.one_of("pooling", value, [kind.value for kind in Pooling])
        return Pooling(value)

    @property
    def needs_all_tokens(self) -> bool:
        """Whether every token must be computed: a prefix cache holds keys and values, but no states."""
        return self is not Pooling.LAST
