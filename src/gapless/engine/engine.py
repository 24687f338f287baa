"""The engine: admits requests from any thread, and one thread of its own that reads the executor's events."""

from __future__ import annotations

import itertools
import logging
import operator
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gapless.engine.events import FinishEvent, FinishReason, PromptLogprobsEvent, RequestEvent, TokenEvent
from gapless.engine.executor import Executor
from gapless.engine.handle import RequestHandle
from gapless.engine.request import Request, Sequence, SequenceState, Sink
from gapless.engine.scheduler import Scheduler, SchedulerConfig
from gapless.errors import EngineError, InvalidRequestError
from gapless.sampling import SamplingParams

if TYPE_CHECKING:
    from gapless.tokenizer import Tokenizer

logger = logging.getLogger("gapless.engine")

# How long the engine thread sleeps without events: only the end of the engine waits for it.
_IDLE_WAIT_S = 0.2


@dataclass(frozen=True)
class EngineLimits:
    """What the executor was built for."""

    max_num_seqs: int
    max_model_len: int
    num_blocks: int
    vocab_size: int


SamplingFactory = Callable[..., Any]  # makes a `_native.Sampling`


class Engine:
    """Runs requests on an executor until `close`. Thread-safe.

    Every accepted request ends in exactly one terminal event for each of its choices.
    """

    def __init__(
        self, executor: Executor, tokenizer: Tokenizer, limits: EngineLimits, make_sampling: SamplingFactory
    ) -> None:
        self.limits = limits
        self.tokenizer = tokenizer
        self._executor = executor
        self._make_sampling = make_sampling
        self._scheduler = Scheduler(
            SchedulerConfig(limits.max_num_seqs, limits.max_model_len, limits.num_blocks, executor.block_size)
        )
        self._lock = threading.RLock()
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
    ) -> RequestHandle:
        """Takes a prompt in and returns at once.

        Raises InvalidRequestError or ContextLengthError for what can never run, EngineError after the end.
        """
        request = self.make_request(token_ids, params or SamplingParams(), request_id=request_id)
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
    ) -> Request:
        """A request checked against the model and the engine's limits, to be `start`ed. `prompt`: its text,
        if any.

        An empty prompt becomes the model's token for the beginning of a text.
        """
        arrival_s = time.perf_counter()
        token_ids = self._checked_prompt(token_ids)
        self._check_params(params)
        stop_token_ids = dict.fromkeys(params.stop_token_ids or ())
        if not params.ignore_eos:
            stop_token_ids |= dict.fromkeys(sorted(self.tokenizer.eos_token_ids))
        room = self.limits.max_model_len - len(token_ids)
        request = Request(
            id=request_id or f"req-{next(self._next_request)}",
            prompt_token_ids=token_ids,
            params=params,
            max_tokens=max(1, room if params.max_tokens is None else min(params.max_tokens, room)),
            stop_token_ids=tuple(stop_token_ids),
            prompt=prompt,
            arrival_s=arrival_s,
        )
        self._scheduler.check(request)
        return request

    def start(self, request: Request, sink: Sink | None = None) -> None:
        """Accepts a request that `make_request` has made; its events go to `sink`."""
        if sink is not None:
            request.sink = sink
        with self._lock:
            if self._failure is not None:
                raise EngineError(self._failure)
            self._scheduler.add(request)
            self._admit()

    def cancel(self, request: Request, index: int | None = None) -> None:
        """Ends choice `index` (None: all) with "abort", unless it has ended by the next step."""
        with self._lock:
            for sequence in request.sequences if index is None else [request.sequences[index]]:
                if sequence.state is SequenceState.WAITING:
                    self._end(sequence, FinishReason.ABORT)
                elif sequence.state is SequenceState.RUNNING and sequence.slot is not None:
                    self._executor.cancel(sequence.slot, sequence.id)
            self._admit()

    def stats(self) -> dict[str, float]:
        """The executor's counters, and how many sequences run and wait."""
        with self._lock:
            scheduler = self._scheduler
            return {
                **self._executor.stats(),
                "num_running": len(scheduler.running),
                "num_waiting": len(scheduler.waiting),
                "num_free_blocks": scheduler.pool.num_free,
            }

    def close(self) -> None:
        """Ends all open requests with "abort" and the threads. Idempotent."""
        with self._lock:
            first = self._failure is None
            if first:
                self._failure = "The engine was closed."
        if first:
            self._executor.close()
            self._end_all(FinishReason.ABORT, "")
        if self._thread is not threading.current_thread():
            self._thread.join()

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

    # --- under the lock ---

    def _admit(self) -> None:
        """Sends every sequence that can enter to the executor."""
        for sequence in self._scheduler.admit():
            request = sequence.request
            if request.admitted_s is None:
                request.admitted_s = time.perf_counter()
            try:
                self._executor.admit(
                    sequence.slot,  # type: ignore[arg-type]  # a running sequence has a slot
                    sequence.id,
                    _int32(request.prompt_token_ids),
                    _int32(sequence.blocks),
                    self._native_sampling(sequence),
                )
            except Exception as error:  # the executor refuses: this request's fault, not the others'
                logger.exception("Request %s was refused", request.id)
                self._end(sequence, FinishReason.ERROR, f"The executor refused the request: {error}")

    def _native_sampling(self, sequence: Sequence) -> Any:
        request, params = sequence.request, sequence.request.params
        first = sequence.index == 0  # the prompt's log-probabilities are the same for all choices
        return self._make_sampling(
            max_tokens=request.max_tokens,
            temperature=params.temperature,
            top_k=params.top_k,
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
            if first and params.prompt_logprobs is not None
            else -1,
            logit_bias=None if params.logit_bias is None else dict(params.logit_bias),
        )

    def _end(self, sequence: Sequence, reason: FinishReason, message: str = "") -> None:
        self._scheduler.finish(sequence)
        event = FinishEvent(sequence.index, reason, time.perf_counter(), message)
        self._deliver(sequence.request, [event])

    def _deliver(self, request: Request, events: list[RequestEvent]) -> None:
        try:
            request.sink(request, events)
        except Exception:  # a consumer's fault must not stop the engine
            logger.exception("The consumer of request %s failed", request.id)

    def _end_all(self, reason: FinishReason, message: str) -> None:
        with self._lock:
            for sequence in [*self._scheduler.running.values(), *self._scheduler.waiting]:
                self._end(sequence, reason, message)

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
        with self._lock:
            self._failure = self._failure or message
        self._end_all(FinishReason.ERROR, message)

    def _take(self, events: SequenceOf[tuple[Any, ...]]) -> str | None:
        """Hands out one batch of the executor's events; the executor's last words if it has died."""
        now_s = time.perf_counter()
        deliveries: dict[Request, list[RequestEvent]] = {}
        failed = None
        with self._lock:
            running = self._scheduler.running
            for kind, *fields in events:
                if kind == "failed":
                    failed = str(fields[0])
                    continue
                sequence = running.get(fields[0])
                if sequence is None:
                    continue  # ended on this side already
                self._take_one(kind, fields, sequence, deliveries.setdefault(sequence.request, []), now_s)
            for request, batch in deliveries.items():
                if batch:
                    self._deliver(request, batch)
            if failed is None:
                self._admit()
        return failed

    def _take_one(
        self, kind: str, fields: list[Any], sequence: Sequence, batch: list[RequestEvent], now_s: float
    ) -> None:
        if kind == "token":
            _, token_id, logprob, rank, top = fields
            batch.append(TokenEvent(sequence.index, token_id, logprob, rank, top, now_s))
            sequence.num_tokens += 1
            if self._scheduler.wants_blocks(sequence):
                self._extend(sequence)
        elif kind == "finished":
            self._scheduler.finish(sequence)
            reason = FinishReason(fields[1])
            message = (
                "The executor could not go on with this request." if reason is FinishReason.ERROR else ""
            )
            batch.append(FinishEvent(sequence.index, reason, now_s, message))
        elif kind == "prompt_logprobs":
            batch.append(PromptLogprobsEvent(*fields[1:]))
        elif kind == "blocks_low":
            self._extend(sequence, at_least=fields[1])
        else:
            raise EngineError(f"unknown executor event {kind!r}")

    def _extend(self, sequence: Sequence, at_least: int = 0) -> None:
        if blocks := self._scheduler.extend(sequence, at_least):
            assert sequence.slot is not None
            self._executor.extend(sequence.slot, sequence.id, _int32(blocks))


def _token_id(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)


def _int32(values: SequenceOf[int]) -> Any:
    import numpy as np

    return np.asarray(values, dtype=np.int32)
