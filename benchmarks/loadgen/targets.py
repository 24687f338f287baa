"""What can be measured: a server at a URL, servers started here, and the library without a server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from loadgen.figures import MeasurementError, StreamTrace
from loadgen.http import HttpStreams
from loadgen.openai import Api, trace_of
from loadgen.processes import ServerProcess, free_port, signal_tree, tree_cpu_s


@dataclass(frozen=True)
class Run:
    """Streams that ran together, and processor time: of this process, and of the one that is measured (0.0 if
    it is not known)."""

    streams: list[StreamTrace]
    client_cpu_s: float
    server_cpu_s: float


class Target(Protocol):
    """Runs prompts, all at the same time."""

    name: str

    def run(self, prompts: Sequence[str], max_tokens: int) -> Run: ...

    def pause(self) -> None:
        """Stops its processes where they are, until `resume`."""

    def resume(self) -> None: ...

    def close(self) -> None: ...


class HttpTarget:
    """A server. `process`: if it was started here."""

    def __init__(self, name: str, url: str, api: Api, process: ServerProcess | None = None) -> None:
        self.name = name
        self._api = api
        self._http = HttpStreams(url)
        self._process = process

    def run(
        self,
        prompts: Sequence[str],
        max_tokens: int,
        num_streams: int | None = None,
        arrivals_s: Sequence[float] | None = None,
    ) -> Run:
        """At most `num_streams` at a time, and none before its arrival."""
        requests = [self._api.request(self._http.host, prompt, max_tokens) for prompt in prompts]
        server_cpu_s = self._server_cpu_s()
        run = self._http.run(requests, num_streams or len(prompts), arrivals_s)
        server_cpu_s = self._server_cpu_s() - server_cpu_s
        return Run([trace_of(reply) for reply in run.replies], run.cpu_s, server_cpu_s)

    def pause(self) -> None:
        self._started_here().pause()

    def resume(self) -> None:
        self._started_here().resume()

    def close(self) -> None:
        self._http.close()
        if self._process is not None:
            self._process.close()

    def _started_here(self) -> ServerProcess:
        if self._process is None:
            raise MeasurementError(f"{self.name} was not started here and cannot take turns.")
        return self._process

    def _server_cpu_s(self) -> float:
        return 0.0 if self._process is None else self._process.cpu_s()


class LibraryTarget:
    """The engine in a process of its own, without a server: streams of token ids."""

    name = "library"

    def __init__(self, model: Path, shape: ServerShape) -> None:
        config = {
            "model": str(model),
            "num_threads": shape.threads,
            "max_num_seqs": shape.max_streams,
            "max_model_len": shape.max_model_len,
        }
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("library_worker.py")), json.dumps(config)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def run(self, prompts: Sequence[str], max_tokens: int) -> Run:
        assert self._process.stdin is not None
        cpu_s = tree_cpu_s(self._process.pid)
        self._process.stdin.write(json.dumps({"texts": prompts, "max_tokens": max_tokens}) + "\n")
        self._process.stdin.flush()
        streams = [StreamTrace(**fields) for fields in json.loads(self._answer())]
        return Run(streams, 0.0, tree_cpu_s(self._process.pid) - cpu_s)

    def pause(self) -> None:
        signal_tree(self._process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        signal_tree(self._process.pid, signal.SIGCONT)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        if not (line := self._process.stdout.readline()):
            raise MeasurementError("The library's process ended without an answer.")
        return line


@dataclass(frozen=True)
class ServerShape:
    """What all targets of a comparison are started with."""

    threads: int
    max_streams: int
    max_model_len: int


def start_gapless(model: Path, shape: ServerShape, endpoint: str, more: Sequence[str] = ()) -> HttpTarget:
    port = free_port()
    command = [
        *(sys.executable, "-m", "gapless", "serve", str(model), "--port", str(port)),
        *("--threads", str(shape.threads), "--max-num-seqs", str(shape.max_streams)),
        *("--max-model-len", str(shape.max_model_len), *more),
    ]
    process = ServerProcess(command, port)
    return HttpTarget("gapless serve", process.url, Api(model.stem, endpoint, None, "min_tokens"), process)


def start_llama_server(
    program: Path, model: Path, shape: ServerShape, endpoint: str, more: Sequence[str] = ()
) -> HttpTarget:
    """Each stream has a slot of its own, and nothing is saved when a slot gets another prompt: best for
    prompts that have nothing in common."""
    port = free_port()
    command = [
        *(str(program), "--model", str(model), "--host", "127.0.0.1", "--port", str(port)),
        *("--threads", str(shape.threads), "--parallel", str(shape.max_streams)),
        *("--ctx-size", str(shape.max_streams * shape.max_model_len), "--cache-ram", "0", *more),
    ]
    process = ServerProcess(command, port)
    return HttpTarget("llama-server", process.url, Api(model.stem, endpoint, None, "ignore_eos"), process)
