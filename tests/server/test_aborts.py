"""Clients that leave, whenever and however: they leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers_http import Connection, ask, head, post
from helpers_processes import num_files, rss_mib, wait_until
from helpers_server import RunningServer

pytestmark = pytest.mark.models

NUM_CLIENTS = 500
# A process keeps some memory of a first load; growth that continues is a leak.
MAX_GROWTH_MIB = 40.0


@pytest.fixture(scope="module")
def small_server(model_path: Callable[[str], Path]) -> Iterator[RunningServer]:
    """Few slots, so that many requests wait, and few blocks, so that some are preempted."""
    options = "--max-num-seqs 8 --max-model-len 1024 --kv-cache-gib 0.05 --no-access-log"
    with RunningServer(model_path("smollm2-135m"), *options.split()) as server:
        yield server


def metric(server: RunningServer, name: str) -> float:
    text = server.request("/metrics")[2].decode()
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}{{.*}} (\S+)$", text, re.M))


def is_empty(server: RunningServer) -> bool:
    stats = server.stats()
    return (
        stats["num_running"] == stats["num_waiting"] == 0
        and stats["kv_usage"] == 0
        and metric(server, "gapless:open_requests") == 0
    )


def request(random_: random.Random) -> bytes:
    """Of any kind: short or long, streamed or not, text, chat or ids, with or without a constraint."""
    common = {"stream": random_.random() < 0.5, "max_tokens": 400, "ignore_eos": True}
    kind = random_.randrange(5)
    if kind == 0:
        messages = [{"role": "user", "content": f"Tell me of the number {random_.random()}."}]
        return post("/v1/chat/completions", {"messages": messages, **common})
    if kind == 1:
        schema = {"type": "array", "items": {"type": "integer"}, "minItems": random_.randrange(20, 30)}
        return post("/v1/completions", {"prompt": "Numbers:", "guided_json": schema, **common})
    if kind == 2:
        prompts = [[random_.randrange(100, 40000) for _ in range(20)] for _ in range(3)]
        return post("/v1/completions", {"prompt": prompts, **common})
    prompt = " ".join(str(random_.random()) for _ in range(2 if kind == 3 else 25))
    return post("/v1/completions", {"prompt": prompt, "n": random_.choice((1, 1, 2)), **common})


async def vanish(url: str, seed: int) -> None:
    """Sends a request or a part of it, perhaps reads a little, and leaves."""
    random_ = random.Random(seed)
    data = request(random_)
    async with Connection(url) as client:
        moment = random_.randrange(5)
        if moment == 0:
            client.writer.write(data[: random_.randrange(1, len(data))])  # within head or body
        elif moment == 1:  # a second request stands behind
            client.writer.write(data + data[: random_.randrange(1, len(data))])
        else:
            client.writer.write(data)
        await client.writer.drain()
        if moment == 3:
            await asyncio.sleep(random_.random())  # while it waits or is prefilled
        elif moment == 4 and b'"stream": true' in data:
            for _ in range(random_.randrange(1, 20)):
                await client.reader.read(200)
        way = random_.randrange(3)
        if way == 0:
            client.reset()
        elif way == 1:
            client.writer.write_eof()
            await client.is_closed()


async def load(url: str, first: int, num_clients: int) -> None:
    """Many clients, some at a time."""
    places = asyncio.Semaphore(60)

    async def one(seed: int) -> None:
        async with places:
            with contextlib.suppress(ConnectionError):
                await vanish(url, seed)

    await asyncio.gather(*(one(first + index) for index in range(num_clients)))


def test_clients_that_vanish_leave_nothing(small_server: RunningServer) -> None:
    server = small_server
    before = server.post("/v1/completions", prompt="Once upon a", max_tokens=20, temperature=0)
    asyncio.run(load(server.url, 0, NUM_CLIENTS // 2))
    wait_until(lambda: is_empty(server), "a slot, a block or a request is left")
    processes = {"front end": server.process.pid, **server.workers()}
    files = {name: num_files(one) for name, one in processes.items()}
    memory = {name: rss_mib(one) for name, one in processes.items()}
    asyncio.run(load(server.url, NUM_CLIENTS, NUM_CLIENTS // 2))
    wait_until(lambda: is_empty(server), "a slot, a block or a request is left")
    wait_until(
        lambda: all(num_files(one) <= files[name] + 2 for name, one in processes.items()), "files are left"
    )
    grown = {name: rss_mib(one) - memory[name] for name, one in processes.items()}
    assert max(grown.values()) < MAX_GROWTH_MIB, grown
    after = server.post("/v1/completions", prompt="Once upon a", max_tokens=20, temperature=0)
    assert after["choices"] == before["choices"]
    assert server.workers() == {name: one for name, one in processes.items() if name != "front end"}
    assert metric(server, "gapless:worker_restarts_total") == 0
    assert not [line for line in server.log if "Traceback" in line]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ["close", "reset", "half-close"])
def test_a_slot_is_free_when_its_client_has_left(small_server: RunningServer, stream: bool, way: str) -> None:
    """Each slot is taken by a client that would hold it for long; who waits gets one when they leave."""

    async def scene() -> None:
        body = {"prompt": "Once", "max_tokens": 1000, "ignore_eos": True, "stream": stream}
        clients = [Connection(small_server.url) for _ in range(8)]
        for client in clients:
            await client.__aenter__()
            client.writer.write(post("/v1/completions", body))
        while (await ask(small_server.url, head("GET", "/stats"))).json["num_running"] < 8:
            pass
        waiting = asyncio.create_task(
            ask(small_server.url, post("/v1/completions", {"prompt": "Hi", "max_tokens": 3}))
        )
        for client in clients:
            if way == "reset":
                client.reset()
            elif way == "half-close":
                client.writer.write_eof()
            else:
                client.writer.close()
        assert (await waiting).status == 200
        for client in clients:
            await client.__aexit__()

    asyncio.run(scene())
    wait_until(lambda: is_empty(small_server), "a slot is left")


def test_a_client_with_a_request_behind_another_is_seen_to_leave(small_server: RunningServer) -> None:
    async def scene() -> None:
        body = {"prompt": "Once", "max_tokens": 1000, "ignore_eos": True}
        async with Connection(small_server.url) as client:
            client.writer.write(post("/v1/completions", body) * 2)
            while not (await ask(small_server.url, head("GET", "/stats"))).json["num_running"]:
                pass
        while (await ask(small_server.url, head("GET", "/stats"))).json["num_running"]:
            pass

    asyncio.run(scene())
    generated = metric(small_server, "vllm:generation_tokens_total")
    wait_until(lambda: is_empty(small_server), "a slot is left")
    assert metric(small_server, "vllm:generation_tokens_total") == generated
