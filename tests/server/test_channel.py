"""Sockets between processes."""

from __future__ import annotations

import asyncio
import gc
from pathlib import Path

import zmq

from gapless.server.channel import AsyncChannel, open_socket
from gapless.server.messages import AskStats, Cancel, ToEngine


def test_a_closed_channel_leaves_later_sockets_alone(tmp_path: Path) -> None:
    async def scene() -> None:
        closed = []
        for index in range(20):
            channel: AsyncChannel[ToEngine] = AsyncChannel(ToEngine, bind=f"ipc://{tmp_path}/{index}")
            channel.close()
            closed.append(channel)
            later = [open_socket(zmq.DEALER) for _ in range(4)]
            closed.clear()
            del channel
            gc.collect()
            assert not any(socket.closed for socket in later)
            for socket in later:
                socket.close()

    asyncio.run(scene())


def test_a_message_that_arrives_during_a_send_is_seen(tmp_path: Path) -> None:
    """Both ends send at once, again and again: nobody may be left waiting for a message that is there."""

    async def scene() -> None:
        one: AsyncChannel[ToEngine] = AsyncChannel(ToEngine, bind=f"ipc://{tmp_path}/channel")
        two: AsyncChannel[ToEngine] = AsyncChannel(ToEngine, connect=f"ipc://{tmp_path}/channel")
        try:
            for number in range(2000):
                waiting = asyncio.ensure_future(one.receive())
                await asyncio.sleep(0)
                two.send(Cancel(number))
                for _ in range(number % 7):
                    one.send(AskStats())
                answer = await asyncio.wait_for(waiting, 30)
                assert answer == Cancel(number)
        finally:
            one.close()
            two.close()

    asyncio.run(scene())
