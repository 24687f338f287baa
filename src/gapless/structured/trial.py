"""Compiles grammars in a process of its own first, whose time, memory and stack are limited.

The grammar engine's own limits do not hold everywhere: an intersection of a few hundred expressions takes
longer than anybody waits, and a chain of a thousand references overflows the stack. Inside of the server's
process neither could be stopped. What compiles here compiles there as well.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import llguidance

from gapless.errors import EngineError
from gapless.structured.gbnf import is_gbnf, lark_of_gbnf
from gapless.structured.messages import reason_of

MAX_CPU_S = 2  # a schema of 10,000 properties takes 7 s, one of 1,000 takes 0.1 s
MAX_MEMORY_BYTES = 1 << 30
MAX_STACK_BYTES = 8 << 20
_MAX_WALL_S = 60.0  # on a machine that is too busy to give the process its time

# Where only one text can follow, the engine would ask for its tokens by a call into Python, and wait for the
# GIL in the middle of a mask. Without forcing, the model breaks the text up as it likes.
NO_FORCING = '%llguidance {"no_forcing": true}\n'


def parser_limits() -> llguidance.LLParserLimits:
    """The engine's own limits: a mask takes at most 14 ms of the lexer and 3 ms of the parser.

    A state of the lexer takes about a kilobyte: 100 MB for a grammar at most.
    """
    return llguidance.LLParserLimits(max_lexer_states=100_000, verbose_errors=False)


def try_out(source: str, is_grammar: bool = False) -> str:
    """The grammar in the engine's language. `is_grammar`: `source` is what a user wrote, GBNF or Lark.

    ValueError with the reason if it does not compile within the limits or allows no output.
    """
    command = [sys.executable, "-m", "gapless.structured.trial"]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    request = json.dumps([source, is_grammar]).encode()
    answer: dict[str, str] = {}
    try:
        done = subprocess.run(
            command, input=request, env=environment, capture_output=True, timeout=_MAX_WALL_S, check=False
        )
        if done.returncode == 0:
            answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        pass
    except OSError as error:
        raise EngineError(f"No process can be started to try a grammar out: {error}") from error
    if "source" in answer:
        return answer["source"]
    raise ValueError(
        answer.get("error")
        or f"it is too complex: compiling it takes more than {MAX_CPU_S} s, {MAX_MEMORY_BYTES >> 30} GiB of "
        f"memory or {MAX_STACK_BYTES >> 20} MiB of stack"
    )


def main() -> None:
    """What the process does: reads `try_out`'s arguments as JSON, writes its result or the reason."""
    _limit_resources()
    source, is_grammar = json.load(sys.stdin)
    try:
        answer = {"source": _compile(source, is_grammar)}
    except ValueError as error:
        answer = {"error": str(error)}
    json.dump(answer, sys.stdout)


def _compile(source: str, is_grammar: bool) -> str:
    if is_grammar:
        source = lark_of_gbnf(source) if is_gbnf(source) else source
        source = f"{source}\n{NO_FORCING}"  # options add up, and the last one counts
    # Bytes do for tokens: what they allow, the model's tokens allow as well.
    engine = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), source, log_level=0, limits=parser_limits())
    if not (error := engine.get_error()):
        engine.compute_bitmask()
        if error := engine.get_error():
            raise ValueError(f"it allows no output ({reason_of(error)})")
    if error:
        raise ValueError(reason_of(error))
    return source


def _limit_resources() -> None:
    import resource

    os.nice(10)  # the forward passes go first
    for kind, limit in (
        (resource.RLIMIT_CPU, MAX_CPU_S),
        (resource.RLIMIT_AS, MAX_MEMORY_BYTES),
        (resource.RLIMIT_STACK, MAX_STACK_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(kind)
        resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


if __name__ == "__main__":
    main()
