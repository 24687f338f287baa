"""What one HTTP request generates: a generation for each of its prompts, and what they gain."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from enum import Enum

from gapless.sampling import SamplingParams
from gapless.server.messages import Chat, Chunk, Metrics, Prompt


class ClientGoneError(Exception):
    """The client has closed its connection. There is nobody to tell."""


class Stage(Enum):
    ENCODING = "encoding"
    SUBMITTED = "submitted"
    ENDED = "ended"


@dataclass(eq=False, slots=True)
class Generation:
    """One prompt on its way through the processes."""

    number: int
    stream: Stream
    position: int  # of its prompt in the request
    prompt: Prompt | None  # None: it came as token ids
    params: SamplingParams
    token_ids: bytes = b""  # int32
    tail: str = ""  # end of the prompt's text
    stage: Stage = Stage.ENCODING
    num_deaths: int = 0  # of tokenizers that were encoding it
    open_choices: set[int] = field(default_factory=set)
    num_output_tokens: int = 0
    arrival_s: float = field(default_factory=time.perf_counter)
    last_chunk_s: dict[int, float] = field(default_factory=dict)
    metrics: Metrics | None = None
    write_text: Callable[[str], bool] | None = None
    """Shows a token's text to the client at once; False if the client does not take it now. Set while nothing
    comes before it."""

    @property
    def num_prompt_tokens(self) -> int:
        return max(1, len(self.token_ids) // 4)  # the engine begins an empty one with the model's own token

    @property
    def num_sequences(self) -> int:
        return self.params.n

    @property
    def param(self) -> str:
        """The field of the request that the prompt came from."""
        if isinstance(self.prompt, Chat):
            return "messages"
        return "input" if self.stream.is_embedding else "prompt"

    def put_text(self, text: str) -> None:
        """The only choice has one token more, and this is its text."""
        try:
            if self.write_text is not None and self.write_text(text):
                return
        except Exception as error:  # the consumer's own: other streams' texts come after this one
            self.stream.fail(error)
        else:
            self.stream.put(self, Chunk(self.number, 0, text, 1))


class Stream:
    """Chunks for one consumer. `index` of a choice counts over all prompts, as OpenAI's API does."""

    def __init__(
        self,
        request_id: str,
        params: SamplingParams,
        priority: int,
        cancel: Callable[[Generation], None],
        is_embedding: bool = False,
    ) -> None:
        self.request_id = request_id
        self.params = params
        self.priority = priority
        self.is_embedding = is_embedding
        self.generations: list[Generation] = []
        self._cancel = cancel
        self._items: deque[tuple[int, Chunk] | Exception] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._num_open = 0
        self._listener: Callable[[int, Chunk], bool] | None = None

    # --- for the service ---

    def add(self, generation: Generation) -> None:
        generation.open_choices = set(range(self.params.n))
        self.generations.append(generation)
        self._num_open += self.params.n

    def put(self, generation: Generation, chunk: Chunk) -> None:
        index = generation.position * self.params.n + chunk.index
        if self._listener is not None and not self._items and chunk.finish_reason is None:
            try:
                if self._listener(index, chunk):
                    return
            except Exception as error:  # the consumer's own: other streams' chunks come after this one
                self.fail(error)
                return
        self._add((index, chunk))

    def fail(self, error: Exception) -> None:
        """The consumer gets `error` after what it has not read yet."""
        self._add(error)

    def _add(self, item: tuple[int, Chunk] | Exception) -> None:
        self._items.append(item)
        for generation in self.generations:
            generation.write_text = None  # `item` is first
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- for the consumer ---

    def listen(self, listener: Callable[[int, Chunk], bool]) -> None:
        """From now on `listener` is offered each chunk that is not the last of its choice, as it arrives.

        What it does not take, and what comes while that has not been read, is there to be read.
        """
        self._listener = listener

    def lacks_writer(self, index: int) -> bool:
        """Whether choice `index` can have a writer of its texts, and has none."""
        return self.params.n == 1 and self.generations[index].write_text is None

    def write_texts(self, index: int, write_text: Callable[[str], bool]) -> None:
        """Texts of choice `index` go to `write_text`, until something comes that is to be read first."""
        self.generations[index].write_text = write_text

    @property
    def num_choices(self) -> int:
        return len(self.generations) * self.params.n

    @property
    def num_prompt_tokens(self) -> int:
        """Of all prompts; each counts once, whatever `n` is."""
        return sum(generation.num_prompt_tokens for generation in self.generations)

    @property
    def num_output_tokens(self) -> int:
        return sum(generation.num_output_tokens for generation in self.generations)

    @property
    def num_cached_tokens(self) -> int:
        return sum(one.metrics.num_cached_tokens for one in self.generations if one.metrics is not None)

    async def wait(self, timeout_s: float | None = None) -> bool:
        """Whether there is something to read by then."""
        if not self._items:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            if timeout_s is None:
                await self._waiter
            else:
                timer = loop.call_later(timeout_s, self._wake)
                await self._waiter
                timer.cancel()
        return bool(self._items)

    def read(self) -> list[tuple[int, Chunk]]:
        """All that has arrived, as (choice, chunk). Raises what failed, once everything before it is read."""
        chunks: list[tuple[int, Chunk]] = []
        while self._items:
            item = self._items[0]
            if isinstance(item, Exception):
                if chunks:
                    break
                raise item
            chunks.append(item)
            self._items.popleft()
            if item[1].finish_reason is not None:
                self._num_open -= 1
        return chunks

    @property
    def is_finished(self) -> bool:
        """Whether all that will come has been read."""
        return self._num_open <= 0 and not self._items

    async def __aiter__(self) -> AsyncIterator[tuple[int, Chunk]]:
        while not self.is_finished:
            await self.wait()
            for item in self.read():
                yield item

    def cancel(self) -> None:
        """Ends whatever still runs. Idempotent."""
        for generation in self.generations:
            self._cancel(generation)
