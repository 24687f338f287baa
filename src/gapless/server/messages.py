"""What the server's processes say to each other, as typed messages.

The front end starts every generation, and gives it a number that is never used again:

    front end ── Encode, Decode ──► tokenizer ── Encoded, Decoded, Refused ──► front end
    front end ── Submit, Cancel, AskStats ──► engine ── Loading, Refused, Stats, Embedded ──► front end
    engine ── Step (of Opened, Entered, Token, …) ──► detokenizer ── Chunks ──► front end

Times are seconds of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

from gapless.sampling import SamplingParams


class Message(msgspec.Struct, array_like=True, gc=False):
    """Base of all messages."""


class Failure(Message):
    """Why a request cannot be served. `kind` is the name of an exception of `gapless.errors`."""

    kind: str
    message: str
    param: str | None = None


# --- front end and tokenizer ---


class Text(Message, tag=1):
    """A text to complete. `parse_special`: control tokens in it are the caller's own."""

    text: str
    parse_special: bool = True


class Chat(Message, tag=2):
    """A conversation, for the chat template. `variables` go to the template."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = {}
    add_generation_prompt: bool = True


class FillIn(Message, tag=3):
    """A text to fill in between `prefix` and `suffix`."""

    prefix: str
    suffix: str


class Whole(Message, tag=4):
    """A text that nothing follows: one to embed. Control tokens in it are text."""

    text: str


Prompt: TypeAlias = Text | Chat | FillIn | Whole


class Encode(Message, tag=1):
    number: int
    prompt: Prompt
    max_tokens: int
    """A prompt that is certainly longer is refused before it is encoded."""


class Decode(Message, tag=2):
    """Asks for the text of token ids, control tokens included."""

    number: int
    token_ids: bytes  # int32


ToTokenizer: TypeAlias = Encode | Decode


class TokenizerReady(Message, tag=1):
    has_chat_template: bool
    chat_template: str
    can_fill_in: bool
    control_tokens: list[str]


class Encoded(Message, tag=2):
    number: int
    token_ids: bytes  # int32
    tail: str
    """The end of the prompt as text, control tokens included: a template may have opened a `<think>`."""


class Decoded(Message, tag=3):
    number: int
    text: str


class Refused(Message, tag=4):
    """This generation cannot run; nothing more is said of it."""

    number: int
    failure: Failure


class Fatal(Message, tag=5):
    """The process cannot do its work, and ends."""

    failure: Failure


FromTokenizer: TypeAlias = TokenizerReady | Encoded | Decoded | Refused | Fatal

# --- front end and engine ---


class Submit(Message, tag=1):
    """A prompt to continue, or to embed."""

    number: int
    request_id: str
    token_ids: bytes  # int32
    params: SamplingParams
    priority: int = 0
    arrival_s: float = 0.0
    is_embedding: bool = False


class Cancel(Message, tag=2):
    """Ends choice `index`, or all."""

    number: int
    index: int | None = None


class AskStats(Message, tag=3):
    pass


class UseDetokenizer(Message, tag=4):
    """From now on, tokens go to this address; what is running is cancelled, for its text is lost."""

    address: str


ToEngine: TypeAlias = Submit | Cancel | AskStats | UseDetokenizer


class ModelFacts(Message):
    """What clients can learn about the model that runs."""

    path: str
    architecture: str
    num_parameters: int
    file_bytes: int
    quantization: str
    context_length: int
    max_model_len: int
    max_num_seqs: int
    vocab_size: int
    hidden_size: int
    block_size: int
    num_blocks: int
    kv_dtype: str
    isa: str
    num_threads: int
    metadata: dict[str, Any]
    generation_defaults: dict[str, float]


class Loading(Message, tag=1):
    done_bytes: int
    total_bytes: int


class EngineReady(Message, tag=2):
    facts: ModelFacts


class Stats(Message, tag=6):
    """See `Engine.stats`."""

    values: dict[str, float]
    gap_histogram: list[int] = []


class Embedded(Message, tag=7):
    """The end of a prompt that was embedded: its vector, or none if it was cancelled."""

    number: int
    vector: bytes | None  # float32 [hidden_size]
    error: str = ""


FromEngine: TypeAlias = Loading | EngineReady | Refused | Fatal | Stats | Embedded

# --- engine and detokenizer ---


class Opened(Message, tag=1):
    """A generation that will have events."""

    number: int
    prompt_token_ids: bytes  # int32
    params: SamplingParams
    max_tokens: int
    stop_token_ids: list[int]
    arrival_s: float


class Entered(Message, tag=2):
    """It got a slot."""

    number: int
    admitted_s: float
    num_cached_tokens: int
    num_preemptions: int


class Token(Message, tag=3):
    number: int
    choice: int
    token_id: int
    time_s: float
    logprob: float | None = None
    rank: int = 0
    top: list[tuple[int, float]] = []


class PromptLogprob(Message, tag=4):
    number: int
    position: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class Ended(Message, tag=5):
    number: int
    choice: int
    reason: str
    time_s: float
    message: str = ""
    num_preemptions: int = 0


class Forget(Message, tag=6):
    """Generations up to this number have no engine any more. Sent by the front end."""

    number: int


StepEvent: TypeAlias = Opened | Entered | Token | PromptLogprob | Ended | Forget
Step: TypeAlias = list[StepEvent]

# --- detokenizer and front end ---


class TokenLogprob(Message):
    """A token and how likely it was. `rank` 0: it is the first of a prompt, and nothing precedes it."""

    token_id: int
    logprob: float | None  # None: not finite, or rank 0
    rank: int
    piece: bytes


TokenLogprobs: TypeAlias = list[TokenLogprob]  # the chosen token first, then the likeliest


class Metrics(Message):
    """See `gapless.sampling.RequestMetrics`."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_preemptions: int
    arrival_s: float
    queue_s: float | None
    ttft_s: float | None
    e2e_s: float | None
    tpot_s: float | None


class Chunk(Message):
    """What one choice of a generation gained."""

    number: int
    index: int
    text: str
    num_tokens: int
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    metrics: Metrics | None = None
    """With the last chunk of a generation."""
    error: str | None = None
    """The engine failed under the generation; this is its last chunk."""
    embedding: bytes | None = None  # float32 [hidden_size]


class Chunks(Message, tag=1):
    """What all generations gained in a step, or in several. Most are plain: of one choice, with one token
    more and its text, and nothing else. They need no `Chunk`: `plain_texts[i]` is what `plain_numbers[i]`
    gained."""

    chunks: list[Chunk]
    plain_numbers: list[int] = []
    plain_texts: list[str] = []


class DetokenizerReady(Message, tag=2):
    address: str


FromDetokenizer: TypeAlias = Chunks | DetokenizerReady | Fatal
