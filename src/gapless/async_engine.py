"""A model for programs that run on an event loop, servers above all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from gapless.config import EngineConfig
from gapless.engine.handle import RequestHandle
from gapless.llm import LLM, Messages, Prompt
from gapless.runtime import LoadProgress, Runtime, start
from gapless.sampling import SamplingParams, StreamChunk

if TYPE_CHECKING:
    from gapless.tokenizer import Tokenizer


class AsyncEngine:
    """A loaded model whose requests are awaited.

    >>> async with await AsyncEngine.load(EngineConfig(model="smollm2-135m")) as engine:
    ...     async for chunk in engine.generate("Once upon a time"):
    ...         print(chunk.text, end="")
    """

    def __init__(self, runtime: Runtime) -> None:
        self._llm = LLM.from_runtime(runtime)

    @classmethod
    async def load(cls, config: EngineConfig, progress: LoadProgress | None = None) -> AsyncEngine:
        """Loads the model in a thread of its own. Raises as `LLM` does."""
        return cls(await asyncio.to_thread(start, config, progress))

    @property
    def tokenizer(self) -> Tokenizer:
        return self._llm.tokenizer

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output together."""
        return self._llm.max_model_len

    def submit(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        **template_variables: Any,
    ) -> RequestHandle:
        """Starts a prompt or a conversation and returns at once: iterate over the handle with `async for`.

        InvalidRequestError, ContextLengthError or TemplateError if it can never run; EngineError after the
        end.
        """
        return self._llm.submit(
            prompt, sampling_params, request_id=request_id, priority=priority, **template_variables
        )

    async def generate(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        priority: int = 0,
        **template_variables: Any,
    ) -> AsyncIterator[StreamChunk]:
        """What each choice gains, as it comes. Leaving early (also by cancellation of the task) ends the
        request.

        Raises as `submit` does, when the iteration begins.
        """
        handle = self.submit(
            prompt, sampling_params, request_id=request_id, priority=priority, **template_variables
        )
        try:
            async for chunk in handle:
                yield chunk
        finally:
            handle.cancel()

    def stats(self) -> dict[str, Any]:
        """See `Engine.stats`."""
        return self._llm.engine.stats()

    async def close(self) -> None:
        """Ends all requests and frees the model. Idempotent."""
        await asyncio.to_thread(self._llm.close)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()
