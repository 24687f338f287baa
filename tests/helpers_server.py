"""Servers as users start them: a process of `gapless serve`, and what it leaves behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

READY_S = 120.0
END_S = 60.0


class RunningServer:
    """A server on a free port. `log` holds the lines of its standard error so far."""

    def __init__(self, model: Path | str, *options: str, wait: bool = True, **environment: str) -> None:
        command = [sys.executable, "-m", "gapless", "serve", str(model), "--port", "0", *options]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )
        self.log: list[str] = []
        self._url: str | None = None
        self._told = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._told.wait(READY_S) or self._url is None:
            self.stop()
            raise RuntimeError("the server did not start:\n" + "".join(self.log))
        self.url = self._url
        if wait:
            self.wait_until_ready()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.log.append(line)
            if self._url is None and (found := re.search(r"Serving .* on (http://\S+)", line)):
                self._url = found.group(1)
                self._told.set()
        self._told.set()

    def wait_until_ready(self) -> None:
        """Until `/health` says so."""
        deadline_s = time.monotonic() + READY_S
        while self.status("/health") != 200:
            if self.process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError("the server is not ready:\n" + "".join(self.log))
            time.sleep(0.05)

    def request(self, path: str, body: Any = None, method: str | None = None, **headers: str) -> Any:
        """(status, headers, body as bytes) of a request; `body` is sent as JSON unless it is bytes."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        request = urllib.request.Request(
            self.url + path, data, {"content-type": "application/json", **names}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=END_S) as response:
                return response.status, response.headers, response.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.headers, error.read()

    def status(self, path: str) -> int:
        """Status of a GET; 0 if nobody answers."""
        try:
            return int(self.request(path)[0])
        except OSError:
            return 0

    def post(self, path: str, **body: Any) -> Any:
        """The JSON that a request answers with, whatever its status."""
        return json.loads(self.request(path, body)[2])

    def get(self, path: str) -> Any:
        """The JSON that a GET answers with."""
        return json.loads(self.request(path)[2])

    def stats(self) -> Any:
        """What the engine holds now."""
        return self.get("/stats")

    def wait_until_idle(self) -> None:
        """Until no sequence runs or waits."""
        deadline_s = time.monotonic() + END_S
        while (now := self.stats()).get("num_running") or now.get("num_waiting"):
            assert time.monotonic() < deadline_s, now
            time.sleep(0.01)

    def workers(self) -> dict[str, int]:
        """Process ids of the worker processes, by role (of several tokenizers, the last)."""
        found = {}
        for folder in Path("/proc").iterdir():
            try:
                arguments = (folder / "cmdline").read_bytes().decode().split("\0")
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except (OSError, ValueError, IndexError):
                continue
            if parent == self.process.pid and "gapless.server.process" in arguments:
                found[arguments[arguments.index("gapless.server.process") + 1]] = int(folder.name)
        return found

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Asks the server to end; its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            status = self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        self._reader.join(END_S)
        assert self.process.stderr is not None
        self.process.stderr.close()
        return status

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.process.returncode is None:
            self.stop()


def events_of(body: bytes) -> list[Any]:
    """The JSON of a stream's events; that it ends with `[DONE]` is checked."""
    assert body.endswith(b"data: [DONE]\n\n"), body[-500:]
    lines = [line for line in body.decode().split("\n\n") if line]
    assert all(line.startswith(("data: ", ": ")) for line in lines), body[:500]
    return [json.loads(line[len("data: ") :]) for line in lines[:-1] if line.startswith("data: ")]


def streamed(server: RunningServer, path: str, **body: Any) -> list[Any]:
    """The events of a request that streams."""
    status, headers, answer = server.request(path, {**body, "stream": True})
    assert status == 200, answer
    assert headers["content-type"].startswith("text/event-stream")
    return events_of(answer)


def is_alive(process_id: int) -> bool:
    """Whether there is such a process; a zombie counts as one."""
    return Path(f"/proc/{process_id}").exists()
