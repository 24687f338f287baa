"""The engine: admits requests from any thread, and one thread of its own that reads the executor's events."""

from __future__ import annotations

import itertools
import logging
import operator
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gapless.engine.constraints import Constraints
from gapless.engine.events import (
    EmbeddingEvent,
    FinishEvent,
    FinishReason,
    PromptLogprobsEvent,
    RequestEvent,
    TokenEvent,
)
from gapless.engine.executor import Executor
from gapless.engine.handle import RequestHandle
from gapless.engine.request import Request, Sequence, SequenceState, Sink
from gapless.engine.scheduler import Admission, Scheduler, SchedulerConfig
from gapless.engine.trace import Tracer
from gapless.errors import EngineError, InvalidRequestError
from gapless.sampling import Pooling, SamplingParams, check

if TYPE_CHECKING:
    from gapless.tokenizer import Tokenizer

logger = logging.getLogger("gapless.engine")

# How long the engine thread sleeps without events. Nothing waits for it: the end of the executor wakes it.
_IDLE_WAIT_S = 60.0


@dataclass(frozen=True)
class EngineLimits:
    """What the executor was built for.

    `pooling` is how the model wants texts embedded; None: in a way that Gapless lacks.
    """

    max_num_seqs: int
    max_model_len: int
    num_blocks: int
    vocab_size: int
    prefix_caching: bool = True
    pooling: Pooling | None = Pooling.LAST


SamplingFactory = Callable[..., Any]  # makes a `_native.Sampling`


class Engine:
    """Runs requests on an executor until `close`. Thread-safe.

    Every accepted request ends in exactly one terminal event for each of its choices. A `tracer` needs an
    executor that was made with `trace`.
    """

    def __init__(
        self,
        executor: Executor,
        tokenizer: Tokenizer,
        limits: EngineLimits,
        make_sampling: SamplingFactory,
        tracer: Tracer | None = None,
    ) -> None:
        self.limits = limits
        self.tokenizer = tokenizer
        self._executor = executor
        self._make_sampling = make_sampling
        self._tracer = tracer
        self._scheduler = Scheduler(
            SchedulerConfig(
                limits.max_num_seqs,
                limits.max_model_len,
                limits.num_blocks,
                executor.block_size,
                limits.prefix_caching,
            )
        )
        self._constraints = Constraints(executor, tokenizer, limits.vocab_size, self._fail)
        self._lock = threading.Lock()
        # Cancellations come from anywhere, the garbage collector in the midst of our own code included: they
        # are left here, and taken by whoever holds the lock.
        self._cancellations: deque[tuple[Request, int | None]] = deque()
        self._next_request = itertools.count(1)
        self._failure: str | None = None  # set once: why nothing more is accepted
        self._thread = threading.Thread(target=self._run, name="gapless-engine", daemon=True)
        self._thread.start()

    # --- requests ---

    def submit(
        self,
        token_ids: SequenceOf[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
    ) -> RequestHandle:
        """Takes a prompt in and returns at once. Of requests that wait, those with the lowest `priority`
        enter first, and may put out running ones with a higher.

        Raises InvalidRequestError or ContextLengthError for what can never run, EngineError after the end.
        """
        request = self.make_request(
            token_ids, params or SamplingParams(), request_id=request_id, priority=priority
        )
        handle = RequestHandle(request, self.tokenizer, self.cancel)
        self.start(request)
        return handle

    def make_request(
        self,
        token_ids: SequenceOf[int],
        params: SamplingParams,
        *,
        prompt: str | None = None,
        request_id: str | None = None,
        priority: int = 0,
        pooling: Pooling | None = None,
        normalize: bool = True,
    ) -> Request:
        """A request checked against the model and the engine's limits, to be `start`ed. `prompt`: its text,
        if any.

        An empty prompt becomes the model's token for the beginning of a text. With `pooling` the prompt is
        embedded instead of continued: the sink gets an `EmbeddingEvent`, then the end ("stop"). `normalize`
        makes the vector one of length 1. `limits.pooling` is the model's own choice.
        """
        arrival_s = time.perf_counter()
        token_ids = self._checked_prompt(token_ids)
        self._check_params(params)
        if pooling is not None:
            _check_embedding_params(params)
        stop_token_ids = dict.fromkeys(params.stop_token_ids or ())
        grammar = self._constraints.compile(params.structured_outputs)
        if not params.ignore_eos or grammar is not None:
            stop_token_ids |= dict.fromkeys(sorted(self.tokenizer.eos_token_ids))
        room = self.limits.max_model_len - len(token_ids)
        max_tokens = max(1, room if params.max_tokens is None else min(params.max_tokens, room))
        request = Request(
            id=request_id or f"req-{next(self._next_request)}",
            prompt_token_ids=token_ids,
            params=params,
            max_tokens=max_tokens if pooling is None else 0,
            stop_token_ids=tuple(stop_token_ids),
            prompt=prompt,
            priority=check.integer("priority", priority, -(2**31), 2**31 - 1),
            grammar=grammar,
            pooling=pooling,
            normalize=normalize,
            arrival_s=arrival_s,
        )
        self._scheduler.check(request)
        return request

    def start(self, request: Request, sink: Sink | None = None) -> None:
        """Accepts a request that `make_request` has made; its events go to `sink`."""
        if sink is not None:
            request.sink = sink
        with self._exclusive():
            if self._failure is not None:
                raise EngineError(self._failure)
            self._scheduler.add(request)
            self._schedule()

    def cancel(self, request: Request, index: int | None = None) -> None:
        """Ends choice `index` (None: all) with "abort", unless it has ended by the next step. Never
        blocks."""
        self._cancellations.append((request, index))
        self._take_cancellations()

    def stats(self) -> dict[str, Any]:
        """The executor's counters, and the scheduler's: sequences that run and wait, free blocks, and since
        the start prompt tokens, those of them found in the prefix cache, and preemptions."""
        with self._exclusive():
            scheduler = self._scheduler
            return {
                **self._executor.stats(),
                "num_running": len(scheduler.running),
                "num_waiting": scheduler.num_waiting,
                "num_blocks": scheduler.config.num_blocks,
                "num_free_blocks": scheduler.pool.num_free,
                "num_prompt_tokens": scheduler.num_prompt_tokens,
                "num_cached_tokens": scheduler.num_cached_tokens,
                "num_preemptions": scheduler.num_preemptions,
            }

    def flush_trace(self) -> None:
        """Hands the steps that have ended by now to the tracer, if there is one."""
        with self._exclusive():
            self._trace_steps()

    def close(self) -> None:
        """Ends all open requests with "abort" and the threads, and writes the trace. Idempotent."""
        with self._exclusive():
            first = self._failure is None
            if first:
                self._failure = "The engine was closed."
        self._constraints.close()
        if first:
            self._executor.close()
            self._end_all(FinishReason.ABORT, "")
        if self._thread is not threading.current_thread():
            self._thread.join()
        if first and self._tracer is not None:
            self.flush_trace()
            self._tracer.close()

    # --- checks ---

    def _checked_prompt(self, prompt: SequenceOf[int]) -> list[int]:
        vocab_size = self.limits.vocab_size
        try:
            token_ids = [_token_id(value) for value in prompt]
        except TypeError:
            raise InvalidRequestError(
                "A prompt is text or a list of token ids (integers).", param="prompt"
            ) from None
        for position, token_id in enumerate(token_ids):
            if not 0 <= token_id < vocab_size:
                raise InvalidRequestError(
                    f"Token {position} of the prompt is {token_id}, but the vocabulary has {vocab_size} "
                    f"tokens (0 to {vocab_size - 1}).",
                    param="prompt",
                )
        if not token_ids:
            if (bos := self.tokenizer.bos_token_id) is None:
                raise InvalidRequestError(
                    "The prompt is empty, and this model has no token for the beginning of a text.",
                    param="prompt",
                )
            token_ids = [bos]
        return token_ids

    def _check_params(self, params: SamplingParams) -> None:
        vocab_size = self.limits.vocab_size
        for name, ids in (("stop_token_ids", params.stop_token_ids), ("logit_bias", params.logit_bias)):
            for token_id in ids or ():
                if token_id >= vocab_size:
                    raise InvalidRequestError(
                        f"{name} names token {token_id}, but the vocabulary has {vocab_size} tokens.",
                        param=name,
                    )
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(params, name) or 0) > vocab_size:
                raise InvalidRequestError(
                    f"{name} is {getattr(params, name)}, but the vocabulary has {vocab_size} tokens.",
                    param=name,
                )

    # --- the lock ---

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        with self._lock:
            yield
        self._take_cancellations()

    def _take_cancellations(self) -> None:
        # Whoever fails to get the lock leaves its cancellation to the holder, who looks here after letting
        # go.
        while self._cancellations and self._lock.acquire(blocking=False):
            try:
                while self._cancellations:
                    self._cancel(*self._cancellations.popleft())
                if self._failure is None:
                    self._schedule()
            finally:
                self._lock.release()

    # --- under the lock ---

    def _cancel(self, request: Request, index: int | None) -> None:
        for sequence in request.sequences if index is None else request.sequences[index : index + 1]:
            if sequence.state is SequenceState.FINISHED:
                continue
            if not sequence.is_running:
                self._end(sequence, FinishReason.ABORT)
            elif not sequence.is_cancelled and self._failure is None:
                self._stop(sequence)

    def _stop(self, sequence: Sequence) -> None:
        """Ends a running sequence at the next step; its consumer gets no token any more."""
        assert sequence.slot is not None
        sequence.is_cancelled = True
        self._scheduler.leave(sequence)
        self._executor.cancel(sequence.slot, sequence.id)

    def _schedule(self) -> None:
        """Tells the executor what the scheduler decides."""
        while True:
            decisions = self._scheduler.schedule()
            for sequence, blocks in decisions.extensions:
                assert sequence.slot is not None
                self._executor.extend(sequence.slot, sequence.id, _int32(blocks))
            refused = [admission for admission in decisions.admissions if not self._admit(admission)]
            for sequence in decisions.preemptions:
                assert sequence.slot is not None
                self._executor.preempt(sequence.slot, sequence.id)
            if not refused:
                return

    def _admit(self, admission: Admission) -> bool:
        sequence, request = admission.sequence, admission.sequence.request
        assert sequence.slot is not None
        now_s = time.perf_counter()
        if request.admitted_s is None:
            request.admitted_s = now_s
        if self._tracer is not None:
            num_tokens, num_cached = sequence.num_tokens, admission.num_cached
            self._tracer.admitted(sequence.id, sequence.slot, request.id, num_tokens, num_cached, now_s)
        try:
            self._executor.admit(
                sequence.slot,
                sequence.id,
                _int32(sequence.tokens),
                _int32(sequence.blocks),
                self._native_sampling(sequence),
                admission.num_cached,
                len(request.prompt_token_ids),
                request.priority,
            )
        except Exception as error:  # the executor refuses: this request's fault, not the others'
            logger.exception("Request %s was refused", request.id)
            self._end(sequence, FinishReason.ERROR, f"The executor refused the request: {error}")
            return False
        self._constraints.admit(sequence)
        return True

    def _native_sampling(self, sequence: Sequence) -> Any:
        request, params = sequence.request, sequence.request.params
        # The prompt's log-probabilities are the same for all choices, and have been told before the first
        # token.
        wants_prompt_logprobs = sequence.index == 0 and sequence.num_output == 0
        return self._make_sampling(
            max_tokens=request.max_tokens,
            temperature=params.temperature,
            top_k=min(params.top_k, self.limits.vocab_size),  # more are all of them
            top_p=params.top_p,
            min_p=params.min_p,
            repetition_penalty=params.repetition_penalty,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            seed=sequence.seed,
            stop_token_ids=list(request.stop_token_ids),
            min_tokens=min(params.min_tokens, request.max_tokens),
            num_logprobs=-1 if params.logprobs is None else params.logprobs,
            num_prompt_logprobs=params.prompt_logprobs
            if wants_prompt_logprobs and params.prompt_logprobs is not None
            else -1,
            logit_bias=None if params.logit_bias is None else dict(params.logit_bias),
            constrained=request.grammar is not None,
            pooling="none" if request.pooling is None else request.pooling.value,
            normalize=request.normalize,
        )

    def _end(self, sequence: Sequence, reason: FinishReason, message: str = "") -> None:
        self._scheduler.finish(sequence)
        self._constraints.drop(sequence)
        now_s = time.perf_counter()
        self._trace_end(sequence, reason.value, now_s)
        self._deliver(sequence.request, [FinishEvent(sequence.index, reason, now_s, message)])

    def _deliver(self, request: Request, events: list[RequestEvent]) -> None:
        try:
            request.sink(request, events)
        except Exception:  # a consumer's fault must not stop the engine
            logger.exception("The consumer of request %s failed", request.id)

    def _end_all(self, reason: FinishReason, message: str) -> None:
        with self._exclusive():
            for sequence in self._scheduler.open_sequences():
                self._end(sequence, reason, message)

    def _trace_end(self, sequence: Sequence, reason: str, now_s: float) -> None:
        if self._tracer is not None:
            self._tracer.ended(sequence.id, sequence.request.id, reason, now_s)

    def _trace_steps(self) -> None:
        if self._tracer is not None:
            self._tracer.add_steps(self._executor.take_trace())
            scheduler = self._scheduler
            num_used = scheduler.config.num_blocks - scheduler.pool.num_free
            num_running, num_waiting = len(scheduler.running), scheduler.num_waiting
            self._tracer.counted(num_running, num_waiting, num_used, time.perf_counter())

    # --- the masks' thread ---

    def _fail(self, sequence_id: int, message: str) -> None:
        """Ends a sequence that cannot go on under its grammar with "error"."""
        with self._exclusive():
            if self._failure is not None:
                return
            for sequence in self._scheduler.open_sequences():
                if sequence.id != sequence_id or sequence.is_cancelled:
                    continue
                if sequence.is_running:
                    sequence.failure = message
                    self._stop(sequence)
                else:
                    self._end(sequence, FinishReason.ERROR, message)
            self._schedule()

    # --- the engine thread ---

    def _run(self) -> None:
        message = "The engine failed"
        try:
            while self._failure is None:
                events = self._executor.wait(_IDLE_WAIT_S)
                if events and (failed := self._take(events)) is not None:
                    message = f"The executor failed: {failed}"
                    break
            else:
                return  # closed
        except Exception as error:
            logger.exception("The engine thread failed")
            message = f"The engine failed: {error!r}"
        with self._exclusive():
            self._failure = self._failure or message
        self._end_all(FinishReason.ERROR, message)

    def _take(self, events: SequenceOf[tuple[Any, ...]]) -> str | None:
        """Hands out one batch of the executor's events; the executor's last words if it has died."""
        now_s = time.perf_counter()
        deliveries: dict[Request, list[RequestEvent]] = {}
        constrained: list[tuple[Sequence, int]] = []
        failed = None
        with self._exclusive():
            running = self._scheduler.running
            for event in events:
                if event[0] == "failed":
                    failed = str(event[1])
                    continue
                sequence = running.get(event[1])
                if sequence is None:
                    continue  # ended on this side already
                batch = deliveries.get(sequence.request)
                if batch is None:
                    batch = deliveries[sequence.request] = []
                self._take_one(event, sequence, batch, now_s)
                if sequence.request.grammar is not None and event[0] == "token":
                    constrained.append((sequence, event[2]))
            self._constraints.accept(constrained)  # first of all: the step that needs the masks is running
            for request, batch in deliveries.items():
                if batch:
                    self._deliver(request, batch)
            if failed is None and self._failure is None:
                self._schedule()
            self._trace_steps()
        return failed

    def _take_one(
        self, event: tuple[Any, ...], sequence: Sequence, batch: list[RequestEvent], now_s: float
    ) -> None:
        kind = event[0]
        if kind == "token":
            _, _, token_id, logprob, rank, top = event
            self._scheduler.token(sequence, token_id)
            if self._tracer is not None:
                self._tracer.token(sequence.id, now_s)
            if not sequence.is_cancelled:
                batch.append(TokenEvent(sequence.index, token_id, logprob, rank, top, now_s))
        elif kind == "embedding":
            if not sequence.is_cancelled:
                batch.append(EmbeddingEvent(sequence.index, event[2]))
        elif kind == "finished":
            self._take_end(sequence, event[2], event[3], batch, now_s)
        elif kind == "prefilled":
            self._scheduler.prefilled(sequence, event[2])
        elif kind == "prompt_logprobs":
            batch.append(PromptLogprobsEvent(*event[2:]))
        elif kind == "blocks_low":
            self._scheduler.needs_blocks(sequence)
        else:
            raise EngineError(f"unknown executor event {kind!r}")

    def _take_end(
        self, sequence: Sequence, reason: str, num_computed: int, batch: list[RequestEvent], now_s: float
    ) -> None:
        if reason == "preempted" and not sequence.is_cancelled:
            self._trace_end(sequence, reason, now_s)
            self._scheduler.preempted(sequence, num_computed)
            return
        self._scheduler.finish(sequence, num_computed)
        self._constraints.drop(sequence)
        # Whatever came first in the loop, a cancelled sequence has been seen to end by its consumer.
        finish_reason = FinishReason.ABORT if sequence.is_cancelled else FinishReason(reason)
        message = ""
        if sequence.failure is not None:
            finish_reason, message = FinishReason.ERROR, sequence.failure
        elif finish_reason is FinishReason.ERROR:
            message = "The executor could not go on with this request."
        self._trace_end(sequence, finish_reason.value, now_s)
        batch.append(FinishEvent(sequence.index, finish_reason, now_s, message))


def _check_embedding_params(params: SamplingParams) -> None:
    """Refuses what an embedding cannot give."""
    if params.n != 1:
        check.refuse("n", params.n, "1 for an embedding")
    for name in ("logprobs", "prompt_logprobs", "structured_outputs"):
        if getattr(params, name) is not None:
            check.refuse(name, getattr(params, name), "absent for an embedding")


def _token_id(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _int32(values: SequenceOf[int]) -> Any:
    import numpy as np

    return np.asarray(values, dtype=np.int32)
