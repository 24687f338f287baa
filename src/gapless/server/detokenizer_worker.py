"""The detokenizer's process: tokens to text, stop strings and log-probabilities, for all streams together."""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterable, Iterator

import zmq

from gapless.engine.choice import OutputBuilder
from gapless.engine.events import FinishEvent, FinishReason, PromptLogprobsEvent
from gapless.engine.request import Request
from gapless.sampling import RequestMetrics, StreamChunk
from gapless.sampling.outputs import LogprobsOfPosition
from gapless.server.channel import Codec, open_socket, unpack_ids
from gapless.server.failures import failure_of
from gapless.server.messages import (
    Chunk,
    Chunks,
    DetokenizerReady,
    Ended,
    Entered,
    Fatal,
    Forget,
    Metrics,
    Opened,
    PromptLogprob,
    Step,
    Token,
    TokenLogprob,
    TokenLogprobs,
)
from gapless.server.process import Settings, lifeline_has_ended, say_last_words
from gapless.server.tokenizer_worker import load
from gapless.tokenizer import Tokenizer

logger = logging.getLogger("gapless.server")


class Generation:
    """The text of one request's choices."""

    def __init__(self, opened: Opened, tokenizer: Tokenizer) -> None:
        self.number = opened.number
        self.request = Request(
            id=str(opened.number),
            prompt_token_ids=unpack_ids(opened.prompt_token_ids),
            params=opened.params,
            max_tokens=opened.max_tokens,
            stop_token_ids=opened.stop_token_ids,
            arrival_s=opened.arrival_s,
        )
        self._tokenizer = tokenizer
        # The front end cancels what a stop string has ended: it learns of that from the chunk.
        self._builder = OutputBuilder(self.request, tokenizer, lambda request, index: None)
        self._has_prompt_logprobs = opened.params.prompt_logprobs is not None
        self.add_token = self._builder.add_token
        self.take_text = self._builder.take_text

    @property
    def is_finished(self) -> bool:
        return self._builder.is_finished or self._builder.error is not None

    def add(self, event: Entered | PromptLogprob | Ended) -> None:
        """Takes what is not a token."""
        if isinstance(event, Entered):
            self.request.admitted_s = event.admitted_s
            self.request.num_cached_tokens = event.num_cached_tokens
            self.request.num_preemptions = event.num_preemptions
        elif isinstance(event, PromptLogprob):
            self._builder.add_prompt_logprobs(
                PromptLogprobsEvent(event.position, event.logprob, event.rank, event.top)
            )
        else:
            self.request.num_preemptions = event.num_preemptions
            reason = FinishReason(event.reason)
            self._builder.finish(FinishEvent(event.choice, reason, event.time_s, event.message))

    def take_chunks(self) -> list[Chunk]:
        """What the choices gained since the last call."""
        if self._builder.error is not None:
            return [_failed(self.number, self._builder.error)]
        chunks = [self._chunk(chunk) for chunk in self._builder.take_chunks()]
        if chunks and self._builder.is_finished:
            chunks[-1].metrics = _metrics(self._builder.output.metrics)
        return chunks

    def _chunk(self, chunk: StreamChunk) -> Chunk:
        logprobs = chunk.logprobs
        return Chunk(
            self.number,
            chunk.index,
            chunk.text,
            len(chunk.token_ids),
            chunk.finish_reason,
            chunk.stop_reason,
            None if logprobs is None else [self._logprobs(position) for position in logprobs],
            self._take_prompt_logprobs() if self._has_prompt_logprobs else None,
        )

    def _take_prompt_logprobs(self) -> list[TokenLogprobs]:
        self._has_prompt_logprobs = False  # they are complete before the first token, and told with it
        output = self._builder.output
        return [
            [TokenLogprob(token_id, None, 0, self._piece(token_id))]
            if position is None
            else self._logprobs(position)
            for token_id, position in zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=True)
        ]

    def _logprobs(self, position: LogprobsOfPosition) -> TokenLogprobs:
        return [
            TokenLogprob(
                token_id, one.logprob if math.isfinite(one.logprob) else None, one.rank, self._piece(token_id)
            )
            for token_id, one in position.items()
        ]

    def _piece(self, token_id: int) -> bytes:
        return self._tokenizer.token_to_piece(token_id) if token_id < self._tokenizer.vocab_size else b""


def _failed(number: int, error: str) -> Chunk:
    return Chunk(number, 0, "", 0, FinishReason.ERROR.value, error=error)


def _metrics(metrics: RequestMetrics) -> Metrics:
    return Metrics(
        metrics.num_prompt_tokens,
        metrics.num_output_tokens,
        metrics.num_cached_tokens,
        metrics.num_preemptions,
        metrics.arrival_s,
        metrics.queue_s,
        metrics.ttft_s,
        metrics.e2e_s,
        metrics.tpot_s,
    )


class DetokenizerWorker:
    """Holds the generations that are open."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._generations: dict[int, Generation] = {}
        self._forgotten = -1

    def take(self, steps: Iterable[Step]) -> Chunks:
        """What all generations gained from these steps."""
        generations = self._generations
        touched: dict[int, Generation] = {}
        gained = Chunks([], [], [])
        for step in steps:
            for event in step:
                if isinstance(event, Opened | Forget):
                    self._register(event)
                    continue
                number = event.number
                # Those without a generation have ended by a stop string, or been forgotten.
                if (generation := generations.get(number)) is not None:
                    try:
                        if isinstance(event, Token):
                            generation.add_token(event)
                        else:
                            generation.add(event)
                        touched[number] = generation
                    except Exception as error:  # one request's fault must not take the others' text
                        gained.chunks.append(self._drop(generation, error))
                        touched.pop(number, None)
        for number, generation in touched.items():
            if (text := generation.take_text()) is not None:
                gained.plain_numbers.append(number)
                gained.plain_texts.append(text)
            else:
                gained.chunks += self._chunks(generation)
        return gained

    def _chunks(self, generation: Generation) -> list[Chunk]:
        try:
            chunks = generation.take_chunks()
        except Exception as error:
            return [self._drop(generation, error)]
        if generation.is_finished:
            self._generations.pop(generation.number, None)
        return chunks

    def _drop(self, generation: Generation, error: Exception) -> Chunk:
        logger.exception("The text of generation %d could not be made", generation.number)
        self._generations.pop(generation.number, None)
        return _failed(generation.number, repr(error))

    def _register(self, event: Opened | Forget) -> None:
        if isinstance(event, Forget):
            self._forgotten = event.number
            for number in [number for number in self._generations if number <= event.number]:
                del self._generations[number]
        elif event.number > self._forgotten:
            self._generations[event.number] = Generation(event, self._tokenizer)


def _waiting(socket: zmq.Socket[bytes]) -> Iterator[bytes]:
    """All messages that are there now."""
    while socket.poll(0):
        yield socket.recv()


def run(settings: Settings) -> None:
    """Turns tokens into text until the lifeline ends."""
    assert settings.tokens_address is not None
    codec: Codec[Step] = Codec(Step)
    front_end = open_socket(zmq.DEALER, connect=settings.address)
    try:
        worker = DetokenizerWorker(load(settings))
        tokens = open_socket(zmq.PULL, bind=settings.tokens_address)
    except Exception as error:  # also when the server has ended meanwhile, and its folder is gone
        say_last_words(front_end, codec.encode(Fatal(failure_of(error))))
        return
    front_end.send(codec.encode(DetokenizerReady(settings.tokens_address)))
    lifeline = sys.stdin.fileno()
    poller = zmq.Poller()
    for source in (tokens, front_end, lifeline):
        poller.register(source, zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if lifeline in ready and lifeline_has_ended():
            return
        # What has piled up is taken at once: the busier the machine, the fewer messages.
        steps = [codec.decode(data) for socket in (tokens, front_end) for data in _waiting(socket)]
        gained = worker.take(steps)
        if gained.chunks or gained.plain_numbers:
            front_end.send(codec.encode(gained))
