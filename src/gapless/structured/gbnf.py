"""Grammars in GBNF, rewritten in the grammar engine's own language."""

from __future__ import annotations

import re

_RULE = re.compile(r"^[ \t]*[\w-]+\s*::=", re.MULTILINE)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_CLASS_OPERATOR = re.compile(r"\[[^\]\n]*(&&|--|~~)")


def is_gbnf(grammar: str) -> bool:
    """Whether rules are written `name ::= ...`."""
    return _RULE.search(grammar) is not None


def lark_of_gbnf(grammar: str) -> str:
    """ValueError for a grammar that cannot be read, or that the rewriting would change the meaning of."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if (operator := _CLASS_OPERATOR.search(grammar)) is not None:
        raise ValueError(
            f"{operator[1]!r} in a character class would be an operator: write one of the characters as \\xHH"
        )
    try:
        return str(gbnf_to_lark(_ESCAPE.sub(_plain_escape, grammar)))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError:
        raise
    except Exception as error:  # the rewriter raises plain Exception, for a rule that is missing for example
        raise ValueError(str(error)) from None


def _plain_escape(match: re.Match[str]) -> str:
    r"""`\xHH` for a character of ASCII, others as they are: no other escape is taken over right."""
    digits = match[1] or match[2] or match[3]
    if digits is None:
        return match[0]
    code = int(digits, 16)
    if code > 0x10FFFF or 0xD800 <= code < 0xE000:
        raise ValueError(f"{match[0]} is no character")
    return f"\\x{code:02x}" if code < 0x80 else chr(code)
