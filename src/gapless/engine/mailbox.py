"""A queue from the engine's threads to one consumer, who waits as a thread or as a coroutine."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")


class Mailbox(Generic[T]):
    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._arrived = threading.Condition()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None

    def put(self, item: T) -> None:
        with self._arrived:
            self._items.append(item)
            self._arrived.notify()
            if self._waiter is not None:
                loop, event = self._waiter
                self._waiter = None
                if not loop.is_closed():
                    loop.call_soon_threadsafe(event.set)

    def get(self, timeout_s: float | None = None) -> T:
        """The oldest item. TimeoutError when none comes in time."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: self._items, timeout_s):
                raise TimeoutError
            return self._items.popleft()

    async def get_async(self) -> T:
        import asyncio  # 4 MB that a program without it does not pay for

        while True:
            with self._arrived:
                if self._items:
                    return self._items.popleft()
                event = asyncio.Event()
                self._waiter = (asyncio.get_running_loop(), event)
            await event.wait()
