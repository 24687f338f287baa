"""Entry of the server's worker processes: `python -m gapless.server.process ROLE SETTINGS`.

A worker ends when its standard input does. That is its lifeline: it closes when the front end lets go of it,
and also when the front end is killed. Signals are the front end's business: a worker that ended by the same
SIGTERM could not finish what it does.
"""

from __future__ import annotations

import logging
import os
import select
import shutil
import signal
import sys
from enum import Enum
from pathlib import Path

import msgspec
import zmq

from gapless.config import EngineConfig

LAST_WORDS_S = 2.0  # a front end that lives has read them long before


class Role(Enum):
    TOKENIZER = "tokenizer"
    DETOKENIZER = "detokenizer"
    ENGINE = "engine"


class Settings(msgspec.Struct, frozen=True):
    """What a worker is started with. `address`: where the front end listens to it."""

    address: str
    engine: EngineConfig
    tokens_address: str | None = None
    """Where a detokenizer takes tokens."""
    chat_template: str | None = None
    log_level: int = logging.WARNING


def command(role: Role, settings: Settings) -> list[str]:
    """The command line of a worker."""
    return [
        sys.executable,
        "-m",
        "gapless.server.process",
        role.value,
        msgspec.json.encode(settings).decode(),
    ]


def lifeline_has_ended() -> bool:
    """Whether the front end has let go. To be asked when standard input is readable."""
    return not os.read(sys.stdin.fileno(), 4096)


def say_last_words(socket: zmq.Socket[bytes], message: bytes) -> None:
    """Sends why this process ends, and waits until the front end has read it: it lets go then."""
    socket.send(message)
    select.select([sys.stdin], [], [], LAST_WORDS_S)


def main() -> None:
    """Runs one worker to its end."""
    role, settings = Role(sys.argv[1]), msgspec.json.decode(sys.argv[2], type=Settings)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=settings.log_level, format=f"%(name)s ({role.value}): %(message)s")
    if role is Role.ENGINE:
        from gapless.server.engine_worker import run
    elif role is Role.DETOKENIZER:
        from gapless.server.detokenizer_worker import run
    else:
        from gapless.server.tokenizer_worker import run
    run(settings)
    # The front end does this too, unless it was killed.
    shutil.rmtree(Path(settings.address.removeprefix("ipc://")).parent, ignore_errors=True)


if __name__ == "__main__":
    main()
