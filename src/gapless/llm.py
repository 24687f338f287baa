"""The library's entry: a model that answers prompts, alone or in batches."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from gapless.config import EngineConfig
from gapless.engine.choice import OutputBuilder
from gapless.engine.embedding import EmbeddingBuilder
from gapless.engine.events import RequestEvent
from gapless.engine.handle import RequestHandle
from gapless.engine.mailbox import Mailbox
from gapless.engine.request import Request
from gapless.errors import EngineError, InvalidRequestError
from gapless.progress import counting
from gapless.runtime import LoadProgress, Runtime, start
from gapless.sampling import EmbeddingRequestOutput, Pooling, RequestOutput, SamplingParams, check

if TYPE_CHECKING:
    from gapless.tokenizer import Tokenizer

Prompt: TypeAlias = "str | Sequence[int] | Mapping[str, Any]"
Messages: TypeAlias = "Sequence[Mapping[str, Any]]"
_Builder: TypeAlias = "OutputBuilder | EmbeddingBuilder"


class LLM:
    """A loaded model.

    >>> with LLM("smollm2-135m") as llm:
    ...     llm.chat([{"role": "user", "content": "Hello!"}])[0].outputs[0].text

    `model` and the options are those of `EngineConfig`; `progress(bytes_done, bytes_total)` follows the
    loading. LoadError if the model is missing or cannot be run.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        quant: str | None = None,
        activations: str = "a8",
        num_threads: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        kv_dtype: str = "f16",
        kv_cache_gib: float | None = None,
        max_step_tokens: int = 512,
        prefix_caching: bool = True,
        target_tpot_ms: float | None = None,
        progress: LoadProgress | None = None,
    ) -> None:
        config = EngineConfig(
            model=os.fspath(model),
            quant=quant,
            activations=activations,
            num_threads=num_threads,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            kv_dtype=kv_dtype,
            kv_cache_gib=kv_cache_gib,
            max_step_tokens=max_step_tokens,
            prefix_caching=prefix_caching,
            target_tpot_ms=target_tpot_ms,
        )
        self._attach(start(config, progress))

    @classmethod
    def from_runtime(cls, runtime: Runtime) -> LLM:
        """An LLM over a model that already runs; `close` ends it."""
        llm = cls.__new__(cls)
        llm._attach(runtime)
        return llm

    def _attach(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.engine = runtime.engine
        self._finalizer = weakref.finalize(self, runtime.close)  # also when the interpreter ends

    @property
    def tokenizer(self) -> Tokenizer:
        return self.runtime.tokenizer

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together."""
        return self.engine.limits.max_model_len

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool | None = None,
        priority: Sequence[int] | int = 0,
    ) -> list[RequestOutput]:
        """Completes one prompt or many at once; results in the order of the prompts.

        A prompt is text, a list of token ids, or a mapping with `prompt` or `prompt_token_ids`. Control
        tokens written in the text are recognised: use `chat` for text that you do not trust.
        `sampling_params`: one for all (default: `SamplingParams()`, 16 tokens) or one for each. `use_tqdm`
        shows a progress bar (None: with more than one prompt on a terminal). Prompts with a lower `priority`
        run first. If a prompt or a parameter is wrong, nothing runs at all: InvalidRequestError or
        ContextLengthError. EngineError if the engine fails.
        """
        batch = _as_batch(prompts)
        params = _params_of_each(sampling_params, len(batch))
        priorities = _priority_of_each(priority, len(batch))
        requests = [
            self._request(prompt, one, priority=its_priority)
            for prompt, one, its_priority in zip(batch, params, priorities, strict=True)
        ]
        return self._generate(requests, use_tqdm)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        use_tqdm: bool | None = None,
        **template_variables: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation, or many at once, through the model's chat template.

        Text of messages is never read as control tokens. `template_variables` are handed to the template.
        TemplateError if there is none or it refuses the messages; else as `generate`.
        """
        conversations = _as_conversations(messages)
        params = _params_of_each(sampling_params, len(conversations))
        requests = [
            self._chat_request(conversation, one, tools, add_generation_prompt, template_variables)
            for conversation, one in zip(conversations, params, strict=True)
        ]
        return self._generate(requests, use_tqdm)

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling: Pooling | str | None = None,
        normalize: bool = True,
        use_tqdm: bool | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """One prompt or many as vectors; results in the order of the prompts.

        `outputs.embedding` is a float32 array [hidden_size]: the final state of the last token, the mean of
        all tokens' or the first token's, by `pooling` "last", "mean" or "cls" (None: what the model's files
        say, else "last"). It is a vector of length 1 unless `normalize` is False. Prompts have the forms that
        `generate` takes; control tokens written in a text are text, and each may fill the context. If one is
        wrong, nothing runs at all: InvalidRequestError or ContextLengthError. EngineError if the engine fails
        or is closed meanwhile.
        """
        kind = self._pooling(pooling)
        check.boolean("normalize", normalize)
        requests = [
            self._request(prompt, SamplingParams(), pooling=kind, normalize=normalize)
            for prompt in _as_batch(prompts)
        ]
        builders = [EmbeddingBuilder(request) for request in requests]
        self._run(builders, use_tqdm)
        return [builder.output for builder in builders if builder.output is not None]

    def stream(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        **template_variables: Any,
    ) -> Iterator[str]:
        """Pieces of the text as they come, for a prompt or for the messages of a conversation.

        Leaving the loop early ends the request. Of several choices only the first is shown.
        """
        handle = self.submit(prompt, sampling_params, **template_variables)
        return _pieces(handle)

    def submit(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        **template_variables: Any,
    ) -> RequestHandle:
        """Starts a prompt or a conversation and returns at once; see `RequestHandle` and `Engine.submit`."""
        params = sampling_params or SamplingParams()
        if _is_conversation(prompt):
            token_ids = self.tokenizer.encode_chat(cast(Messages, prompt), None, True, **template_variables)
            request = self.engine.make_request(token_ids, params, request_id=request_id, priority=priority)
        else:
            request = self._request(cast(Prompt, prompt), params, priority=priority, request_id=request_id)
        handle = RequestHandle(request, self.tokenizer, self.engine.cancel)
        self.engine.start(request)
        return handle

    def close(self) -> None:
        """Ends all requests and frees the model. Idempotent."""
        self._finalizer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _pooling(self, wish: Pooling | str | None) -> Pooling:
        if wish is not None:
            return Pooling.of(wish)
        if (own := self.engine.limits.pooling) is None:
            raise InvalidRequestError(
                "The model's files ask for a pooling that Gapless does not have: choose one by `pooling`.",
                param="pooling",
            )
        return own

    def _request(self, prompt: Prompt, params: SamplingParams, **options: Any) -> Request:
        """`options` are those of `Engine.make_request`."""
        if isinstance(prompt, Mapping):
            if len(keys := {"prompt", "prompt_token_ids"} & set(prompt)) != 1:
                raise InvalidRequestError(
                    "A prompt mapping has either `prompt` or `prompt_token_ids`.", param="prompt"
                )
            prompt = cast("str | Sequence[int]", prompt[keys.pop()])
        if not isinstance(prompt, str):
            return self.engine.make_request(prompt, params, **options)
        if options.get("pooling") is not None:
            token_ids = self.tokenizer.encode_whole(prompt)
        else:
            token_ids = self.tokenizer.encode(prompt, add_special_tokens=True, parse_special=True)
        return self.engine.make_request(token_ids, params, prompt=prompt, **options)

    def _chat_request(
        self,
        messages: Messages,
        params: SamplingParams,
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        template_variables: Mapping[str, Any],
    ) -> Request:
        token_ids = self.tokenizer.encode_chat(messages, tools, add_generation_prompt, **template_variables)
        return self.engine.make_request(token_ids, params)

    def _generate(self, requests: Sequence[Request], use_tqdm: bool | None) -> list[RequestOutput]:
        builders = [OutputBuilder(request, self.tokenizer, self.engine.cancel) for request in requests]
        self._run(builders, use_tqdm)
        return [builder.output for builder in builders]

    def _run(self, builders: Sequence[_Builder], use_tqdm: bool | None) -> None:
        """Runs checked requests to their ends. They are all cancelled if the caller is interrupted."""
        mailbox: Mailbox[tuple[Request, list[RequestEvent]]] = Mailbox()
        pending = {builder.request: builder for builder in builders}
        try:
            with counting("Prompts", len(builders), use_tqdm) as advance:
                for builder in builders:
                    self.engine.start(builder.request, lambda request, events: mailbox.put((request, events)))
                while pending:
                    self._take(*mailbox.get(), pending, advance)
        finally:
            for request in pending:
                self.engine.cancel(request)

    def _take(
        self,
        request: Request,
        events: list[RequestEvent],
        pending: dict[Request, _Builder],
        advance: Callable[[], None],
    ) -> None:
        if (builder := pending.get(request)) is None:
            return
        builder.push(events)
        if builder.error is not None:
            raise EngineError(builder.error)
        if builder.is_finished:
            del pending[request]
            advance()


def _pieces(handle: RequestHandle) -> Iterator[str]:
    try:
        for chunk in handle:
            if chunk.index == 0 and chunk.text:
                yield chunk.text
    finally:
        handle.cancel()


def _is_conversation(prompt: Any) -> bool:
    return (
        isinstance(prompt, Sequence)
        and not isinstance(prompt, str)
        and bool(prompt)
        and _is_message(prompt[0])
    )


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and "role" in value


def _as_conversations(messages: Any) -> list[Messages]:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequestError(
            "`messages` is a list of messages, each a mapping with a role.", param="messages"
        )
    if not messages or isinstance(messages[0], Mapping):
        return [messages]
    return list(messages)


def _as_batch(prompts: Any) -> list[Prompt]:
    """One prompt or many, as many. A list that starts with a number is one prompt of token ids."""
    if isinstance(prompts, (str, Mapping)):
        return [cast(Prompt, prompts)]
    try:
        items = list(prompts)
    except TypeError:
        raise InvalidRequestError(
            f"A prompt is text or a list of token ids, not {type(prompts).__name__}.", param="prompt"
        ) from None
    return [items] if items and hasattr(items[0], "__index__") else items


def _params_of_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidRequestError(
            f"There are {count} prompts but {len(params)} sampling parameters.", param="sampling_params"
        )
    return list(params)


def _priority_of_each(priority: Sequence[int] | int, count: int) -> list[int]:
    if isinstance(priority, int):
        return [priority] * count
    if len(priority) != count:
        raise InvalidRequestError(
            f"There are {count} prompts but {len(priority)} priorities.", param="priority"
        )
    return list(priority)
