"""How failures look on the command line: one clear line, and an exit status that tells whose fault it was."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

import typer

from gapless.errors import GaplessError, InvalidRequestError

EXIT_FAILED = 1
EXIT_WRONG_USE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count it


@contextlib.contextmanager
def reported_errors(debug: bool) -> Iterator[None]:
    """Turns our own errors into a line on standard error; with `debug` the traceback is shown instead."""
    try:
        yield
    except GaplessError as error:
        if debug:
            raise
        typer.secho(f"gapless: {error}", fg="red", err=True)
        raise typer.Exit(EXIT_WRONG_USE if isinstance(error, InvalidRequestError) else EXIT_FAILED) from None
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except BrokenPipeError:  # the reader of our output has left: nothing to say, and nobody to say it to
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(EXIT_FAILED) from None
