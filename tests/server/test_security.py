"""What a hostile client can send: it is refused, nothing is leaked, and the others do not notice."""

from __future__ import annotations

import asyncio
import hmac
import importlib
import json
import pkgutil
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

import gapless.server
from gapless.server.middleware import Authentication, _printable
from gapless.server.openai.chat import ChatRequest
from helpers_http import Answer, Connection, ask, head, post
from helpers_processes import rss_mib, wait_until
from helpers_server import RunningServer

KEY = "sésame-42"
MIB = 1 << 20
# A stream stands still for longer than this only if something stalls it.
MAX_GAP_S = 5.0


@pytest.fixture(scope="module")
def guarded(model_path: Callable[[str], Path]) -> Iterator[RunningServer]:
    """A server with a key and short timeouts."""
    options = "--max-model-len 1024 --max-num-seqs 8 --header-timeout 1 --body-timeout 1 --keep-alive 1"
    model = model_path("smollm2-135m")
    with RunningServer(model, *options.split(), wait=True, GAPLESS_API_KEY=KEY) as server:
        yield server


@pytest.fixture(scope="module")
def roomy(model_path: Callable[[str], Path]) -> Iterator[RunningServer]:
    """A server that takes large bodies, and drops clients that do not read."""
    options = "--max-model-len 1024 --max-num-seqs 4 --max-body-mib 64 --send-timeout 1"
    with RunningServer(model_path("smollm2-135m"), *options.split()) as server:
        yield server


def bearer(key: str = KEY) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def enter(server: RunningServer, data: bytes) -> Answer:
    return await ask(server.url, data)


def raw_head(path: str, *lines: bytes) -> bytes:
    return b"\r\n".join([f"GET {path} HTTP/1.1".encode(), b"host: x", *lines, b"", b""])


# --- the key ---


@pytest.mark.models
@pytest.mark.parametrize(
    "path",
    [
        "/v1/models",
        "/v1/chat/completions",
        "/metrics",
        "/stats",
        "/version",
        "/openapi.json",
        "/api/tags",
        "/nowhere",
        "/health/../stats",
        "//stats",
        "/v1/models/",
    ],
)
def test_without_the_key_nothing_is_told(guarded: RunningServer, path: str) -> None:
    wrong = [
        (),
        (b"authorization: Bearer",),
        (b"authorization: Bearer ",),
        (b"authorization: Bearer wrong",),
        (b"authorization: Bearer s\xe9same-42",),
        (b"authorization: Bearer \xff\xfe\x80",),
        (b"authorization: Basic " + KEY.encode(),),
        (b"authorization: " + KEY.encode(),),
        (b"authorization: Bearer " + KEY.encode() + b"2",),
        (b"authorization: Bearer " + KEY.encode()[:-1],),
        (b"x-api-key: " + KEY.encode(),),
    ]

    async def scene() -> None:
        for lines in wrong:
            answer = await ask(guarded.url, raw_head(path, *lines))
            assert answer.status == 401, lines
            assert answer.headers["www-authenticate"] == "Bearer"
            assert KEY not in answer.body.decode()

    asyncio.run(scene())


@pytest.mark.models
def test_with_the_key_and_on_open_paths_clients_enter(guarded: RunningServer) -> None:
    async def scene() -> None:
        for scheme in (b"Bearer ", b"bearer ", b"BEARER  "):
            line = b"authorization: " + scheme + KEY.encode()
            assert (await ask(guarded.url, raw_head("/v1/models", line))).status == 200
        for path in ("/health", "/", "/page/index.html"):
            assert (await ask(guarded.url, raw_head(path))).status in (200, 404)
        preflight = head("OPTIONS", "/v1/models", origin="http://a", access_control_request_method="POST")
        assert (await ask(guarded.url, preflight)).status == 200

    asyncio.run(scene())


def test_the_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[bytes, bytes]] = []

    def compare(given: bytes, key: bytes) -> bool:
        asked.append((given, key))
        return given == b"decided here"

    monkeypatch.setattr(hmac, "compare_digest", compare)
    entered: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        entered.append(scope)

    async def send(message: Any) -> None:
        pass

    def scope(given: bytes) -> dict[str, Any]:
        return {"type": "http", "path": "/stats", "headers": [(b"authorization", b"Bearer " + given)]}

    async def scene() -> None:
        guard = Authentication(app, "key")
        for given in (b"key", b"decided here"):
            await guard(scope(given), None, send)  # type: ignore[arg-type]

    asyncio.run(scene())
    assert asked == [(b"key", b"key"), (b"decided here", b"key")]
    assert len(entered) == 1


# --- bodies and heads ---


@pytest.mark.models
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_that_is_too_large_is_refused_and_the_connection_stays(
    guarded: RunningServer, chunked: bool
) -> None:
    size = 16 * MIB

    async def scene() -> None:
        async with Connection(guarded.url) as client:
            if chunked:
                client.writer.write(
                    head("POST", "/v1/completions", transfer_encoding="chunked", authorization="").replace(
                        b"authorization: ", b"authorization: Bearer " + KEY.encode()
                    )
                )
            else:
                client.writer.write(
                    head("POST", "/v1/completions", content_length=str(size), authorization="").replace(
                        b"authorization: ", b"authorization: Bearer " + KEY.encode()
                    )
                )
            piece = b" " * (1 << 16)
            for _ in range(size // len(piece)):
                client.writer.write(b"10000\r\n" + piece + b"\r\n" if chunked else piece)
                await client.writer.drain()
            if chunked:
                client.writer.write(b"0\r\n\r\n")
            refused = await client.answer()
            assert refused.status == 413
            assert "--max-body-mib" in refused.error["message"]
            assert (await client.ask(head("GET", "/health"))).status == 200

    before = rss_mib(guarded.process.pid)
    asyncio.run(scene())
    assert rss_mib(guarded.process.pid) - before < size / MIB


@pytest.mark.models
@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"GET /hea",
        b"GET /health HTTP/1.1\r\nhost: x\r\nx-a: ",
        b"\r\n",
        # After an answer that did not need the body.
        b"POST /health HTTP/1.1\r\nhost: x\r\ncontent-length: 1000\r\n\r\n",
    ],
)
def test_a_request_that_never_ends_is_closed(guarded: RunningServer, start: bytes) -> None:
    async def drip(client: Connection) -> None:
        while not client.writer.transport.is_closing():
            client.writer.write(b"\r\n" if start == b"\r\n" else b"a" if start else b"")
            await asyncio.sleep(0.2)

    async def scene() -> None:
        async with Connection(guarded.url) as client:
            client.writer.write(start)
            dripping = asyncio.create_task(drip(client))
            assert await client.is_closed()
            dripping.cancel()

    asyncio.run(scene())


@pytest.mark.models
def test_a_body_that_drips_is_refused(guarded: RunningServer) -> None:
    async def scene() -> Answer:
        async with Connection(guarded.url) as client:
            line = b"authorization: Bearer " + KEY.encode()
            start = raw_head("/v1/completions", b"content-length: 1000", line).replace(b"GET", b"POST")
            client.writer.write(start + b"{")
            answer = await client.answer()
            assert await client.is_closed()
            return answer

    answer = asyncio.run(scene())
    assert answer.status == 408
    assert answer.headers["connection"] == "close"


@pytest.mark.models
def test_a_head_without_an_end_does_not_grow(guarded: RunningServer) -> None:
    async def scene() -> None:
        for start in (b"GET /", b"GET /health HTTP/1.1\r\nx: "):
            async with Connection(guarded.url) as client:
                try:
                    client.writer.write(start)
                    for _ in range(64):
                        client.writer.write(b"a" * MIB)
                        await client.writer.drain()
                except ConnectionError:
                    pass
                else:
                    assert await client.is_closed()

    before = rss_mib(guarded.process.pid)
    asyncio.run(scene())
    assert rss_mib(guarded.process.pid) - before < 16


@pytest.mark.models
@pytest.mark.parametrize(
    "lines",
    [
        (b"content-length: 5", b"transfer-encoding: chunked"),
        (b"content-length: 5", b"content-length: 6"),
        (b"transfer-encoding: chunked, identity",),
        (b"content-length: -1",),
        (b"content-length: 1e3",),
        (b"content length: 5",),
    ],
)
def test_requests_of_doubtful_length_are_refused(guarded: RunningServer, lines: tuple[bytes, ...]) -> None:
    async def scene() -> None:
        async with Connection(guarded.url) as client:
            client.writer.write(raw_head("/health", *lines).replace(b"GET", b"POST") + b"0\r\n\r\nGET /")
            assert b" 200 " not in await asyncio.wait_for(client.reader.read(), 60)

    asyncio.run(scene())


@pytest.mark.models
def test_many_idle_connections_do_no_harm(guarded: RunningServer) -> None:
    async def scene() -> None:
        clients = [Connection(guarded.url) for _ in range(300)]
        for client in clients:
            await client.__aenter__()
        assert (await ask(guarded.url, head("GET", "/health"))).status == 200
        for client in clients:
            assert await client.is_closed()
            await client.__aexit__()

    asyncio.run(scene())


@pytest.mark.models
def test_pipelined_requests_are_answered_in_order(roomy: RunningServer) -> None:
    async def scene() -> None:
        async with Connection(roomy.url) as client:
            bodies = [{"prompt": "a b c", "max_tokens": number} for number in (9, 1, 5)]
            client.writer.write(b"".join(post("/v1/completions", body) for body in bodies))
            answers = [await client.answer() for _ in bodies]
            assert [answer.json["usage"]["completion_tokens"] for answer in answers] == [9, 1, 5]

    asyncio.run(scene())


# --- identity and log ---


@pytest.mark.models
def test_request_ids_are_echoed_if_they_are_harmless(roomy: RunningServer) -> None:
    async def scene() -> None:
        answer = await ask(roomy.url, head("GET", "/health", x_request_id="my-id.42"))
        assert answer.headers["x-request-id"] == "my-id.42"
        for given in (b"a b", b"a\tb", b"x" * 129, b"\xff", b"a\x7fb"):
            answer = await ask(roomy.url, raw_head("/health", b"x-request-id: " + given))
            assert answer.status == 400 or len(answer.headers["x-request-id"]) == 32

    asyncio.run(scene())


def test_paths_are_harmless_in_the_log() -> None:
    hostile = "/a\nb\r\x1b[2Jc\x07\x85\u2028\u202e\x00" + "x" * 1000
    assert _printable(hostile).isprintable()
    assert len(_printable(hostile)) <= 200


@pytest.mark.models
@pytest.mark.parametrize(
    "path", ["/page/../index.html", "/page/%2e%2e%2fapp.py", "/page/..%2f..%2f..%2fetc/passwd", "/page/"]
)
def test_paths_lead_nowhere_else(roomy: RunningServer, path: str) -> None:
    assert asyncio.run(ask(roomy.url, head("GET", path))).status in (400, 404)


@pytest.mark.models
def test_the_page_may_not_load_or_send_anything_elsewhere(roomy: RunningServer) -> None:
    answer = asyncio.run(ask(roomy.url, head("GET", "/")))
    if answer.status == 200:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"


# --- bodies that cost much ---


def _request_models() -> list[type[BaseModel]]:
    for module in pkgutil.walk_packages(gapless.server.__path__, "gapless.server."):
        if module.name != "gapless.server.process":
            importlib.import_module(module.name)
    found, left = [], [BaseModel]
    while left:
        for model in left.pop().__subclasses__():
            left.append(model)
            if model.__module__.startswith("gapless.server."):
                found.append(model)
    return found


def _fields(model: type[BaseModel]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield field.alias or name


@pytest.mark.parametrize("wrong", [1.5, "x", [[1.5]], {"a": [1.5]}, None])
def test_a_body_with_many_mistakes_is_told_the_first(wrong: Any) -> None:
    """An error for each of a million items would take seconds and gigabytes."""
    models = _request_models()
    assert ChatRequest in models
    for model in models:
        for name in _fields(model):
            for value in ([wrong] * 3000, [[wrong] * 3000], {str(index): wrong for index in range(3000)}):
                body = {"prompt": "", "messages": [], name: value}
                assert _num_errors(model, body) <= 20, (model, name)


def _num_errors(model: type[BaseModel], body: Any) -> int:
    try:
        model.model_validate(body)
    except ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.models
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"x": 10**400}}, None),
    ],
)
def test_templates_are_not_the_clients(
    roomy: RunningServer, fields: dict[str, Any], param: str | None
) -> None:
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, **fields}
    answer = asyncio.run(ask(roomy.url, post("/v1/chat/completions", body)))
    assert answer.status == 400
    assert param is None or answer.error["param"] == param


@pytest.mark.models
def test_template_variables_may_have_any_other_name(roomy: RunningServer) -> None:
    names = ("self", "request", "prompt", "bos_token", "raise_exception", "__class__")
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 1,
        "chat_template_kwargs": dict.fromkeys(names, 1),
    }
    assert asyncio.run(ask(roomy.url, post("/v1/chat/completions", body))).status == 200


async def beside_a_stream(server: RunningServer, attack: Callable[[], Awaitable[None]]) -> None:
    """Runs `attack` while a stream is read, again and again; no part of the stream may be late."""
    attacking = asyncio.ensure_future(attack())
    loop, gaps = asyncio.get_running_loop(), []
    while not attacking.done():
        async with Connection(server.url) as client:
            body = {"prompt": "Once", "max_tokens": 500, "ignore_eos": True, "stream": True}
            client.writer.write(post("/v1/completions", body))
            last_s = None
            while not attacking.done() and (piece := await client.reader.readuntil(b"\n\n")):
                now_s = loop.time()
                if last_s is not None:
                    gaps.append(now_s - last_s)
                last_s = now_s
                if b"[DONE]" in piece:
                    break
    await attacking
    assert max(gaps, default=0) < MAX_GAP_S


def _worst_texts(size: int) -> list[str]:
    return [" " * size, "a" * size, "😀" * (size // 4), "ab1C" * (size // 4), "\n" * size]


@pytest.mark.models
def test_prompts_of_megabytes_are_refused_and_stall_nobody(roomy: RunningServer) -> None:
    size = 10 * MIB
    bodies = [
        ("/v1/completions", {"prompt": "word " * (size // 5)}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "word " * (size // 5)}]}),
        ("/v1/completions", {"prompt": [11] * (size // 4)}),
        ("/v1/completions", {"prompt": [[11] * (size // 4)], "echo": True}),
        *(("/v1/completions", {"prompt": text}) for text in _worst_texts(4 * MIB)),
    ]

    async def attack() -> None:
        for path, body in bodies:
            answer = await ask(roomy.url, post(path, body))
            assert answer.status == 400
            assert answer.error["code"] == "context_length_exceeded"

    asyncio.run(beside_a_stream(roomy, attack))
    processes = {"front end": roomy.process.pid, **roomy.workers()}
    before = {name: rss_mib(one) for name, one in processes.items()}
    asyncio.run(beside_a_stream(roomy, attack))
    grown = {name: rss_mib(one) - before[name] for name, one in processes.items()}
    assert max(grown.values()) < 64, grown


@pytest.mark.models
def test_hostile_bodies_are_bad_requests(roomy: RunningServer) -> None:
    deep = b"[" * MIB
    bodies = [
        b"",
        b"nonsense",
        deep,
        b'{"prompt":' + deep,
        b'{"prompt": "\\ud800"}',
        b'{"prompt": [' + b"1.5," * 500_000 + b"1]}",
        b'{"prompt": [1e99]}',
        b'{"prompt": [99999999999999999999]}',
        b'{"prompt": "x", "seed": ' + b"9" * 5000 + b"}",
        b'{"prompt": "x", "logit_bias": {"1": NaN}}',
        b'{"prompt": "x", "temperature": Infinity}',
        b"\xff\xfe{}",
    ]

    async def attack() -> None:
        for body in bodies:
            answer = await ask(roomy.url, post("/v1/completions", body))
            assert answer.status == 400, (body[:40], answer)

    asyncio.run(beside_a_stream(roomy, attack))


@pytest.mark.models
def test_hostile_constraints_stall_nobody(roomy: RunningServer) -> None:
    nested: Any = {"type": "string"}
    for _ in range(200):
        nested = {"type": "object", "properties": {"a": nested, "b": nested}}
    text = json.dumps({"type": "array", "items": {"type": "string"}, "maxItems": 2**62})
    constraints: list[dict[str, Any]] = [
        {"guided_grammar": "root ::= root"},
        {"guided_regex": "(a{1,1000}){1,1000}"},
        {"guided_regex": "(((((a*)*)*)*)*)*b"},
        {"guided_json": text},
        {"guided_json": {"$ref": "#"}},
        {"guided_choice": ["x" * 1000 + str(index) for index in range(2000)]},
    ]

    async def attack() -> None:
        for constraint in constraints:
            body = {"prompt": "x", "max_tokens": 4, **constraint}
            answer = await ask(roomy.url, post("/v1/completions", body))
            assert answer.status in (200, 400), (str(constraint)[:80], answer)

    asyncio.run(beside_a_stream(roomy, attack))


@pytest.mark.models
def test_a_client_that_does_not_read_is_dropped(roomy: RunningServer) -> None:
    """It holds up nobody, and its slots are free long before its tokens are all made."""

    async def attack() -> None:
        async with Connection(roomy.url, receive_bytes=1) as client:
            client.writer.transport.pause_reading()  # type: ignore[attr-defined]
            body = {"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "n": 3, "stream": True}
            client.writer.write(post("/v1/completions", {**body, "logprobs": 5}))
            while (await ask(roomy.url, head("GET", "/stats"))).json["num_running"] < 3:
                pass
            while (await ask(roomy.url, head("GET", "/stats"))).json["num_running"] >= 3:
                pass

    asyncio.run(beside_a_stream(roomy, attack))
    wait_until(
        lambda: "gone" in "".join(roomy.log) and not roomy.stats()["num_running"], "the client is not dropped"
    )
