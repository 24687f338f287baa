"""The life of a server: it starts, says when it is ready, drains and leaves nothing behind."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from helpers_server import RunningServer, is_alive

pytestmark = pytest.mark.models


def test_health_is_503_while_the_model_is_loaded(model_path: Callable[[str], Path]) -> None:
    with RunningServer(model_path("smollm2-135m"), wait=False) as server:
        status, headers, body = server.request("/health")
        if status == 503:  # a very quick machine may be ready already
            assert headers["retry-after"]
            assert "loaded" in json.loads(body)["error"]["message"]
        server.wait_until_ready()
        assert server.status("/health") == 200


def test_sigterm_lets_running_requests_end_and_leaves_nothing(model_path: Callable[[str], Path]) -> None:
    server = RunningServer(model_path("smollm2-135m"))
    workers = server.workers()
    assert set(workers) == {"engine", "tokenizer", "detokenizer"}
    answers: list[Any] = []
    started = threading.Event()

    def ask() -> None:
        started.set()
        answers.append(
            server.post("/v1/completions", prompt="Once upon", max_tokens=200, ignore_eos=True, temperature=0)
        )

    asking = threading.Thread(target=ask)
    asking.start()
    started.wait()
    while not server.stats()["num_running"]:
        pass
    assert server.stop(signal.SIGTERM) == 0
    asking.join()
    assert answers[0]["usage"]["completion_tokens"] == 200
    assert not any(is_alive(one) for one in workers.values())
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", urlsplit(server.url).port))


def test_a_killed_front_end_leaves_no_orphans(model_path: Callable[[str], Path]) -> None:
    server = RunningServer(model_path("smollm2-135m"))
    workers = server.workers()
    server.stop(signal.SIGKILL)
    for one in workers.values():
        for _ in range(1000):
            if not is_alive(one):
                break
            threading.Event().wait(0.01)
        assert not is_alive(one)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["no-such-model.gguf"], "There is no model"),
        (["MODEL", "--max-model-len", "10000000"], "max_model_len"),
        (["MODEL", "--reasoning-parser", "nonsense"], "Known"),
        (["MODEL", "--tool-call-parser", "nonsense"], "nonsense"),
    ],
)
def test_a_server_that_cannot_run_says_why(
    model_path: Callable[[str], Path], options: list[str], words: str
) -> None:
    import subprocess
    import sys

    model = str(model_path("smollm2-135m"))
    options = [model if option == "MODEL" else option for option in options]
    command = [sys.executable, "-m", "gapless", "serve", *options, "--port", "0"]
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert result.returncode in (1, 2)
    assert words in result.stderr
    assert "Traceback" not in result.stderr


def test_a_port_that_is_taken_is_named(server: RunningServer, model_path: Callable[[str], Path]) -> None:
    import subprocess
    import sys

    port = str(urlsplit(server.url).port)
    command = [sys.executable, "-m", "gapless", "serve", str(model_path("smollm2-135m")), "--port", port]
    result = subprocess.run(command, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    assert result.returncode == 2
    assert port in result.stderr
    assert "Traceback" not in result.stderr
