"""Turns constraints into grammars, in bounded time and memory."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import llguidance

from gapless.errors import InvalidRequestError
from gapless.sampling import StructuredOutputs
from gapless.structured.matcher import Grammar, GrammarError, Matcher
from gapless.structured.messages import reason_of
from gapless.structured.schema import check_counts
from gapless.structured.tokens import TokenTable
from gapless.structured.trial import MAX_STACK_BYTES, NO_FORCING, parser_limits, try_out

if TYPE_CHECKING:
    from gapless.tokenizer import Tokenizer

logger = logging.getLogger("gapless.structured")

MAX_TEXT_BYTES = 256 << 10
_MAX_CACHED = 64
# A line break and an indentation. Small models that may write any whitespace do so for ever.
_WHITESPACE = r"\n?[ \t]{0,32}"


class GrammarCompiler:
    """Compiles constraints for one model, and keeps the latest. Thread-safe; cheap until it is first used."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """`vocab_size`: tokens that the model gives logits for."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._tokens: TokenTable | None = None
        self._cache: OrderedDict[StructuredOutputs, Grammar] = OrderedDict()
        # Held while the cache is used, and while a grammar is compiled: a client that sends hostile ones gets
        # one core, not all of them.
        self._cache_lock = threading.Lock()
        self._compile_lock = threading.Lock()

    def compile(self, constraint: StructuredOutputs) -> Grammar:
        """The grammar of a constraint. A new one takes 0.1 s; the first also reads the vocabulary, up to 2 s.

        InvalidRequestError if the grammar engine cannot express it, if it allows no output, or if it is too
        complex.
        """
        if (grammar := self._cached(constraint)) is not None:
            return grammar
        with self._compile_lock:
            if (grammar := self._cached(constraint)) is not None:  # compiled while we waited
                return grammar
            try:
                grammar = self._compile(constraint)
            except (ValueError, RecursionError, GrammarError) as error:
                if isinstance(error, InvalidRequestError):
                    raise
                name = constraint.constraint
                raise InvalidRequestError(
                    f"{name} cannot be used as a constraint: {error}.", param=name
                ) from None
        with self._cache_lock:
            self._cache[constraint] = grammar
            if len(self._cache) > _MAX_CACHED:
                self._cache.popitem(last=False)
        return grammar

    def _cached(self, constraint: StructuredOutputs) -> Grammar | None:
        with self._cache_lock:
            if (grammar := self._cache.get(constraint)) is not None:
                self._cache.move_to_end(constraint)
            return grammar

    def _compile(self, constraint: StructuredOutputs) -> Grammar:
        started = time.perf_counter()
        if constraint.grammar is not None:
            source = try_out(_checked_size("grammar", constraint.grammar), is_grammar=True)
        else:
            source = try_out(_source(constraint))
        if self._tokens is None:
            self._tokens = TokenTable(self._tokenizer, self._vocab_size)
        grammar = _with_enough_stack(source, self._tokens)
        logger.debug("Compiled a grammar of %d bytes in %.3f s", len(source), time.perf_counter() - started)
        return grammar


def _with_enough_stack(source: str, tokens: TokenTable) -> Grammar:
    """Compiles what `try_out` has passed, in a thread with more stack than it had there."""
    result: Future[Grammar] = Future()

    def run() -> None:
        try:
            engine = llguidance.LLMatcher(tokens.engine, source, log_level=0, limits=parser_limits())
            if error := engine.get_error():
                raise GrammarError(reason_of(error))
            result.set_result(Grammar(Matcher(engine, tokens)))
        except BaseException as error:
            result.set_exception(error)

    thread = threading.Thread(target=run, name="gapless-grammar", daemon=True)
    previous = threading.stack_size(4 * MAX_STACK_BYTES)
    try:
        thread.start()
    finally:
        threading.stack_size(previous)
    return result.result()


def _source(constraint: StructuredOutputs) -> str:
    """Any constraint but a grammar in the engine's language."""
    if constraint.regex is not None:
        return f"{NO_FORCING}start: /{_regex(constraint.regex)}/"
    if constraint.choice is not None:
        regex = "|".join(re.sub(r"[\\.+*?()|\[\]{}^$#&~-]", r"\\\g<0>", text) for text in constraint.choice)
        return f"{NO_FORCING}start: /{llguidance.regex_to_lark(_checked_size('choice', regex))}/"
    return f"{NO_FORCING}start: %json {_schema(constraint)}"


def _schema(constraint: StructuredOutputs) -> str:
    text = '{"type": "object"}' if constraint.json is None else str(constraint.json)
    schema = json.loads(_checked_size("json", text))
    check_counts(schema)
    if isinstance(schema, bool):
        if not schema:
            raise ValueError("nothing satisfies the schema false")
        schema = {}
    options: dict[str, Any] = {"whitespace_flexible": not constraint.disable_any_whitespace}
    if not constraint.disable_any_whitespace:
        options["whitespace_pattern"] = constraint.whitespace_pattern or _WHITESPACE
    # Ours alone: a schema's own could tell the engine to ignore what it does not understand.
    schema["x-guidance"] = options
    return json.dumps(schema)


def _regex(regex: str) -> str:
    if (len(regex) - len(regex.rstrip("\\"))) % 2:
        raise ValueError("it ends with a backslash that escapes nothing")
    return llguidance.regex_to_lark(_checked_size("regex", regex))


def _checked_size(name: str, text: str) -> str:
    if (size := len(text.encode())) > MAX_TEXT_BYTES:
        raise ValueError(f"{name} has {size} bytes, but at most {MAX_TEXT_BYTES} are accepted")
    return text
