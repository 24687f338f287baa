"""Processes that die, hang or are told to end: every request has an end, and the server is itself again."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from helpers_http import Answer, Connection, ask, head, post
from helpers_processes import children, socket_folder, state, wait_until
from helpers_server import END_S, RunningServer, is_alive

pytestmark = pytest.mark.models

OPTIONS = ("--max-num-seqs", "8", "--max-model-len", "1024", "--no-access-log")
LONG = {"max_tokens": 900, "ignore_eos": True}


@pytest.fixture(scope="module")
def victim(model_path: Callable[[str], Path]) -> Iterator[RunningServer]:
    """A server whose workers are killed."""
    with RunningServer(model_path("smollm2-135m"), *OPTIONS) as server:
        yield server


def metric(server: RunningServer, name: str) -> float:
    text = server.request("/metrics")[2].decode()
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}{{.*}} (\S+)$", text, re.M))


def completion(**fields: Any) -> bytes:
    return post("/v1/completions", {"prompt": "Once upon a time", "temperature": 0, **fields})


async def under_load(server: RunningServer, act: Callable[[], None]) -> tuple[list[Answer], bytes]:
    """Answers of streams and others, more than there are slots, during which `act` happens; and the rest of a
    stream that had begun by then."""
    bodies = [
        {"stream": index % 2 == 0, "prompt": f"Story {index}:" + " word" * (index * 20), "max_tokens": 60}
        for index in range(12)
    ]
    async with Connection(server.url) as client:
        client.writer.write(completion(max_tokens=300, ignore_eos=True, stream=True))
        await client.reader.readuntil(b"data: ")
        tasks = [asyncio.create_task(ask(server.url, completion(ignore_eos=True, **body))) for body in bodies]
        while (await ask(server.url, head("GET", "/stats"))).json["num_running"] < 8:
            pass
        act()
        # Those that come while a process is missing.
        tasks += [asyncio.create_task(ask(server.url, completion(max_tokens=20))) for _ in range(4)]
        rest = await client.reader.readuntil(b"[DONE]")
        return await asyncio.gather(*tasks), rest


def is_well_ended(answer: Answer) -> bool:
    """An error, told in its place, or the whole output."""
    if answer.status != 200:
        return answer.status in (500, 503) and answer.error["message"]
    if answer.error is not None:
        return answer.events[-1] == "[DONE]" and answer.error["type"] == "internal_server_error"
    parts = answer.events[:-1] if "event-stream" in answer.headers["content-type"] else [answer.json]
    return any(choice["finish_reason"] == "length" for part in parts for choice in part["choices"])


@pytest.mark.parametrize("role", ["tokenizer", "detokenizer", "engine"])
def test_a_killed_worker_is_replaced(victim: RunningServer, role: str) -> None:
    server = victim
    question = {"prompt": "Once upon a time", "max_tokens": 30, "temperature": 0}
    before = server.post("/v1/completions", **question)["choices"]
    workers = server.workers()
    restarts, steps = metric(server, "gapless:worker_restarts_total"), metric(server, "gapless:steps_total")
    answers, begun = asyncio.run(under_load(server, lambda: os.kill(workers[role], signal.SIGKILL)))
    assert all(is_well_ended(answer) for answer in answers)
    # What is encoded does not need the tokenizer any more.
    assert (b'data: {"error":' in begun) == (role != "tokenizer")
    assert (b'"finish_reason":"length"' in begun) == (role == "tokenizer")
    server.wait_until_ready()
    assert server.post("/v1/completions", **question)["choices"] == before
    assert metric(server, "gapless:worker_restarts_total") == restarts + 1
    assert metric(server, "gapless:steps_total") > steps
    assert metric(server, "gapless:open_requests") == 0
    server.wait_until_idle()
    after = server.workers()
    assert {name for name in after if after[name] != workers[name]} == {role}
    assert not is_alive(workers[role])
    assert "Z" not in children(server.process.pid).values()
    assert not [line for line in server.log if "Traceback" in line]


def test_the_engines_counters_go_on_after_its_death(victim: RunningServer) -> None:
    """Counters of Prometheus never fall, and what the new engine does is added."""
    server = victim
    names = ("gapless:steps_total", "vllm:prefix_cache_queries_total")
    question = {"prompt": [5] * 40, "max_tokens": 20}
    server.post("/v1/completions", **question)
    before = [metric(server, name) for name in names]
    engine = server.workers()["engine"]
    os.kill(engine, signal.SIGKILL)
    wait_until(lambda: not is_alive(engine), "the engine is not reaped")
    server.wait_until_ready()
    server.post("/v1/completions", **question)
    after = [metric(server, name) for name in names]
    assert after[0] - before[0] >= 20
    assert after[1] - before[1] == 40


def test_a_detokenizer_that_stood_still_loses_nothing(victim: RunningServer) -> None:
    server = victim
    process = server.workers()["detokenizer"]

    async def scene() -> list[Answer]:
        async with Connection(server.url) as client:
            usage = {"include_usage": True}
            client.writer.write(
                completion(max_tokens=100, ignore_eos=True, stream=True, stream_options=usage)
            )
            await client.reader.readuntil(b"data: ")
            os.kill(process, signal.SIGSTOP)
            try:
                while (await ask(server.url, head("GET", "/stats"))).json["num_running"]:
                    pass  # the engine does not wait
            finally:
                os.kill(process, signal.SIGCONT)
            rest = await client.reader.readuntil(b"[DONE]")
        assert b'"completion_tokens":100' in rest
        return [await ask(server.url, completion(max_tokens=3))]

    assert asyncio.run(scene())[0].status == 200
    assert server.workers()["detokenizer"] == process


def test_a_stopped_detokenizers_clients_may_leave(victim: RunningServer) -> None:
    server = victim
    process = server.workers()["detokenizer"]

    async def scene() -> None:
        os.kill(process, signal.SIGSTOP)
        try:
            async with Connection(server.url) as client:
                client.writer.write(completion(**LONG, stream=True))
                while not (await ask(server.url, head("GET", "/stats"))).json["num_running"]:
                    pass
            while (await ask(server.url, head("GET", "/stats"))).json["num_running"]:
                pass
        finally:
            os.kill(process, signal.SIGCONT)
        assert (await ask(server.url, completion(max_tokens=3))).status == 200

    asyncio.run(scene())
    assert metric(server, "gapless:open_requests") == 0


def is_free(url: str) -> bool:
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            again.bind(("127.0.0.1", urlsplit(url).port))
        except OSError:
            return False
    return True


def assert_nothing_is_left(server: RunningServer, workers: dict[str, int], folder: Path) -> None:
    wait_until(lambda: not any(is_alive(one) for one in workers.values()), "a worker is left")
    wait_until(lambda: not folder.exists(), "the folder of the sockets is left")
    assert is_free(server.url)


def test_a_killed_front_end_takes_all_with_it(model_path: Callable[[str], Path]) -> None:
    server = RunningServer(model_path("smollm2-135m"), *OPTIONS)
    workers, folder = server.workers(), socket_folder(server.process.pid)

    async def scene() -> None:
        async with Connection(server.url) as client:
            client.writer.write(completion(**LONG, stream=True))
            await client.reader.readuntil(b"data: ")
            server.process.kill()
            assert await client.is_closed()

    asyncio.run(scene())
    server.stop(signal.SIGKILL)
    assert_nothing_is_left(server, workers, folder)


def test_a_front_end_killed_while_loading_takes_all_with_it(model_path: Callable[[str], Path]) -> None:
    server = RunningServer(model_path("smollm2-135m"), *OPTIONS, wait=False)
    wait_until(lambda: len(server.workers()) == 3, "the workers do not start")
    workers, folder = server.workers(), socket_folder(server.process.pid)
    server.stop(signal.SIGKILL)
    assert_nothing_is_left(server, workers, folder)


def test_a_server_told_to_end_while_loading_ends(model_path: Callable[[str], Path]) -> None:
    server = RunningServer(model_path("smollm2-135m"), *OPTIONS, wait=False)
    wait_until(lambda: len(server.workers()) == 3, "the workers do not start")
    workers, folder = server.workers(), socket_folder(server.process.pid)
    assert server.stop() == 0
    assert_nothing_is_left(server, workers, folder)
    assert not [line for line in server.log if "Traceback" in line]


def test_a_signal_to_all_processes_lets_requests_end(model_path: Callable[[str], Path]) -> None:
    """As service managers and terminals send it."""
    server = RunningServer(model_path("smollm2-135m"), *OPTIONS)
    workers, folder = server.workers(), socket_folder(server.process.pid)

    async def scene() -> Answer:
        async with Connection(server.url) as client:
            client.writer.write(completion(max_tokens=100, ignore_eos=True))
            while not (await ask(server.url, head("GET", "/stats"))).json["num_running"]:
                pass
            for one in (*workers.values(), server.process.pid):
                os.kill(one, signal.SIGTERM)
            return await client.answer()

    answer = asyncio.run(scene())
    assert answer.json["usage"]["completion_tokens"] == 100
    assert server.stop() == 0
    assert_nothing_is_left(server, workers, folder)


@pytest.mark.parametrize("kind", ["timeout", signal.SIGINT, signal.SIGTERM])
def test_what_runs_too_long_is_cut_off_with_an_error(model_path: Callable[[str], Path], kind: Any) -> None:
    """When the time to drain is over, or with a second signal."""
    options = ("--drain-timeout", "0.5" if kind == "timeout" else "600")
    server = RunningServer(model_path("smollm2-135m"), *OPTIONS, *options)
    workers, folder = server.workers(), socket_folder(server.process.pid)
    body = {"max_tokens": 1000, "ignore_eos": True, "n": 4}

    async def scene() -> tuple[bytes, Answer]:
        async with Connection(server.url) as one, Connection(server.url) as two, Connection(server.url):
            one.writer.write(completion(**body, stream=True))
            two.writer.write(completion(**body))
            while (await ask(server.url, head("GET", "/stats"))).json["num_running"] < 8:
                pass
            await one.reader.readuntil(b"data: ")
            server.process.send_signal(signal.SIGTERM)
            if kind != "timeout":
                await asyncio.to_thread(wait_until, lambda: is_free(server.url), "it does not begin to end")
                server.process.send_signal(kind)
            return await one.reader.readuntil(b"data: [DONE]"), await two.answer()

    streamed, whole = asyncio.run(scene())
    assert b'data: {"error":{"message":"The server is shutting down.' in streamed
    assert whole.status == 503
    assert "shutting down" in whole.error["message"]
    assert server.process.wait(END_S) == 0
    assert server.stop() == 0
    assert_nothing_is_left(server, workers, folder)
    assert not [line for line in server.log if "Traceback" in line]


def test_a_client_that_does_not_read_cannot_hold_up_the_end(model_path: Callable[[str], Path]) -> None:
    options = ("--drain-timeout", "0.2")
    with RunningServer(model_path("smollm2-135m"), *OPTIONS, *options) as server:

        async def scene() -> int:
            async with Connection(server.url, receive_bytes=1) as client:
                client.writer.transport.pause_reading()  # type: ignore[attr-defined]
                client.writer.write(completion(max_tokens=900, ignore_eos=True, n=8, stream=True))
                while not (await ask(server.url, head("GET", "/stats"))).json["num_running"]:
                    pass
                return await asyncio.to_thread(server.stop)

        assert asyncio.run(scene()) == 0


def test_an_engine_that_cannot_be_loaded_again_ends_the_server(
    model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    model = tmp_path / "model.gguf"
    shutil.copy(model_path("smollm2-135m"), model)
    server = RunningServer(model, *OPTIONS)
    workers, folder = server.workers(), socket_folder(server.process.pid)
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"garbage" * 1000)
    garbage.replace(model)
    os.kill(workers["engine"], signal.SIGKILL)
    assert server.process.wait(END_S) == 1
    assert server.stop() == 1
    assert [line for line in server.log if line.startswith("gapless: ") and "model.gguf" in line], server.log
    assert not [line for line in server.log if "Traceback" in line]
    assert_nothing_is_left(server, workers, folder)


def test_a_worker_that_dies_again_and_again_while_it_starts_ends_the_server(
    model_path: Callable[[str], Path],
) -> None:
    server = RunningServer(model_path("smollm2-135m"), *OPTIONS, wait=False)
    killed: set[int] = set()
    deadline_s = time.monotonic() + END_S
    while server.process.poll() is None:
        assert time.monotonic() < deadline_s
        found = server.workers().get("tokenizer")
        if found is not None and found not in killed and state(found) not in ("", "Z"):
            killed.add(found)
            os.kill(found, signal.SIGKILL)
    assert server.stop() == 1
    assert [line for line in server.log if line.startswith("gapless: ") and "while it was starting" in line]
    assert len(killed) == 3


def test_nothing_of_a_server_outlives_a_failed_start(tmp_path: Path) -> None:
    """A model that is no model: one clear line, and no folder, no process."""
    model = tmp_path / "model.gguf"
    model.write_bytes(b"garbage" * 1000)
    command = [sys.executable, "-m", "gapless", "serve", str(model), "--port", "0"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    result = subprocess.run(
        command, stderr=subprocess.PIPE, text=True, timeout=END_S, env=environment, check=False
    )
    assert result.returncode == 1
    assert "model.gguf" in result.stderr
    assert "Traceback" not in result.stderr
    assert [one.name for one in tmp_path.iterdir()] == ["model.gguf"]
