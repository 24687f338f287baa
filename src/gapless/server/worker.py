"""A worker process as the front end sees it: started, watched, and started again when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

import zmq

from gapless.errors import GaplessError
from gapless.server.channel import AsyncChannel
from gapless.server.failures import InternalError, error_of
from gapless.server.messages import Fatal
from gapless.server.process import Role, Settings, command

T = TypeVar("T")

logger = logging.getLogger("gapless.server")

# A worker that dies this often without having become ready will not become so.
_MAX_FAILED_STARTS = 3
_LONGEST_DELAY_S = 30.0
_CALM_S = 60.0  # after this long without a death, the next restart is immediate again
_STOP_S = 10.0


class Worker(Generic[T]):
    """One process and the channel to it.

    `on_message` gets what it says; `on_death` is called as soon as it is gone, before it is started again;
    `on_give_up` when it cannot be started any more.
    """

    def __init__(
        self,
        role: Role,
        folder: str,
        make_settings: Callable[[str], Settings],
        kind: Any,
        *,
        on_message: Callable[[Worker[T], T], None],
        on_death: Callable[[Worker[T]], None],
        on_give_up: Callable[[GaplessError], None],
        name: str = "",
    ) -> None:
        self.role = role
        self.name = name or role.value
        self.is_ready = False
        self.num_restarts = 0
        self._folder = folder
        self._make_settings = make_settings
        self._kind = kind
        self._on_message = on_message
        self._on_death = on_death
        self._on_give_up = on_give_up
        self._channel: AsyncChannel[T] | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep_alive(), name=f"gapless-{self.name}")

    def send(self, message: Any) -> None:
        """To the process that runs now; dropped if there is none, as it would be lost with one that dies."""
        if self._channel is not None:
            with contextlib.suppress(zmq.Again):  # nobody is connected
                self._channel.send(message)

    async def stop(self) -> None:
        """Ends the process, kindly at first."""
        if self._task is None:
            return
        self._task.cancel()
        await asyncio.wait([self._task])
        process = self._process
        if process is not None and process.returncode is None:
            assert process.stdin is not None
            process.stdin.close()
            try:
                await asyncio.wait_for(process.wait(), _STOP_S)
            except asyncio.TimeoutError:
                logger.warning("The %s did not end within %g s and is killed", self.name, _STOP_S)
                process.kill()
                await process.wait()
        self._close_channel()

    async def _keep_alive(self) -> None:
        failed_starts, delay_s = 0, 0.0
        while True:
            started_s = time.monotonic()
            failure = await self._run_once()
            failed_starts = 0 if self.is_ready else failed_starts + 1
            self.is_ready = False
            self._close_channel()
            self._on_death(self)
            if failure is None and failed_starts >= _MAX_FAILED_STARTS:
                failure = InternalError(f"The {self.name} died {failed_starts} times while it was starting.")
            if failure is not None:
                self._on_give_up(failure)
                return
            if time.monotonic() - started_s > _CALM_S:
                delay_s = 0.0
            await asyncio.sleep(delay_s)
            delay_s = min(_LONGEST_DELAY_S, max(1.0, 2 * delay_s))
            self.num_restarts += 1

    async def _run_once(self) -> GaplessError | None:
        """One life of the process; its last words, if it had any."""
        address = f"ipc://{Path(self._folder, f'{self.name}-{self.num_restarts}')}"
        fatal: list[GaplessError] = []
        self._channel = AsyncChannel(self._kind, lambda message: self._take(message, fatal), bind=address)
        arguments = command(self.role, self._make_settings(address))
        try:
            process = await asyncio.create_subprocess_exec(*arguments, stdin=asyncio.subprocess.PIPE)
        except OSError as error:  # no memory, or too many files are open: that may pass
            logger.error("The %s could not be started: %s", self.name, error)
            return None
        self._process = process
        status = await process.wait()
        if not fatal:
            cause = f"signal {-status}" if status < 0 else f"status {status}"
            logger.error("The %s (process %d) ended with %s", self.name, process.pid, cause)
        return fatal[0] if fatal else None

    def _take(self, message: T, fatal: list[GaplessError]) -> None:
        if not isinstance(message, Fatal):
            self._on_message(self, message)
            return
        fatal.append(error_of(message.failure))
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def _close_channel(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
