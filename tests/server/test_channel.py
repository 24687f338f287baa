"""Sockets between processes."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path
from typing import Any

import zmq

from gapless.server.channel import AsyncChannel, open_socket
from gapless.server.messages import AskStats, Cancel, ToEngine


def test_a_closed_channel_leaves_later_sockets_alone(tmp_path: Path) -> None:
    """A socket that is closed twice closes whichever has its place in memory by then."""

    async def scene() -> None:
        for index in range(20):
            channel: AsyncChannel[ToEngine] = AsyncChannel(
                ToEngine, lambda message: None, bind=f"ipc://{tmp_path}/{index}"
            )
            channel.close()
            later = [open_socket(zmq.DEALER) for _ in range(4)]
            channel.close()
            del channel
            gc.collect()
            assert not any(socket.closed for socket in later)
            for socket in later:
                socket.close()

    asyncio.run(scene())


def test_a_message_that_arrives_during_a_send_is_seen(tmp_path: Path) -> None:
    """Both ends send at once, again and again: nobody may be left waiting for a message that is there."""

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        arrived: list[Any] = []
        waiting = loop.create_future()

        def take(message: ToEngine) -> None:
            arrived.append(message)
            waiting.set_result(None)

        address = f"ipc://{tmp_path}/channel"
        one: AsyncChannel[ToEngine] = AsyncChannel(ToEngine, take, bind=address)
        two: AsyncChannel[ToEngine] = AsyncChannel(ToEngine, lambda message: None, connect=address)
        try:
            for number in range(2000):
                two.send(Cancel(number))
                for _ in range(number % 7 if number else 0):
                    one.send(AskStats())
                await asyncio.wait_for(waiting, 30)
                waiting = loop.create_future()
            assert arrived == [Cancel(number) for number in range(2000)]
        finally:
            one.close()
            two.close()

    asyncio.run(scene())
