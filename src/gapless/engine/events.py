"""What happens to a request, as typed values. Times are `time.perf_counter` seconds."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

TopLogprobs: TypeAlias = "list[tuple[int, float]]"  # (token id, log-probability), most likely first


class FinishReason(Enum):
    """How a sequence ended. `value` is what results report."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class TokenEvent(NamedTuple):
    """A new token. `logprob` is None unless asked for; `rank` 1 is the most likely token."""

    choice: int
    token_id: int
    logprob: float | None
    rank: int
    top: TopLogprobs
    time_s: float


class PromptLogprobsEvent(NamedTuple):
    """The log-probability of prompt token `position` (1 is the second)."""

    position: int
    logprob: float
    rank: int
    top: TopLogprobs


class EmbeddingEvent(NamedTuple):
    """The embedding of a request that asked for one: float32 [hidden_size]. The end follows."""

    choice: int
    vector: npt.NDArray[np.float32]


class FinishEvent(NamedTuple):
    """The one terminal event of a choice; `message` explains an error."""

    choice: int
    reason: FinishReason
    time_s: float
    message: str = ""


RequestEvent: TypeAlias = "TokenEvent | PromptLogprobsEvent | EmbeddingEvent | FinishEvent"
