"""A jinja2 environment in which a template of unknown origin can do no harm.

jinja2's sandbox keeps templates from reaching Python's internals. It does not bound time or memory, so here
every turn of a loop and every call is counted and looked at against a deadline, and operations that make a
large value out of small ones are checked before they run.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import MAX_RANGE, ImmutableSandboxedEnvironment

from gapless.errors import TemplateError

# A conversation of a thousand messages takes some ten thousand steps and a few milliseconds.
MAX_STEPS = 1_000_000
MAX_SECONDS = 5.0
MAX_LENGTH = 1 << 24  # of a text or list; four characters a token, this is above any context window
MAX_BITS = 64
MAX_INDENT = 16
_STEPS_BETWEEN_CLOCK_READS = 256
_LARGE_WIDTH = re.compile(r"\d{6}")  # in a format string


class TemplateLimitError(jinja2.TemplateRuntimeError):
    """A template ran longer, or made larger values, than any honest one does."""


@dataclass
class _Budget:
    """What one rendering may still spend."""

    steps: int = MAX_STEPS
    deadline: float = field(default_factory=lambda: time.monotonic() + MAX_SECONDS)

    def spend(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise TemplateLimitError(f"the template took more than {MAX_STEPS} steps")
        if self.steps % _STEPS_BETWEEN_CLOCK_READS == 0 and time.monotonic() > self.deadline:
            raise TemplateLimitError(f"the template took longer than {MAX_SECONDS:g} s")


_budget: ContextVar[_Budget] = ContextVar("budget")


def compile_template(source: str) -> jinja2.Template:
    """Compile a chat template. TemplateError if it does not parse."""
    try:
        return ChatEnvironment().from_string(source)
    except (jinja2.TemplateError, RecursionError) as error:
        raise TemplateError(f"The chat template does not parse: {error}") from error


def render(template: jinja2.Template, variables: Mapping[str, Any]) -> str:
    """Render a template of `compile_template`.

    TemplateError with the template's own words if it raises, or if it goes beyond its bounds. TypeError is
    passed on.
    """
    token = _budget.set(_Budget())
    pieces: list[str] = []
    length = 0
    try:
        for piece in template.generate(variables):
            length += len(piece)
            if length > MAX_LENGTH:
                raise TemplateLimitError(f"the template writes more than {MAX_LENGTH} characters")
            pieces.append(piece)
    except TypeError:
        raise
    except jinja2.TemplateError as error:
        raise TemplateError(f"The chat template refused the messages: {error}") from error
    except RecursionError as error:
        raise TemplateError("The chat template recurses too deeply.") from error
    except Exception as error:  # templates can raise anything that Python expressions can
        raise TemplateError(f"The chat template failed: {type(error).__name__}: {error}") from error
    finally:
        _budget.reset(token)
    return "".join(pieces)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Renders chat templates as Hugging Face's reference does, within bounds."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag])
        del self.globals["lipsum"]  # makes text of any length
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now
        self.filters["tojson"] = _to_json
        self.filters["counted"] = _counted
        self.filters["joined"] = _joined
        for name in ("center", "format", "indent", "join", "replace"):
            self.filters[name] = _bounded_filter(name, self.filters[name])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = _filter("counted", loop.iter)
        for concatenation in template.find_all(nodes.Concat):  # the operator `~`
            parts = nodes.List(concatenation.nodes, lineno=concatenation.lineno)
            concatenation.nodes = [_filter("joined", parts)]
        return template

    def call(self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Call `__obj`, counted and bounded."""
        _budget.get().spend()
        method = getattr(__obj, "__wrapped__", __obj)  # jinja2 wraps str.format
        _check_operands(
            getattr(method, "__name__", ""), getattr(method, "__self__", None), *args, *kwargs.values()
        )
        return _checked(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator, counted and bounded."""
        _budget.get().spend()
        _check_operands(operator, left, right)
        return _checked(super().call_binop(context, operator, left, right))


class GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks what a model is trained on; here it only groups."""

    tags = {"generation"}  # noqa: RUF012 (declared by the base class)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        """The statements inside."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _filter(name: str, value: nodes.Node) -> nodes.Filter:
    assert isinstance(value, nodes.Expr)
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


def _counted(iterable: Iterable[Any]) -> Iterator[Any]:
    budget = _budget.get()
    for item in iterable:
        budget.spend()
        yield item


def _joined(values: list[Any]) -> str:
    _budget.get().spend()
    return str(_checked("".join(map(str, values))))


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    is_given_context = hasattr(function, "jinja_pass_arg")

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        _check_operands(name, *args[is_given_context:], *kwargs.values())
        return _checked(function(*args, **kwargs))

    return bounded


def _check_operands(operation: str, *operands: Any) -> None:
    """Refuse what would make a huge value, as far as that can be seen from the operands."""
    if operation in _LENGTHS and len(operands) > 1:
        for operand in operands:
            if isinstance(operand, int) and abs(operand) > MAX_LENGTH:
                raise TemplateLimitError(f"the template uses the number {operand} in {operation!r}")
        if _LENGTHS[operation](operands[0], *operands[1:3]) > MAX_LENGTH:
            raise TemplateLimitError(f"the template makes too large a value by {operation!r}")


def _length(value: Any) -> int:
    """Items in a value; a generator has at most as many as the sandbox lets `range` make."""
    return len(value) if isinstance(value, Sized) else MAX_RANGE


def _length_of_product(left: Any, right: Any) -> int:
    if isinstance(left, int):
        left, right = right, left
    return len(left) * right if isinstance(left, str | list | tuple) and isinstance(right, int) else 0


def _length_of_power(base: Any, exponent: Any) -> int:
    return MAX_LENGTH + 1 if exponent > MAX_BITS else 0


def _length_of_format(text: Any, *_: Any) -> int:
    return MAX_LENGTH + 1 if isinstance(text, str) and _LARGE_WIDTH.search(text) else 0


def _length_of_replacement(text: Any, old: Any, new: Any = "") -> int:
    return str(text).count(str(old)) * len(str(new))


def _length_of_join(one: Any, other: Any, *_: Any) -> int:
    return _length(one) * _length(other)  # separator and items, or items and separator


def _length_of_padded(_text: Any, width: Any, *_: Any) -> int:
    return width if isinstance(width, int) else 0


_LENGTHS: Mapping[str, Callable[..., int]] = {
    "*": _length_of_product,
    "**": _length_of_power,
    "%": _length_of_format,
    "format": _length_of_format,
    "format_map": _length_of_format,
    "replace": _length_of_replacement,
    "join": _length_of_join,
    "center": _length_of_padded,
    "ljust": _length_of_padded,
    "rjust": _length_of_padded,
    "zfill": _length_of_padded,
    "expandtabs": _length_of_padded,
    "indent": _length_of_padded,
}


def _checked(value: Any) -> Any:
    if isinstance(value, str | list | tuple) and len(value) > MAX_LENGTH:
        raise TemplateLimitError(f"the template makes a value of length {len(value)}")
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        raise TemplateLimitError(f"the template makes a number of more than {MAX_BITS} bits")
    return value


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, as chat templates expect it."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=min(indent, MAX_INDENT) if isinstance(indent, int) else None,
        separators=separators,
        sort_keys=sort_keys,
    )
