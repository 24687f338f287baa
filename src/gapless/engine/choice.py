"""Turns the events of a request into text and results, in the consumer's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gapless.engine.events import (
    FinishEvent,
    FinishReason,
    PromptLogprobsEvent,
    RequestEvent,
    TokenEvent,
    TopLogprobs,
)
from gapless.engine.request import Request
from gapless.sampling import CompletionOutput, Logprob, RequestMetrics, RequestOutput, StreamChunk
from gapless.sampling.outputs import LogprobsOfPosition
from gapless.tokenizer import Detokenizer, StopStringMatcher, Tokenizer

CancelChoice = Callable[[Request, int], None]


class ChoiceBuilder:
    """One choice: text without stop tokens and stop strings, token ids, log-probabilities."""

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer) -> None:
        params = request.params
        self.output = CompletionOutput(index)
        if params.logprobs is not None:
            self.output.logprobs = []
            self.output.cumulative_logprob = 0.0
        self._request = request
        self._tokenizer = tokenizer
        self._stop_token_ids = frozenset(request.stop_token_ids)
        # The prompt decides whether a space at the start of the text separates words or is the tokenizer's
        # own.
        self._detokenizer = Detokenizer(tokenizer, request.prompt_token_ids, params.skip_special_tokens)
        self._matcher = None
        if params.stop_strings:
            self._matcher = StopStringMatcher(params.stop_strings, params.include_stop_str_in_output)
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self._num_reported = 0  # tokens that chunks have shown
        self._text: list[str] = []  # what the next chunk shows
        self._reported_end = False

    @property
    def is_finished(self) -> bool:
        return self.output.finish_reason is not None

    def add_token(self, event: TokenEvent) -> None:
        """Takes a token; those after a stop string are dropped."""
        if self.is_finished:
            return
        output = self.output
        output.token_ids.append(event.token_id)
        self.last_token_s = event.time_s
        if self.first_token_s is None:
            self.first_token_s = event.time_s
        if output.logprobs is not None and event.logprob is not None:
            output.logprobs.append(
                logprobs_of_position(self._tokenizer, event.token_id, event.logprob, event.rank, event.top)
            )
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + event.logprob
        # Embeddings may have more rows than the tokenizer has tokens; such a token stands for no text.
        if event.token_id not in self._stop_token_ids and event.token_id < self._tokenizer.vocab_size:
            self._add_text(self._detokenizer.push(event.token_id))

    def finish(self, event: FinishEvent) -> None:
        """Takes the end, unless a stop string came first. Text that was held back comes out now."""
        if self.is_finished:
            return
        self._add_text(self._detokenizer.finish())
        if self.is_finished:  # by a stop string in what had been held back
            return
        if self._matcher is not None:
            self._emit(self._matcher.finish())
        self.output.finish_reason = event.reason.value
        if event.reason is FinishReason.STOP and self.output.token_ids:
            last = self.output.token_ids[-1]
            if (
                last in (self._request.params.stop_token_ids or ())
                and last not in self._tokenizer.eos_token_ids
            ):
                self.output.stop_reason = last

    def take_chunk(self) -> StreamChunk | None:
        """What was added since the last call."""
        first, output = self._num_reported, self.output
        if first == len(output.token_ids) and not self._text and self.is_finished == self._reported_end:
            return None
        chunk = StreamChunk(
            output.index,
            "".join(self._text),
            tuple(output.token_ids[first:]),
            None if output.logprobs is None else tuple(output.logprobs[first:]),
            output.finish_reason,
            output.stop_reason,
        )
        self._num_reported = len(output.token_ids)
        self._text.clear()
        self._reported_end = self.is_finished
        return chunk

    def _add_text(self, text: str) -> None:
        if not text:
            return
        if self._matcher is None or len(self.output.token_ids) <= self._request.params.min_tokens:
            self._emit(text)
            return
        visible, matched = self._matcher.push(text)
        self._emit(visible)
        if matched is not None:
            self.output.finish_reason = FinishReason.STOP.value
            self.output.stop_reason = matched

    def _emit(self, text: str) -> None:
        if text:
            self.output.text += text
            self._text.append(text)


class OutputBuilder:
    """All choices of a request and its prompt's log-probabilities. `cancel` ends a choice."""

    def __init__(self, request: Request, tokenizer: Tokenizer, cancel: CancelChoice) -> None:
        self.request = request
        self._tokenizer = tokenizer
        self._cancel = cancel
        self._choices = [ChoiceBuilder(request, index, tokenizer) for index in range(request.params.n)]
        self.error: str | None = None
        prompt_logprobs: list[LogprobsOfPosition | None] | None = None
        if request.params.prompt_logprobs is not None:
            prompt_logprobs = [None] * len(request.prompt_token_ids)
        self._output = RequestOutput(
            request_id=request.id,
            prompt=request.prompt,
            prompt_token_ids=[int(token_id) for token_id in request.prompt_token_ids],
            prompt_logprobs=prompt_logprobs,
            outputs=[choice.output for choice in self._choices],
            finished=False,
            metrics=RequestMetrics(request.arrival_s, len(request.prompt_token_ids)),
        )

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended."""
        return all(choice.is_finished for choice in self._choices)

    def push(self, events: Iterable[RequestEvent]) -> list[StreamChunk]:
        """Takes events; what each touched choice gained."""
        touched: dict[int, ChoiceBuilder] = {}
        for event in events:
            if isinstance(event, PromptLogprobsEvent):
                self._add_prompt_logprobs(event)
                continue
            choice = touched[event.choice] = self._choices[event.choice]
            if isinstance(event, FinishEvent):
                if event.reason is FinishReason.ERROR:
                    self.error = event.message
                choice.finish(event)
            elif isinstance(event, TokenEvent) and not choice.is_finished:
                choice.add_token(event)
                if choice.is_finished:
                    self._cancel(self.request, event.choice)
        return [chunk for choice in touched.values() if (chunk := choice.take_chunk()) is not None]

    def _add_prompt_logprobs(self, event: PromptLogprobsEvent) -> None:
        assert self._output.prompt_logprobs is not None
        token_id = self._output.prompt_token_ids[event.position]
        self._output.prompt_logprobs[event.position] = logprobs_of_position(
            self._tokenizer, token_id, event.logprob, event.rank, event.top
        )

    @property
    def output(self) -> RequestOutput:
        """The result of what was pushed so far."""
        self._output.finished = self.is_finished
        self._update_metrics()
        return self._output

    def _update_metrics(self) -> None:
        metrics, request, choices = self._output.metrics, self.request, self._choices
        metrics.num_output_tokens = sum(len(choice.output.token_ids) for choice in choices)
        if request.admitted_s is not None:
            metrics.queue_s = request.admitted_s - request.arrival_s
            metrics.num_cached_tokens = request.num_cached_tokens
            metrics.num_preemptions = request.num_preemptions
        firsts = [choice.first_token_s for choice in choices if choice.first_token_s is not None]
        lasts = [choice.last_token_s for choice in choices if choice.last_token_s is not None]
        if firsts and lasts:
            metrics.ttft_s = min(firsts) - request.arrival_s
            metrics.e2e_s = max(lasts) - request.arrival_s
            longest = max(choices, key=lambda choice: len(choice.output.token_ids))
            gaps = len(longest.output.token_ids) - 1
            if gaps > 0 and longest.first_token_s is not None and longest.last_token_s is not None:
                metrics.tpot_s = (longest.last_token_s - longest.first_token_s) / gaps


def logprobs_of_position(
    tokenizer: Tokenizer, token_id: int, logprob: float, rank: int, top: TopLogprobs
) -> LogprobsOfPosition:
    """The chosen token first, then the most likely ones."""
    result = {token_id: Logprob(logprob, rank, _text_of(tokenizer, token_id))}
    for position, (other_id, other_logprob) in enumerate(top):
        if other_id not in result:
            result[other_id] = Logprob(other_logprob, position + 1, _text_of(tokenizer, other_id))
    return result


def _text_of(tokenizer: Tokenizer, token_id: int) -> str:
    if token_id >= tokenizer.vocab_size:
        return ""
    return tokenizer.token_to_piece(token_id).decode("utf-8", "replace")
