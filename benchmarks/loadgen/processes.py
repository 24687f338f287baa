"""Servers that a benchmark starts and stops."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from loadgen.figures import MeasurementError

_POLL_S = 0.05
_STOP_S = 20.0


class ServerProcess:
    """A server that answers `GET /health` with 200 when it is ready. Used in a `with` block."""

    def __init__(self, command: Sequence[str], port: int, timeout_s: float = 300.0) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as the process
        self._process = subprocess.Popen(
            command, stdout=self._log, stderr=self._log, stdin=subprocess.DEVNULL
        )
        deadline_s = time.monotonic() + timeout_s
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self.close()
                raise MeasurementError(f"{command[0]} did not start:\n{self._last_lines()}")
            time.sleep(_POLL_S)

    def cpu_s(self) -> float:
        """Processor time of the server and its processes so far."""
        return tree_cpu_s(self._process.pid)

    def pause(self) -> None:
        """All of its processes stand still."""
        signal_tree(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        signal_tree(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _last_lines(self) -> str:
        self._log.seek(0)
        return "\n".join(self._log.read().decode(errors="replace").splitlines()[-20:])


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tree_cpu_s(pid: int) -> float:
    """Processor time of a process and all below it; 0.0 where there is no /proc."""
    return sum(_tree(pid).values()) / os.sysconf("SC_CLK_TCK")


def signal_tree(pid: int, number: int) -> None:
    """Sends a signal to a process and all below it. MeasurementError where there is no /proc to find them."""
    if not (tree := _tree(pid)):
        raise MeasurementError(f"Process {pid} cannot be found in /proc: targets cannot take turns.")
    for one in tree:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, number)


def _tree(pid: int) -> dict[int, int]:
    """Clock ticks of a process and all below it."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        number = int(stat.parent.name)
        parents[number] = int(fields[1])
        ticks[number] = int(fields[11]) + int(fields[12])
    return {number: count for number, count in ticks.items() if _is_below(number, pid, parents)}


def _is_below(number: int, root: int, parents: dict[int, int]) -> bool:
    while number != root and number in parents:
        number = parents[number]
    return number == root
