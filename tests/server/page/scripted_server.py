"""A server with the chat page and the endpoints that it uses. The test writes its answers piece by piece."""

from __future__ import annotations

import importlib.resources
import json
import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PAGE = importlib.resources.files("gapless") / "server" / "page"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
TYPES = {"html": "text/html; charset=utf-8", "css": "text/css", "js": "text/javascript"}
PATIENCE_S = 30.0


@dataclass
class Answer:
    """What the server says to one request. The test writes it while the page already reads."""

    status: int = 200
    error: str = ""
    request: dict[str, Any] = field(default_factory=dict)
    closed: threading.Event = field(default_factory=threading.Event)
    """The page has closed the connection (after `until_closed`)."""
    lines: queue.SimpleQueue[str | None] = field(default_factory=queue.SimpleQueue)

    def delta(self, **delta: str) -> Answer:
        return self.chunk({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})

    def say(self, *pieces: str) -> Answer:
        for piece in pieces:
            self.delta(content=piece)
        return self

    def finish(self, reason: str = "stop", *, num_tokens: int = 7) -> None:
        self.chunk({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        usage = {"prompt_tokens": 10, "completion_tokens": num_tokens, "total_tokens": 10 + num_tokens}
        self.chunk({"choices": [], "usage": usage})
        self.lines.put("data: [DONE]\n\n")
        self.lines.put(None)

    def fail(self, message: str) -> None:
        self.chunk({"error": {"message": message, "type": "server_error", "param": None, "code": None}})
        self.lines.put(None)

    def break_off(self) -> None:
        self.lines.put(None)

    def until_closed(self) -> None:
        """The server has nothing more to say, and waits for the page to go away."""
        self.lines.put("")

    def chunk(self, body: dict[str, Any]) -> Answer:
        self.lines.put(f"data: {json.dumps(body)}\n\n")
        return self


class ScriptedServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/"
        self.reset()

    def reset(self) -> None:
        self.key = ""
        self.guards_stats = False
        self.stats: dict[str, Any] = {
            "model": "tiny-llama",
            "status": "ok",
            "loading": 1.0,
            "num_running": 3,
            "num_waiting": 0,
            "max_num_seqs": 64,
            "kv_usage": 0.12,
            "generation_tokens_per_s": 512.3,
            "prompt_tokens_per_s": 0.0,
        }
        self.answers: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self.asked: queue.SimpleQueue[Answer] = queue.SimpleQueue()

    def next_answer(self, status: int = 200, error: str = "") -> Answer:
        answer = Answer(status, error)
        self.answers.put(answer)
        return answer

    def next_request(self) -> dict[str, Any]:
        """The next request that the page has made, once it has."""
        return self.asked.get(timeout=PATIENCE_S).request


class Handler(BaseHTTPRequestHandler):
    server: ScriptedServer

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        name = {"/": "index.html"}.get(self.path, self.path.removeprefix("/page/"))
        if self.path == "/stats" and not self.server.guards_stats:
            self.send_json(200, self.server.stats)
        elif self.path == "/stats":
            self.guarded(lambda: self.send_json(200, self.server.stats))
        elif self.path == "/v1/models":
            self.guarded(lambda: self.send_json(200, {"data": [{"id": "tiny-llama", "max_model_len": 8192}]}))
        elif "/" not in name and (PAGE / name).is_file():
            self.send(200, TYPES[name.rpartition(".")[2]], (PAGE / name).read_bytes())
        else:
            self.send_error_json(404, "not found")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.guarded(lambda: self.answer(body))

    def guarded(self, reply: Any) -> None:
        key = self.server.key
        if key and self.headers["Authorization"] != f"Bearer {key}":
            self.send_error_json(401, "Incorrect API key provided.")
        else:
            reply()

    def answer(self, body: dict[str, Any]) -> None:
        if self.server.stats["status"] == "loading":
            self.send_error_json(503, "The model is being loaded.")
            return
        answer = self.server.answers.get(timeout=PATIENCE_S)
        answer.request = body
        self.server.asked.put(answer)
        if answer.status != 200:
            self.send_error_json(answer.status, answer.error)
            return
        self.send(200, "text/event-stream", b"")
        for line in iter(answer.lines.get, None):
            if line == "":
                self.connection.settimeout(PATIENCE_S)
                if self.connection.recv(1) == b"":
                    answer.closed.set()
                return
            self.wfile.write(line.encode())

    def send_error_json(self, status: int, message: str) -> None:
        self.send_json(status, {"error": {"message": message, "type": "error", "param": None, "code": None}})

    def send_json(self, status: int, body: object) -> None:
        self.send(status, "application/json", json.dumps(body).encode())

    def send(self, status: int, content_type: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Security-Policy", POLICY)
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def scripted_server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
