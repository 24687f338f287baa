"""Turns the events of a request into text and results, in the consumer's thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

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


class NewToken(Protocol):
    """A `TokenEvent`, or a message that says the same."""

    @property
    def choice(self) -> int: ...
    @property
    def token_id(self) -> int: ...
    @property
    def logprob(self) -> float | None: ...
    @property
    def rank(self) -> int: ...
    @property
    def top(self) -> TopLogprobs: ...
    @property
    def time_s(self) -> float: ...


class ChoiceBuilder:
    """One choice: text without stop tokens and stop strings, token ids, log-probabilities."""

    def __init__(self, request: Request, index: int, tokenizer: Tokenizer) -> None:
        params = request.params
        self._output = CompletionOutput(index)
        if params.logprobs is not None:
            self._output.logprobs = []
            self._output.cumulative_logprob = 0.0
        self.is_finished = False
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None
        self._request = request
        self._tokenizer = tokenizer
        self._vocab_size = tokenizer.vocab_size
        self._stop_token_ids = frozenset(request.stop_token_ids)
        # The prompt decides whether a space at the start of the text separates words or is the tokenizer's
        # own.
        self._detokenizer = Detokenizer(tokenizer, request.prompt_token_ids, params.skip_special_tokens)
        self._matcher = None
        if params.stop_strings:
            self._matcher = StopStringMatcher(params.stop_strings, params.include_stop_str_in_output)
        self._text: list[str] = []
        # What chunks have shown: tokens, pieces of text, and the end.
        self._num_shown_tokens = 0
        self._num_shown_texts = 0
        self._has_shown_end = False

    @property
    def num_tokens(self) -> int:
        return len(self._output.token_ids)

    @property
    def output(self) -> CompletionOutput:
        """The result so far."""
        self._output.text = "".join(self._text)
        return self._output

    def add_token(self, token: NewToken) -> None:
        """Takes a token; those after a stop string are dropped."""
        if self.is_finished:
            return
        output, token_id = self._output, token.token_id
        output.token_ids.append(token_id)
        self.last_token_s = token.time_s
        if self.first_token_s is None:
            self.first_token_s = token.time_s
        if output.logprobs is not None and token.logprob is not None:
            output.logprobs.append(
                logprobs_of_position(self._tokenizer, token_id, token.logprob, token.rank, token.top)
            )
            output.cumulative_logprob = (output.cumulative_logprob or 0.0) + token.logprob
        # Embeddings may have more rows than the tokenizer has tokens; such a token stands for no text.
        if token_id not in self._stop_token_ids and token_id < self._vocab_size:
            self._add_text(self._detokenizer.push(token_id))

    def finish(self, event: FinishEvent) -> None:
        """Takes the end, unless a stop string came first. Text that was held back comes out now."""
        if self.is_finished:
            return
        self._add_text(self._detokenizer.finish())
        if self.is_finished:  # by a stop string in what had been held back
            return
        if self._matcher is not None:
            self._show(self._matcher.finish())
        self._end(event.reason)
        if event.reason is FinishReason.STOP and self._output.token_ids:
            last = self._output.token_ids[-1]
            if (
                last in (self._request.params.stop_token_ids or ())
                and last not in self._tokenizer.eos_token_ids
            ):
                self._output.stop_reason = last

    def take_chunk(self) -> StreamChunk | None:
        """What was added since the last call."""
        output, first = self._output, self._num_shown_tokens
        num_tokens, num_texts = len(output.token_ids), len(self._text)
        if (
            first == num_tokens
            and self._num_shown_texts == num_texts
            and self.is_finished == self._has_shown_end
        ):
            return None
        chunk = StreamChunk(
            output.index,
            "".join(self._text[self._num_shown_texts :]),
            tuple(output.token_ids[first:]),
            None if output.logprobs is None else tuple(output.logprobs[first:]),
            output.finish_reason,
            output.stop_reason,
        )
        self._num_shown_tokens, self._num_shown_texts = num_tokens, num_texts
        self._has_shown_end = self.is_finished
        return chunk

    def take_text(self) -> str | None:
        """The same, if it is one token's text and nothing else; None if there is more to tell, or nothing."""
        num_tokens, num_texts = self._num_shown_tokens + 1, self._num_shown_texts + 1
        is_plain = len(self._output.token_ids) == num_tokens and len(self._text) == num_texts
        if not is_plain or self.is_finished or self._output.logprobs is not None:
            return None
        self._num_shown_tokens, self._num_shown_texts = num_tokens, num_texts
        return self._text[-1]

    def _add_text(self, text: str) -> None:
        if not text:
            return
        if self._matcher is None or self.num_tokens <= self._request.params.min_tokens:
            self._text.append(text)
            return
        visible, matched = self._matcher.push(text)
        self._show(visible)
        if matched is not None:
            self._end(FinishReason.STOP)
            self._output.stop_reason = matched

    def _show(self, text: str) -> None:
        if text:
            self._text.append(text)

    def _end(self, reason: FinishReason) -> None:
        self.is_finished = True
        self._output.finish_reason = reason.value


class OutputBuilder:
    """All choices of a request and its prompt's log-probabilities. `cancel` ends a choice."""

    def __init__(self, request: Request, tokenizer: Tokenizer, cancel: CancelChoice) -> None:
        self.request = request
        self._tokenizer = tokenizer
        self._cancel = cancel
        self._choices = [ChoiceBuilder(request, index, tokenizer) for index in range(request.params.n)]
        self._touched: dict[int, ChoiceBuilder] = {}
        self._num_open = len(self._choices)
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
        return self._num_open == 0

    def push(self, events: Iterable[RequestEvent]) -> list[StreamChunk]:
        """Takes events; what each touched choice gained."""
        for event in events:
            if isinstance(event, TokenEvent):
                self.add_token(event)
            elif isinstance(event, FinishEvent):
                self.finish(event)
            elif isinstance(event, PromptLogprobsEvent):
                self.add_prompt_logprobs(event)
        return self.take_chunks()

    def add_token(self, token: NewToken) -> None:
        """Takes a token of one choice, which is cancelled if that completes a stop string."""
        choice = self._choices[token.choice]
        if choice.is_finished:
            return
        self._touched[token.choice] = choice
        choice.add_token(token)
        if choice.is_finished:
            self._num_open -= 1
            self._cancel(self.request, token.choice)

    def finish(self, event: FinishEvent) -> None:
        """Takes the end of one choice."""
        choice = self._touched[event.choice] = self._choices[event.choice]
        if event.reason is FinishReason.ERROR:
            self.error = event.message
        if not choice.is_finished:
            choice.finish(event)
            self._num_open -= 1

    def take_chunks(self) -> list[StreamChunk]:
        """What each choice gained since the last call, if anything."""
        touched, self._touched = self._touched, {}
        return [chunk for choice in touched.values() if (chunk := choice.take_chunk()) is not None]

    def take_text(self) -> str | None:
        """The same, if it is text that one token has added to the only choice; None for anything else."""
        if len(self._choices) > 1 or self._output.prompt_logprobs is not None:
            return None
        return self._choices[0].take_text()

    def add_prompt_logprobs(self, event: PromptLogprobsEvent) -> None:
        """Takes the log-probability of a token of the prompt."""
        assert self._output.prompt_logprobs is not None
        token_id = self._output.prompt_token_ids[event.position]
        self._output.prompt_logprobs[event.position] = logprobs_of_position(
            self._tokenizer, token_id, event.logprob, event.rank, event.top
        )

    @property
    def output(self) -> RequestOutput:
        """The result of what was pushed so far."""
        self._output.finished = self.is_finished
        self._output.outputs = [choice.output for choice in self._choices]
        self._update_metrics()
        return self._output

    def _update_metrics(self) -> None:
        metrics, request, choices = self._output.metrics, self.request, self._choices
        metrics.num_output_tokens = sum(choice.num_tokens for choice in choices)
        if request.admitted_s is not None:
            metrics.queue_s = request.admitted_s - request.arrival_s
            metrics.num_cached_tokens = request.num_cached_tokens
            metrics.num_preemptions = request.num_preemptions
        firsts = [choice.first_token_s for choice in choices if choice.first_token_s is not None]
        lasts = [choice.last_token_s for choice in choices if choice.last_token_s is not None]
        if firsts and lasts:
            metrics.ttft_s = min(firsts) - request.arrival_s
            metrics.e2e_s = max(lasts) - request.arrival_s
            longest = max(choices, key=lambda choice: choice.num_tokens)
            gaps = longest.num_tokens - 1
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
