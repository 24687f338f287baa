"""What a generation or an embedding gives back, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


@dataclass(frozen=True)
class Logprob:
    """A token's natural-log probability and its rank (1 is the most likely)."""

    logprob: float
    rank: int
    decoded_token: str


LogprobsOfPosition = dict[int, Logprob]  # token id -> its probability; always holds the chosen token


@dataclass
class CompletionOutput:
    """One choice. `token_ids` includes the token that ended it; `text` does not."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[LogprobsOfPosition] | None = None
    cumulative_logprob: float | None = None
    finish_reason: str | None = None
    """"stop", "length", "abort" or "error"; None while it goes on."""
    stop_reason: int | str | None = None
    """The stop string or stop token id that ended it; None for the model's own end token."""


@dataclass
class RequestMetrics:
    """Times in seconds. A time is None until it is known."""

    arrival_s: float
    """By `time.perf_counter`."""
    num_prompt_tokens: int
    queue_s: float | None = None
    """From arrival to the slot."""
    ttft_s: float | None = None
    """From arrival to the first new token."""
    e2e_s: float | None = None
    """From arrival to the last new token, or to the embedding."""
    num_output_tokens: int = 0
    """Of all choices together."""
    num_cached_tokens: int = 0
    """Of the prompt, found in the prefix cache."""
    num_preemptions: int = 0
    """How often a choice gave its place to others and was computed again."""
    tpot_s: float | None = None
    """(E2E - TTFT) / (tokens - 1) of the longest choice."""


@dataclass
class RequestOutput:
    """A prompt and its choices."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[LogprobsOfPosition | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics


@dataclass(frozen=True, eq=False)
class EmbeddingOutput:
    """A text as a vector: float32 [hidden_size]."""

    embedding: npt.NDArray[np.float32]

    @property
    def hidden_size(self) -> int:
        return len(self.embedding)


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """A prompt and its embedding. Of the metrics, TTFT and TPOT stay None: there are no new tokens."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    metrics: RequestMetrics
    finished: bool = True


@dataclass(slots=True)
class StreamChunk:
    """What one choice gained: `text` may be empty while a character or a stop string is incomplete."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[LogprobsOfPosition, ...] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
