"""The engine's process: takes token ids from the front end, and sends tokens to the detokenizer.

Its event loop only carries messages. The engine's own threads run beside it; what they report within a step
leaves in one message.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import zmq

from gapless import _native
from gapless.config import EngineConfig
from gapless.engine import Engine
from gapless.engine.events import (
    EmbeddingEvent,
    FinishEvent,
    FinishReason,
    PromptLogprobsEvent,
    RequestEvent,
    TokenEvent,
)
from gapless.engine.request import Request, Sink
from gapless.errors import InvalidRequestError
from gapless.runtime import Runtime, start
from gapless.sampling import Pooling
from gapless.server.channel import AsyncChannel, Codec, open_socket, pack_ids, unpack_ids
from gapless.server.failures import failure_of
from gapless.server.messages import (
    AskStats,
    Cancel,
    Embedded,
    Ended,
    EngineReady,
    Entered,
    Fatal,
    Loading,
    ModelFacts,
    Opened,
    PromptLogprob,
    Refused,
    Stats,
    StepEvent,
    Submit,
    ToEngine,
    Token,
    UseDetokenizer,
)
from gapless.server.process import LAST_WORDS_S, Settings, lifeline_has_ended

logger = logging.getLogger("gapless.server")

_PROGRESS_EVERY_S = 0.1
# Constraints are compiled one at a time anyway; a second thread refuses at once what is cached as known.
_COMPILE_THREADS = 2
_SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_MAX_METADATA_CHARACTERS = 4096


class Outbox:
    """Carries events from the engine's threads to the detokenizer, those of one step together."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._codec: Codec[Any] = Codec(Any)
        self._socket: zmq.Socket[bytes] | None = None
        self._lock = threading.Lock()
        self._events: list[StepEvent] = []

    def put(self, events: list[StepEvent]) -> None:
        """From any thread."""
        with self._lock:
            is_first = not self._events
            self._events += events
        if is_first and events:
            self._loop.call_soon_threadsafe(self._flush)

    def redirect(self, address: str) -> None:
        """Sends to `address` from now on. What waits was for a detokenizer that is gone, and is dropped."""
        self.close()
        self._take()
        self._socket = open_socket(zmq.PUSH, connect=address)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _flush(self) -> None:
        if (events := self._take()) and self._socket is not None:
            self._socket.send(self._codec.encode(events), zmq.NOBLOCK)

    def _take(self) -> list[StepEvent]:
        with self._lock:
            events, self._events = self._events, []
        return events


class RequestSink:
    """Turns one request's events into messages. Called on the engine's threads, one call at a time."""

    def __init__(
        self, number: int, put: Callable[[list[StepEvent]], None], on_end: Callable[[int], None]
    ) -> None:
        self._number = number
        self._put = put
        self._on_end = on_end
        self._has_entered = False
        self._num_open: int | None = None

    def __call__(self, request: Request, events: list[RequestEvent]) -> None:
        number, messages = self._number, list[StepEvent]()
        if not self._has_entered and request.admitted_s is not None:
            self._has_entered = True
            messages.append(
                Entered(number, request.admitted_s, request.num_cached_tokens, request.num_preemptions)
            )
        for event in events:
            if isinstance(event, TokenEvent):
                messages.append(_token(number, event))
            elif isinstance(event, PromptLogprobsEvent):
                messages.append(PromptLogprob(number, *event))
            elif isinstance(event, FinishEvent):
                messages.append(self._ended(request, event))
        self._put(messages)

    def _ended(self, request: Request, event: FinishEvent) -> Ended:
        if self._num_open is None:
            self._num_open = len(request.sequences)
        self._num_open -= 1
        if not self._num_open:
            self._on_end(self._number)
        return Ended(
            self._number,
            event.choice,
            event.reason.value,
            event.time_s,
            event.message,
            request.num_preemptions,
        )


class EmbeddingSink:
    """The same for a prompt that is embedded: one message, when it has ended."""

    def __init__(self, number: int, on_end: Callable[[Embedded], None]) -> None:
        self._number = number
        self._on_end = on_end
        self._vector: bytes | None = None

    def __call__(self, request: Request, events: list[RequestEvent]) -> None:
        for event in events:
            if isinstance(event, EmbeddingEvent):
                self._vector = event.vector.astype(np.float32).tobytes()
            elif isinstance(event, FinishEvent):
                error = event.message if event.reason is FinishReason.ERROR else ""
                self._on_end(Embedded(self._number, self._vector, error))


def _token(number: int, event: TokenEvent) -> Token:
    if event.logprob is None:
        return Token(number, event.choice, event.token_id, event.time_s)
    return Token(number, event.choice, event.token_id, event.time_s, event.logprob, event.rank, event.top)


class EngineWorker:
    """Answers the front end's messages."""

    def __init__(self, runtime: Runtime, channel: AsyncChannel[ToEngine], outbox: Outbox) -> None:
        self._engine: Engine = runtime.engine
        self._channel = channel
        self._outbox = outbox
        self._requests: dict[int, Request] = {}
        self._cancelled: set[int] = set()  # while their constraints are compiled
        self._compiling: set[int] = set()
        self._pool = ThreadPoolExecutor(_COMPILE_THREADS, thread_name_prefix="gapless-constraints")
        self._loop = asyncio.get_running_loop()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._outbox.close()

    def take(self, message: ToEngine) -> None:
        """Does what the front end asks."""
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Cancel):
            self._cancel(message)
        elif isinstance(message, AskStats):
            self._channel.send(stats_of(self._engine))
        elif isinstance(message, UseDetokenizer):
            for request in list(self._requests.values()):
                self._engine.cancel(request)
            self._requests.clear()
            self._cancelled |= self._compiling
            self._outbox.redirect(message.address)

    def _submit(self, message: Submit) -> None:
        if message.params.structured_outputs is None:
            self._start(message, lambda: self._make_request(message))
            return
        # Compiling a constraint takes a tenth of a second or more: other requests do not wait for it.
        self._compiling.add(message.number)
        compiled = self._loop.run_in_executor(self._pool, self._make_request, message)
        compiled.add_done_callback(lambda future: self._compiled(message, future))

    def _compiled(self, message: Submit, future: asyncio.Future[Request]) -> None:
        self._compiling.discard(message.number)
        if future.cancelled():
            return
        if message.number in self._cancelled:
            self._cancelled.discard(message.number)
            future.exception()  # whatever it was, nobody waits for it
            return
        self._start(message, future.result)

    def _make_request(self, message: Submit) -> Request:
        request = self._engine.make_request(
            unpack_ids(message.token_ids),
            message.params,
            request_id=message.request_id,
            priority=message.priority,
            pooling=self._pooling() if message.is_embedding else None,
        )
        request.arrival_s = message.arrival_s
        return request

    def _pooling(self) -> Pooling:
        if (own := self._engine.limits.pooling) is None:
            raise InvalidRequestError(
                "This model wants its texts pooled in a way that Gapless does not have."
            )
        return own

    def _start(self, message: Submit, make: Callable[[], Request]) -> None:
        number = message.number
        try:
            request = make()
            self._requests[number] = request
            sink: Sink
            if message.is_embedding:
                sink = EmbeddingSink(number, self._embedded_in_thread)
            else:
                # Ahead of the first token: both go through the same outbox.
                self._outbox.put([_opened(message, request)])
                sink = RequestSink(number, self._outbox.put, self._ended_in_thread)
            self._engine.start(request, sink)
        except Exception as error:
            self._requests.pop(number, None)
            self._outbox.put([Ended(number, 0, FinishReason.ERROR.value, time.perf_counter(), str(error))])
            self._channel.send(Refused(number, failure_of(error)))

    def _ended_in_thread(self, number: int) -> None:
        self._loop.call_soon_threadsafe(self._requests.pop, number, None)

    def _embedded_in_thread(self, message: Embedded) -> None:
        self._ended_in_thread(message.number)
        self._loop.call_soon_threadsafe(self._channel.send, message)

    def _cancel(self, message: Cancel) -> None:
        if message.number in self._compiling:
            self._cancelled.add(message.number)
        elif (request := self._requests.get(message.number)) is not None:
            self._engine.cancel(request, message.index)


def _opened(message: Submit, request: Request) -> Opened:
    return Opened(
        message.number,
        pack_ids(request.prompt_token_ids),
        request.params,
        request.max_tokens,
        list(request.stop_token_ids),
        request.arrival_s,
    )


def stats_of(engine: Engine) -> Stats:
    """The engine's counters as a message."""
    values = engine.stats()
    histogram = [int(count) for count in values.pop("gap_histogram")]
    return Stats({name: float(value) for name, value in values.items()}, histogram)


def facts_of(runtime: Runtime, config: EngineConfig) -> ModelFacts:
    """What clients can learn about the model."""
    model, limits = runtime.model, runtime.engine.limits
    types = {name: size for name, size in model.weight_types.items() if size}
    recommended = model.checkpoint.generation_config
    return ModelFacts(
        path=str(runtime.path),
        architecture=model.architecture,
        num_parameters=sum(info.num_values for info in model.checkpoint.tensors.values()),
        file_bytes=model.checkpoint.total_bytes,
        quantization=max(types, key=lambda name: types[name]) if types else "",
        context_length=model.config.context_length,
        max_model_len=limits.max_model_len,
        max_num_seqs=limits.max_num_seqs,
        vocab_size=limits.vocab_size,
        hidden_size=model.config.hidden_size,
        block_size=int(_native.Executor.block_size),
        num_blocks=limits.num_blocks,
        kv_dtype=config.kv_dtype,
        isa=runtime.isa,
        num_threads=runtime.num_threads,
        metadata=_plain_metadata(model.checkpoint.metadata),
        generation_defaults={
            name: float(value)
            for name in _SAMPLING_DEFAULTS
            if isinstance(value := recommended.get(name), (int, float)) and not isinstance(value, bool)
        },
    )


def _plain_metadata(metadata: Any) -> dict[str, Any]:
    """Short values of the file's metadata; lists and long texts are left out."""
    return {
        str(key): value
        for key, value in metadata.items()
        if isinstance(value, (bool, int, float, str)) and len(str(value)) <= _MAX_METADATA_CHARACTERS
    }


class _Progress:
    """Tells how far loading is, not too often."""

    def __init__(self, send: Callable[[Loading], object]) -> None:
        self._send = send
        self._last_s = 0.0

    def __call__(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s >= _PROGRESS_EVERY_S or done == total:
            self._last_s = now_s
            self._send(Loading(done, total))


async def _serve(settings: Settings) -> None:
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Any] = loop.create_future()
    loop.add_reader(sys.stdin.fileno(), _look_at_lifeline, ended)
    worker: EngineWorker | None = None

    def take(message: ToEngine) -> None:
        assert worker is not None, "the front end speaks when it has been spoken to"
        worker.take(message)

    channel: AsyncChannel[ToEngine] = AsyncChannel(ToEngine, take, connect=settings.address)
    progress = _Progress(lambda message: loop.call_soon_threadsafe(channel.send, message))
    # A pool of its own: at its end, the loop would wait for its default one, and so for a model unwanted.
    pool = ThreadPoolExecutor(1, thread_name_prefix="gapless-loading")
    loading: asyncio.Future[Any] = loop.run_in_executor(pool, start, settings.engine, progress)
    await asyncio.wait({loading, ended}, return_when=asyncio.FIRST_COMPLETED)
    if ended.done():
        return
    try:
        runtime = loading.result()
    except Exception as error:
        logger.debug("Loading failed", exc_info=True)
        channel.send(Fatal(failure_of(error)))
        await asyncio.wait([ended], timeout=LAST_WORDS_S)
        return
    worker = EngineWorker(runtime, channel, Outbox(loop))
    channel.send(EngineReady(facts_of(runtime, settings.engine)))
    await ended
    channel.close()
    worker.close()
    await asyncio.to_thread(runtime.close)


def _look_at_lifeline(ended: asyncio.Future[Any]) -> None:
    if lifeline_has_ended() and not ended.done():
        asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
        ended.set_result(None)


def run(settings: Settings) -> None:
    """Runs the engine until the lifeline ends."""
    status = 1
    try:
        asyncio.run(_serve(settings))
        status = 0
    except Exception:
        logger.exception("The engine's process failed")
    # Not through the interpreter's end: the thread of a load or of a constraint may still run.
    logging.shutdown()
    os._exit(status)
