"""The front end's side of the worker processes: requests go in, chunks come out, whatever dies."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeAlias

from starlette.requests import Request

from gapless import hub
from gapless.engine.events import FinishReason
from gapless.errors import ContextLengthError, EngineError, GaplessError, InvalidRequestError, TemplateError
from gapless.sampling import SamplingParams
from gapless.server.channel import pack_ids, socket_folder
from gapless.server.config import ServerConfig
from gapless.server.failures import InternalError, error_of
from gapless.server.messages import (
    AskStats,
    Cancel,
    Chunk,
    Chunks,
    Decode,
    Decoded,
    DetokenizerReady,
    Embedded,
    Encode,
    Encoded,
    EngineReady,
    Forget,
    FromDetokenizer,
    FromEngine,
    FromTokenizer,
    Loading,
    ModelFacts,
    Prompt,
    Refused,
    Stats,
    Submit,
    TokenizerReady,
    UseDetokenizer,
)
from gapless.server.metrics import ServerMetrics
from gapless.server.process import Role, Settings
from gapless.server.stream import Generation, Stage, Stream
from gapless.server.worker import Worker

logger = logging.getLogger("gapless.server")

PromptOrIds: TypeAlias = "Prompt | Sequence[int]"

# A prompt whose tokenizer dies is tried once more; the second time it is taken for the cause.
_MAX_DEATHS = 2
_STATS_TIMEOUT_S = 5.0


class NotReadyError(GaplessError):
    """The model is being loaded, or an engine that died is being replaced."""


class QueueFullError(GaplessError):
    """More requests wait than the operator allows."""


class Service:
    """Starts the processes, keeps them alive, and knows of every open request where it is."""

    def __init__(self, config: ServerConfig, on_fatal: Callable[[GaplessError], None]) -> None:
        self.config = config
        path = hub.resolve(config.engine.model)
        self.model_name = config.served_model_name or path.name.removesuffix(".gguf")
        self.model_path = path
        self.metrics = ServerMetrics(self.model_name)
        self.facts: ModelFacts | None = None
        self.tokenizer_facts: TokenizerReady | None = None
        self.loaded_share = 0.0
        self.started = int(time.time())
        self._on_fatal = on_fatal
        self._numbers = itertools.count(1)
        self._open: dict[int, Generation] = {}
        self._num_sequences = 0
        self._decodes: dict[int, asyncio.Future[str]] = {}
        self._stats_waiters: list[asyncio.Future[Stats]] = []
        self._resources = ExitStack()
        self._workers: list[Worker[Any]] = []
        self._stopping = False
        self.metrics.watch_open(lambda: len(self._open))

    # --- life ---

    async def start(self) -> None:
        """Starts the processes, and returns before they are ready."""
        folder = self._resources.enter_context(socket_folder())
        self._folder = folder
        self._detokenizer: Worker[FromDetokenizer] = Worker(
            Role.DETOKENIZER,
            folder,
            lambda address: self._settings(address, self._tokens_address),
            FromDetokenizer,
            on_message=self._from_detokenizer,
            on_death=self._detokenizer_died,
            on_give_up=self._give_up,
        )
        self._engine: Worker[FromEngine] = Worker(
            Role.ENGINE,
            folder,
            self._settings,
            FromEngine,
            on_message=self._from_engine,
            on_death=self._engine_died,
            on_give_up=self._give_up,
        )
        self._tokenizers: list[Worker[FromTokenizer]] = [
            Worker(
                Role.TOKENIZER,
                folder,
                self._settings,
                FromTokenizer,
                on_message=self._from_tokenizer,
                on_death=self._tokenizer_died,
                on_give_up=self._give_up,
                name=f"tokenizer-{index}",
            )
            for index in range(self.config.num_tokenizers)
        ]
        self._encoding: dict[Worker[Any], dict[int, Encode | Decode]] = {one: {} for one in self._tokenizers}
        self._workers = [self._engine, self._detokenizer, *self._tokenizers]
        for worker in self._workers:
            worker.start()

    def end_requests(self) -> None:
        """Ends all requests with an error, and takes no more."""
        self._stopping = True
        self._fail_all(NotReadyError("The server is shutting down."))

    async def close(self) -> None:
        """Ends all requests and processes."""
        self.end_requests()
        await asyncio.gather(*(worker.stop() for worker in self._workers))
        self._resources.close()

    def _settings(self, address: str, tokens_address: str | None = None) -> Settings:
        return Settings(
            address=address,
            engine=self.config.engine,
            tokens_address=tokens_address,
            chat_template=self.config.chat_template,
            log_level=logger.getEffectiveLevel(),
        )

    @property
    def _tokens_address(self) -> str:
        return f"ipc://{Path(self._folder, f'tokens-{self._detokenizer.num_restarts}')}"

    @property
    def is_ready(self) -> bool:
        """Whether a request can be served now."""
        return (
            not self._stopping
            and self._engine.is_ready
            and self._detokenizer.is_ready
            and any(one.is_ready for one in self._tokenizers)
        )

    def require_ready(self) -> ModelFacts:
        """NotReadyError while the model is loaded."""
        if not self.is_ready or self.facts is None:
            if self._stopping:
                raise NotReadyError("The server is shutting down.")
            if self.facts is None:
                raise NotReadyError(
                    f"{self.model_name} is being loaded ({self.loaded_share:.0%}). Try again in a moment."
                )
            raise NotReadyError("A process of the server died and is being replaced. Try again in a moment.")
        return self.facts

    # --- requests ---

    def open(
        self,
        prompts: Sequence[PromptOrIds],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        is_embedding: bool = False,
    ) -> Stream:
        """Starts prompts and returns at once: what is wrong with one of them, reading the stream tells.

        With `is_embedding` they are embedded instead of continued: each gives one chunk.

        NotReadyError, QueueFullError, or InvalidRequestError for a prompt that cannot be sent.
        """
        facts = self.require_ready()
        self._check_queue(facts, len(prompts) * params.n)
        stream = Stream(request_id or uuid.uuid4().hex, params, priority, self._cancel, is_embedding)
        try:
            for position, prompt in enumerate(prompts):
                self._open_one(stream, position, prompt, params, facts)
        except BaseException:
            stream.cancel()
            raise
        return stream

    async def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, control tokens included."""
        packed = _packed(token_ids, self.require_ready())
        number = next(self._numbers)
        future: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._decodes[number] = future
        try:
            self._to_tokenizer(Decode(number, packed))
            return await future
        finally:
            self._decodes.pop(number, None)

    async def stats(self) -> Stats | None:
        """The engine's counters; None while there is no engine, or if it does not answer."""
        if not self._engine.is_ready:
            return None
        future: asyncio.Future[Stats] = asyncio.get_running_loop().create_future()
        self._stats_waiters.append(future)
        if len(self._stats_waiters) == 1:
            self._engine.send(AskStats())
        await asyncio.wait([future], timeout=_STATS_TIMEOUT_S)
        return future.result() if future.done() and not future.cancelled() else None

    def _check_queue(self, facts: ModelFacts, num_sequences: int) -> None:
        limit = facts.max_num_seqs + self.config.max_queue
        if num_sequences > limit:  # it would be refused at any time
            raise InvalidRequestError(
                f"The request has {num_sequences} sequences, but the server takes at most {limit} at a time. "
                "Send them in several requests.",
                param="n",
            )
        if self._num_sequences + num_sequences > limit:
            self.metrics.refused()
            raise QueueFullError(
                f"{self._num_sequences} sequences run or wait, and this request has {num_sequences} more; "
                f"the server takes at most {limit} ({facts.max_num_seqs} running, "
                f"{self.config.max_queue} waiting). Try again later."
            )

    def _open_one(
        self, stream: Stream, position: int, prompt: PromptOrIds, params: SamplingParams, facts: ModelFacts
    ) -> None:
        is_text = isinstance(prompt, Prompt)
        generation = Generation(
            next(self._numbers), stream, position, prompt if isinstance(prompt, Prompt) else None, params
        )
        stream.add(generation)
        self._open[generation.number] = generation
        self._num_sequences += generation.num_sequences
        if is_text:
            self._encode(generation)
        else:
            generation.token_ids = _packed(prompt, facts)
            self._submit(generation)

    def _encode(self, generation: Generation) -> None:
        assert generation.prompt is not None
        assert self.facts is not None
        self._to_tokenizer(Encode(generation.number, generation.prompt, self.facts.max_model_len))

    def _to_tokenizer(self, message: Encode | Decode) -> None:
        """To the one with the least to do."""
        ready = [one for one in self._tokenizers if one.is_ready] or self._tokenizers
        worker = min(ready, key=lambda one: len(self._encoding[one]))
        if worker.is_ready:  # else it is sent when a tokenizer has become so
            _sendable(worker.send, message)
        self._encoding[worker][message.number] = message

    def _submit(self, generation: Generation) -> None:
        if not (self._engine.is_ready and self._detokenizer.is_ready):
            self._fail(generation, EngineError("A process of the server died under this request."))
            return
        generation.stage = Stage.SUBMITTED
        stream = generation.stream
        submit = Submit(
            generation.number,
            stream.request_id,
            generation.token_ids,
            generation.params,
            stream.priority,
            generation.arrival_s,
            stream.is_embedding,
        )
        try:
            _sendable(self._engine.send, submit)
        except InvalidRequestError as error:
            # Not raised: we may be here on the tokenizer's answer, where nobody would catch it.
            self._fail(generation, error)

    def _cancel(self, generation: Generation) -> None:
        """Ends a generation that its consumer does not want any more."""
        if generation.stage is not Stage.ENDED:
            self.metrics.finished("abort", len(generation.open_choices))
            self._stop(generation)

    def _fail(self, generation: Generation, error: GaplessError) -> None:
        """Ends one generation, and with it the others of its request."""
        if generation.stage is not Stage.ENDED:
            if not isinstance(error, InvalidRequestError | TemplateError):
                self.metrics.finished("error", len(generation.open_choices))
            self._stop(generation)
            generation.stream.fail(error)
            generation.stream.cancel()

    def _stop(self, generation: Generation) -> None:
        """Wherever it is."""
        if generation.stage is Stage.SUBMITTED:
            self._engine.send(Cancel(generation.number))
        for encoding in self._encoding.values():
            encoding.pop(generation.number, None)
        self._close(generation)

    def _close(self, generation: Generation) -> None:
        if generation.stage is not Stage.ENDED:
            generation.stage = Stage.ENDED
            self._num_sequences -= generation.num_sequences
            self._open.pop(generation.number, None)

    def _fail_all(self, error: GaplessError, stage: Stage | None = None) -> None:
        for generation in list(self._open.values()):
            if stage is None or generation.stage is stage:
                self._fail(generation, error)

    # --- messages ---

    def _from_tokenizer(self, worker: Worker[FromTokenizer], message: FromTokenizer) -> None:
        if isinstance(message, TokenizerReady):
            self.tokenizer_facts = message
            worker.is_ready = True
            for pending in list(self._encoding[worker].values()):
                worker.send(pending)
            return
        assert not isinstance(message, Loading)
        number = message.number  # type: ignore[union-attr]
        self._encoding[worker].pop(number, None)
        if (future := self._decodes.get(number)) is not None:
            if isinstance(message, Decoded):
                future.set_result(message.text)
            elif isinstance(message, Refused):
                future.set_exception(error_of(message.failure))
        elif (generation := self._open.get(number)) is not None:
            if isinstance(message, Encoded):
                generation.token_ids, generation.tail = message.token_ids, message.tail
                self._submit(generation)
            elif isinstance(message, Refused):
                self._fail(generation, error_of(message.failure))

    def _from_engine(self, worker: Worker[FromEngine], message: FromEngine) -> None:
        if isinstance(message, Loading):
            self.loaded_share = message.done_bytes / max(1, message.total_bytes)
        elif isinstance(message, EngineReady):
            self.facts = message.facts
            worker.is_ready = True
            logger.info("The engine is ready: %s", message.facts.path)
            if self._detokenizer.is_ready:
                worker.send(UseDetokenizer(self._tokens_address))
        elif isinstance(message, Stats):
            waiters, self._stats_waiters = self._stats_waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(message)
        elif isinstance(message, Embedded):
            if (generation := self._open.get(message.number)) is not None:
                self._embedded(generation, message)
        elif isinstance(message, Refused) and (generation := self._open.get(message.number)) is not None:
            error = error_of(message.failure)
            if isinstance(error, InvalidRequestError) and error.param == "prompt":
                error.param = generation.param  # the engine knows only of token ids
            self._fail(generation, error)

    def _from_detokenizer(self, worker: Worker[FromDetokenizer], message: FromDetokenizer) -> None:
        if isinstance(message, Chunks):
            now_s = time.perf_counter()
            num_tokens = len(message.plain_numbers) + sum(chunk.num_tokens for chunk in message.chunks)
            self.metrics.generated(num_tokens, now_s)
            for number, text in zip(message.plain_numbers, message.plain_texts, strict=True):
                if (generation := self._open.get(number)) is not None:
                    generation.num_output_tokens += 1
                    self.metrics.gained(generation, 0, 1, now_s)
                    generation.put_text(text)
            for chunk in message.chunks:
                if (generation := self._open.get(chunk.number)) is not None:
                    if chunk.finish_reason is not None and not self._end_choice(generation, chunk):
                        continue
                    generation.num_output_tokens += chunk.num_tokens
                    self.metrics.gained(generation, chunk.index, chunk.num_tokens, now_s)
                    generation.stream.put(generation, chunk)
        elif isinstance(message, DetokenizerReady):
            worker.is_ready = True
            if self._engine.is_ready:
                self._engine.send(UseDetokenizer(message.address))

    def _end_choice(self, generation: Generation, chunk: Chunk) -> bool:
        """Takes note of the last chunk of a choice; False if it is no more than an error."""
        if chunk.error is not None:
            self._fail(generation, EngineError(chunk.error))
            return False
        assert chunk.finish_reason is not None
        generation.open_choices.discard(chunk.index)
        self.metrics.finished(chunk.finish_reason, 1)
        if isinstance(chunk.stop_reason, str):  # found in the text: the engine does not know yet
            self._engine.send(Cancel(generation.number, chunk.index))
        if chunk.metrics is not None:
            generation.metrics = chunk.metrics
            self.metrics.ended(chunk.metrics)
            self._close(generation)
        return True

    def _embedded(self, generation: Generation, message: Embedded) -> None:
        if message.vector is None:
            self._fail(generation, EngineError(message.error or "The embedding was not made."))
            return
        self.metrics.embedded(generation.num_prompt_tokens)
        self._close(generation)
        chunk = Chunk(generation.number, 0, "", 0, FinishReason.STOP.value, embedding=message.vector)
        generation.stream.put(generation, chunk)

    # --- deaths ---

    def _tokenizer_died(self, worker: Worker[FromTokenizer]) -> None:
        """What it had is given to the next."""
        self.metrics.restarted()
        lost, self._encoding[worker] = self._encoding[worker], {}
        for place, message in enumerate(lost.values()):
            if isinstance(message, Decode):
                if (future := self._decodes.get(message.number)) is not None:
                    future.set_exception(InternalError("The tokenizer died."))
            elif (generation := self._open.get(message.number)) is not None:
                generation.num_deaths += not place  # it works on them in order: the first is the suspect
                if generation.num_deaths >= _MAX_DEATHS:
                    self._fail(generation, InternalError("The tokenizer died over this prompt."))
                else:
                    self._encode(generation)

    def _engine_died(self, worker: Worker[FromEngine]) -> None:
        self.metrics.restarted()
        self.metrics.engine_restarted()
        self._fail_all(EngineError("The engine died under this request."), Stage.SUBMITTED)
        for waiter in self._stats_waiters:
            waiter.cancel()
        self._stats_waiters.clear()
        self._detokenizer.send([Forget(next(self._numbers))])

    def _detokenizer_died(self, worker: Worker[FromDetokenizer]) -> None:
        self.metrics.restarted()
        self._fail_all(EngineError("The detokenizer died under this request."), Stage.SUBMITTED)

    def _give_up(self, error: GaplessError) -> None:
        self._fail_all(error)
        self._on_fatal(error)


def service_of(request: Request) -> Service:
    """The service of the application that was asked."""
    service: Service = request.app.state.service
    return service


def _packed(token_ids: Any, facts: ModelFacts) -> bytes:
    """Ids of a prompt as int32. Those that are far too many are refused before anything is made of them."""
    if len(token_ids) > facts.max_model_len:
        raise ContextLengthError(
            f"The prompt has {len(token_ids)} tokens, but prompt and output together may have at most "
            f"{facts.max_model_len}. Shorten it.",
            param="prompt",
        )
    try:
        return pack_ids(token_ids)
    except (OverflowError, ValueError, TypeError):
        raise InvalidRequestError(
            "A prompt of token ids is a list of integers within the vocabulary.", param="prompt"
        ) from None


def _sendable(send: Callable[[Any], None], message: Any) -> None:
    """Sends what a client has made up: JSON has values that no text and no number of ours can be."""
    try:
        send(message)
    except (OverflowError, UnicodeError, RecursionError, TypeError, ValueError) as error:
        raise InvalidRequestError(f"The request cannot be represented: {error}.") from None
