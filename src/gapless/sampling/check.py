"""Checks of single values: the error names the field, the value and the limit."""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import NoReturn

from gapless.errors import InvalidRequestError


def refuse(name: str, value: object, limit: str) -> NoReturn:
    """Raise InvalidRequestError: `name` must be `limit`, but is `value`."""
    raise InvalidRequestError(f"{name} must be {limit}, but it is {value!r}.", param=name)


def one_of(name: str, value: object, known: Sequence[str]) -> None:
    """One of at least two known words."""
    if value not in known:
        refuse(name, value, f"{', '.join(known[:-1])} or {known[-1]}")


def integer(name: str, value: object, low: int, high: int | None = None) -> int:
    """`value` as an int in [low, high]; numpy integers pass, bools and floats do not."""
    limit = f"an integer of at least {low}" if high is None else f"an integer from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        refuse(name, value, limit)
    number = operator.index(value)
    if number < low or (high is not None and number > high):
        refuse(name, value, limit)
    return number


def real(name: str, value: object, low: float, high: float = math.inf, open_low: bool = False) -> float:
    """`value` as a finite float in [low, high], or in (low, high] with `open_low`."""
    edge = f"above {low}" if open_low else f"of at least {low}"
    limit = f"a finite number {edge}" if high == math.inf else f"a number from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        refuse(name, value, limit)
    number = float(value)
    if not math.isfinite(number) or number < low or number > high or (open_low and number == low):
        refuse(name, value, limit)
    return number


def boolean(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        refuse(name, value, "True or False")
    return value


def strings(name: str, value: object) -> tuple[str, ...]:
    """None, one string or several, as a tuple of distinct non-empty strings."""
    if value is None:
        return ()
    items = [value] if isinstance(value, str) else value
    if isinstance(items, (bytes, Mapping)) or not isinstance(items, Iterable):
        refuse(name, value, "a string or a list of strings")
    result = tuple(dict.fromkeys(items))
    for item in result:
        if not isinstance(item, str) or not item:
            refuse(name, item, "made of non-empty strings")
    return result


def token_ids(name: str, value: object) -> tuple[int, ...]:
    """None or token ids, as a tuple of distinct ints."""
    if value is None:
        return ()
    if isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Iterable):
        refuse(name, value, "a list of token ids")
    return tuple(dict.fromkeys(integer(name, item, 0) for item in value))
