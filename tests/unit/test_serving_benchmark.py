"""The load generator of `benchmarks/serving.py` against a server that does as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import statistics
import threading
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen import figures
from loadgen.figures import MeasurementError, StreamTrace
from loadgen.http import HttpStreams, Response
from loadgen.openai import Api, EventScanner, trace_of
from loadgen.prompts import RandomPrompts
from loadgen.targets import Run
from loadgen.turns import decode_in_turns
from serving import Bench, measure_server, parse_options

Handler = Callable[[dict, asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def event(fields) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text_event(text) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": None}]})


def usage_event(prompt_tokens, completion_tokens) -> bytes:
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": completion_tokens}
    return event({"choices": [], "usage": usage})


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


async def complete(body, writer) -> None:
    """As a server should: one chunk for each token, and the usage at the end."""
    num_prompt_tokens = 2 * len(body["prompt"].split())
    tokens = [text_event(f" {number}") for number in range(body["max_tokens"])]
    writer.write(HEAD)
    for token in tokens:
        writer.write(chunked(token).removesuffix(b"0\r\n\r\n"))
        await writer.drain()
        await asyncio.sleep(0)
    writer.write(chunked(usage_event(num_prompt_tokens, len(tokens)), b"data: [DONE]\n\n"))


@contextlib.contextmanager
def serving(handler: Handler) -> Iterator[str]:
    """The address of a server that reads requests and has `handler` write all bytes of the replies."""
    loop = asyncio.new_event_loop()

    async def serve(reader, writer) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                length = int(head.partition("content-length: ")[2].split()[0])
                await handler(json.loads(await reader.readexactly(length)), writer)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = loop.run_until_complete(asyncio.start_server(serve, "127.0.0.1", 0))
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        asyncio.run_coroutine_threadsafe(_end(server), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _end(server) -> None:
    server.close()
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.sleep(0)  # connections that were closed are gone after this turn of the loop


def traces(url, num_requests, num_streams, max_tokens=3, **more) -> list[StreamTrace]:
    streams = HttpStreams(url, **more)
    try:
        requests = [
            Api().request("localhost", f"prompt {number}", max_tokens) for number in range(num_requests)
        ]
        return [trace_of(reply) for reply in streams.run(requests, num_streams).replies]
    finally:
        streams.close()


class TestParsing:
    EVENTS = (
        b"data: one\n\n",
        b": a comment\r\nevent: message\r\ndata:two\r\ndata: more\r\n\r\n",
        b"data: [DONE]\n\n",
    )
    DATA = (b"one", b"two\nmore", b"[DONE]")

    @given(st.lists(st.integers(0, 400)), st.lists(st.integers(0, 80)))
    def test_events_come_whole_wherever_reads_and_chunks_are_cut(self, reads, chunks):
        body = b"".join(self.EVENTS)
        parts = [part for part in cut(body, chunks) if part]
        raw = HEAD + chunked(*parts)
        response, scanner, data = Response(), EventScanner(), []
        for piece in cut(raw, reads):
            assert not response.is_complete or not piece
            data += scanner.feed(response.feed(piece))
        assert response.status == 200
        assert response.is_complete
        assert tuple(data) == self.DATA

    @given(st.lists(st.integers(0, 60)))
    def test_a_body_with_a_length(self, reads):
        response = Response()
        pieces = cut(b"HTTP/1.1 429 Slow down\r\ncontent-length: 5\r\n\r\nhello", reads)
        assert b"".join(response.feed(piece) for piece in pieces) == b"hello"
        assert response.status == 429
        assert response.is_complete

    def test_what_is_not_http(self):
        with pytest.raises(ValueError, match="first line"):
            Response().feed(b"SSH-2.0 OpenSSH\r\n\r\n")

    def test_chat_chunks_count_from_the_first_text(self):
        async def chat(body, writer):
            assert body["messages"][0]["role"] == "user"
            deltas = [{"role": "assistant", "content": ""}, {"reasoning_content": "hm"}, {"content": "a"}, {}]
            events = [event({"choices": [{"index": 0, "delta": delta}]}) for delta in deltas]
            writer.write(HEAD + chunked(*events, usage_event(7, 2)))

        with serving(chat) as url:
            streams = HttpStreams(url)
            run = streams.run([Api(endpoint="chat").request("localhost", "hi", 2)], 1)
            streams.close()
        trace = trace_of(run.replies[0])
        assert (len(trace.chunk_times_s), trace.num_tokens, trace.prompt_tokens) == (2, 2, 7)
        assert trace.failure is None


def cut(data: bytes, positions) -> list[bytes]:
    borders = [0, *sorted(min(position, len(data)) for position in positions), len(data)]
    return [data[begin:end] for begin, end in itertools.pairwise(borders)]


class TestStreams:
    def test_all_requests_are_answered_over_few_connections(self):
        running, most, connections = 0, 0, set()

        async def handler(body, writer):
            nonlocal running, most
            running += 1
            most = max(most, running)
            connections.add(writer)
            await complete(body, writer)
            running -= 1

        with serving(handler) as url:
            streams = traces(url, num_requests=20, num_streams=4)
        assert [stream.num_tokens for stream in streams] == [3] * 20
        assert not figures.failures(streams)
        assert most <= 4
        assert len(connections) == 4

    def test_an_end_that_comes_byte_by_byte(self):
        async def handler(body, writer):
            for byte in HEAD + chunked(text_event("a"), usage_event(1, 1)):
                writer.write(bytes([byte]))
                await writer.drain()
                await asyncio.sleep(0)

        with serving(handler) as url:
            assert [stream.num_tokens for stream in traces(url, 2, 1)] == [1, 1]

    def test_connections_that_the_server_has_closed_are_opened_again(self):
        async def handler(body, writer):
            await complete(body, writer)
            writer.close()
            await writer.wait_closed()

        with serving(handler) as url:
            streams = HttpStreams(url)
            for _ in range(3):
                (reply,) = streams.run([Api().request("localhost", "hi", 2)], 1).replies
                assert trace_of(reply).failure in (None, "connection closed before the response")
            streams.close()

    def test_arrivals_begin_the_time_of_a_reply(self):
        with serving(complete) as url:
            streams = HttpStreams(url)
            requests = [Api().request("localhost", "hi", 2)] * 3
            replies = streams.run(requests, 3, [0.0, 0.01, 0.03]).replies
            streams.close()
        starts_s = [reply.started_s - replies[0].started_s for reply in replies]
        assert starts_s == pytest.approx([0.0, 0.01, 0.03])
        assert all(reply.times_s[0] >= reply.started_s for reply in replies)


class TestFailures:
    def test_each_kind_is_counted(self):
        replies = {
            "0": b"HTTP/1.1 500 Oops\r\nContent-Length: 4\r\n\r\nouch",
            "1": b'HTTP/1.1 429 Busy\r\nContent-Length: 31\r\n\r\n{"error": {"message": "later"}}',
            "2": HEAD + b"5\r\nda",
            "3": b"",
            "4": HEAD + chunked(text_event("a"), event({"error": {"message": "the engine failed"}})),
            "5": HEAD + chunked(usage_event(1, 0)),
            "6": HEAD + chunked(text_event("a")),
            "7": b"nonsense\r\n\r\n",
            "8": HEAD + chunked(b"data: {\n\n"),
        }

        async def handler(body, writer):
            writer.write(replies[body["prompt"].split()[1]])
            await writer.drain()
            writer.close()

        with serving(handler) as url:
            assert figures.failures(traces(url, 9, 9)) == {
                "HTTP 500: ouch": 1,
                "HTTP 429: later": 1,
                "connection closed in mid-stream": 1,
                "connection closed before the response": 1,
                "error in the stream: the engine failed": 1,
                "no text in the reply": 1,
                "no usage in the reply": 1,
                "not an HTTP response": 1,
                "an event that is not JSON": 1,
            }

    def test_no_server(self):
        with serving(complete) as url:
            pass
        (failure,) = figures.failures(traces(url, 2, 2))
        assert failure.startswith("cannot connect")

    def test_a_server_that_never_answers(self):
        async def handler(body, writer):
            await asyncio.Event().wait()

        with serving(handler) as url:
            assert figures.failures(traces(url, 2, 2, timeout_s=0.1)) == {"not complete after 0.1 s": 2}


class TestFigures:
    def test_latencies(self):
        streams = [
            StreamTrace(10.0, [10.5, 10.75, 11.0], num_tokens=3, prompt_tokens=8),
            StreamTrace(10.0, [11.0, 12.0], num_tokens=5, prompt_tokens=8),  # four tokens in the last chunk
        ]
        got = figures.latencies(streams)
        assert got["ttft_p50_ms"] == pytest.approx(750)
        assert got["tpot_p50_ms"] == pytest.approx(250)
        assert got["itl_p50_ms"] == pytest.approx(250)
        assert got["itl_p99_ms"] == pytest.approx(985)  # between 250 and 1000, 98 % of the way
        assert got["output_tokens_per_s"] == pytest.approx(4)
        assert got["requests_per_s"] == pytest.approx(1)
        assert got["tokens_per_chunk"] == pytest.approx(1.6)
        assert figures.prefill_tokens_per_s(streams) == pytest.approx(16)

    def test_decoding_is_counted_while_all_streams_decode(self):
        early = StreamTrace(0.0, [1.0 + 0.5 * step for step in range(20)], num_tokens=20)
        late = StreamTrace(0.0, [3.0 + 0.5 * step for step in range(20)], num_tokens=20)
        assert figures.decode_tokens_per_s([early, late], 8) == pytest.approx(4)
        with pytest.raises(MeasurementError, match="did not decode 16 tokens together"):
            figures.decode_tokens_per_s([early, late], 16)

    def test_several_tokens_in_a_chunk(self):
        stream = StreamTrace(0.0, [1.0, 2.0, 3.0, 4.0, 5.0], num_tokens=9)
        assert figures.decode_tokens_per_s([stream], 4) == pytest.approx(2)

    def test_medians(self):
        assert figures.medians([{"a": 1.0}, {"a": 5.0}, {"a": 2.0}]) == {"a": 2.0}


class TestBench:
    @pytest.mark.parametrize(
        "arguments",
        [["--streams", "1"], ["--streams", "2", "--requests", "5"], ["--rate", "500", "--requests", "5"]],
    )
    def test_a_server_is_measured(self, arguments, capsys):
        with serving(complete) as url:
            options = parse_options(
                ["--url", url, "--model", "m", *arguments, "--new-tokens", "4", "--repeat", "2"]
            )
            bench = Bench(options)
            results = measure_server(options, bench)
        assert not bench.failures
        for result in results:
            assert result["output_tokens_per_s"] > 0
            assert result["tokens_per_chunk"] == pytest.approx(1)
            assert len(result["rounds"]) == 2
        assert len(capsys.readouterr().out.splitlines()) == 1 + len(results)

    def test_prompts_get_the_length_that_the_server_counts(self):
        prompts = RandomPrompts(seed=1)
        prompts.fit(128, counted=256)
        first, second = prompts.texts(2, 128)
        assert len(first.split()) == 64
        assert first != second


class Ticking:
    """A target whose streams get a token every `step_s`, while it is not paused."""

    name = "ticking"

    def __init__(self, step_s: float, num_silent: int = 0) -> None:
        self._step_s = step_s
        self._num_silent = num_silent  # streams whose tokens have no text after the first
        self._may_run = threading.Event()
        self._may_run.set()

    def run(self, prompts, max_tokens) -> Run:
        streams = [StreamTrace(time.perf_counter(), num_tokens=max_tokens) for _ in prompts]
        for token in range(max_tokens):
            time.sleep(self._step_s)
            self._may_run.wait()
            for place, stream in enumerate(streams):
                if token == 0 or place >= self._num_silent:
                    stream.chunk_times_s.append(time.perf_counter())
        return Run(streams, 0.0, 0.0)

    def pause(self) -> None:
        self._may_run.clear()

    def resume(self) -> None:
        self._may_run.set()

    def close(self) -> None: ...


def test_targets_that_take_turns_are_told_apart():
    quick, slow = Ticking(0.001), Ticking(0.01, num_silent=1)
    quick_rates, slow_rates = decode_in_turns([quick, slow], ["a"] * 10, 300, 0.05)
    assert len(quick_rates) == len(slow_rates) >= 3
    assert statistics.median(quick_rates) > statistics.median(slow_rates) > 0


def test_too_few_turns_are_an_error():
    with pytest.raises(MeasurementError, match="turns"):
        decode_in_turns([Ticking(0.001), Ticking(0.001)], ["a"], 20, 0.05)


def test_a_target_that_failed_is_an_error_and_none_stands_still_after_it():
    class Failing(Ticking):
        def run(self, prompts, max_tokens) -> Run:
            if max_tokens > 1:
                raise MeasurementError("broken")
            return super().run(prompts, max_tokens)

    quick = Ticking(0.001)
    with pytest.raises(MeasurementError, match="broken"):
        decode_in_turns([quick, Failing(0.001)], ["a"], 100, 0.05)
    assert quick._may_run.is_set()
