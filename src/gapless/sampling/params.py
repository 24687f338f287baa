"""How the next token is chosen, and when a generation ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from gapless.sampling import check
from gapless.sampling.structured import StructuredOutputs

# More choices than this of one prompt is a mistake rather than a wish; every choice is a sequence of its own.
MAX_CHOICES = 1024


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters, with vLLM's names and defaults. None stands for a field's default, but for
    `max_tokens`.

    Raises InvalidRequestError (with `param`) for a value of the wrong type or out of its range.
    """

    max_tokens: int | None = 16
    """New tokens at most; None: as many as the context holds."""
    temperature: float = 1.0
    """0 always takes the most likely token (greedy)."""
    top_k: int = 0
    """Only the k most likely tokens; 0 or -1: all."""
    top_p: float = 1.0
    """Only the most likely tokens that together reach this probability; at least one token."""
    min_p: float = 0.0
    """Only tokens at least this share as likely as the most likely one."""
    seed: int | None = None
    """The same seed gives the same output, whatever else runs; None: a random one."""
    stop: Sequence[str] | str | None = None
    """Strings that end the text; not part of it unless `include_stop_str_in_output`."""
    stop_token_ids: Sequence[int] | None = None
    """Tokens that end the generation, beside the model's own end tokens. The text does not show them."""
    ignore_eos: bool = False
    """Go on after the model's own end tokens; under `structured_outputs` they end the output all the same."""
    logprobs: int | None = None
    """Report the log-probability of each new token, and of this many of the most likely ones."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these tokens, -100 to 100."""
    presence_penalty: float = 0.0
    """Subtracted from the logits of tokens that the output already has, -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted once for each time the output has the token, -2 to 2."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output."""
    n: int = 1
    """How many choices to generate for each prompt."""
    min_tokens: int = 0
    """End tokens and stop strings do not count before this many new tokens. Under `structured_outputs` the
    constraint alone says where the end tokens may come."""
    skip_special_tokens: bool = True
    """Leave control tokens out of the text."""
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputs | None = None
    """What the output must look like. An output that `max_tokens`, `stop` or `stop_token_ids` cut off may be
    unfinished."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if getattr(self, field.name) is None and field.name != "max_tokens":
                self._set(field.name, field.default)
        if self.max_tokens is not None:
            self._set("max_tokens", check.integer("max_tokens", self.max_tokens, 1))
        self._set("temperature", check.real("temperature", self.temperature, 0.0))
        self._set("top_k", max(0, check.integer("top_k", self.top_k, -1)))
        for name in ("top_p", "min_p"):
            self._set(name, check.real(name, getattr(self, name), 0.0, 1.0))
        for name in ("presence_penalty", "frequency_penalty"):
            self._set(name, check.real(name, getattr(self, name), -2.0, 2.0))
        self._set(
            "repetition_penalty",
            check.real("repetition_penalty", self.repetition_penalty, 0.0, open_low=True),
        )
        for name in ("logprobs", "prompt_logprobs", "seed"):
            if (value := getattr(self, name)) is not None:
                low, high = (-(2**63), 2**64 - 1) if name == "seed" else (0, None)
                self._set(name, check.integer(name, value, low, high))
        self._set("n", check.integer("n", self.n, 1, MAX_CHOICES))
        self._set("min_tokens", check.integer("min_tokens", self.min_tokens, 0))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            check.refuse("min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})")
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            check.boolean(name, getattr(self, name))
        self._set("stop", check.strings("stop", self.stop))
        self._set("stop_token_ids", check.token_ids("stop_token_ids", self.stop_token_ids))
        self._set("logit_bias", _logit_bias(self.logit_bias))
        if not isinstance(self.structured_outputs, (StructuredOutputs, type(None))):
            check.refuse("structured_outputs", self.structured_outputs, "a StructuredOutputs")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop`, always as a tuple."""
        return check.strings("stop", self.stop)


def _logit_bias(value: object) -> dict[int, float] | None:
    if not value and (value is None or isinstance(value, Mapping)):
        return None
    if not isinstance(value, Mapping):
        check.refuse("logit_bias", value, "a mapping from token id to number")
    return {
        check.integer("logit_bias", token_id, 0): check.real("logit_bias", bias, -100.0, 100.0)
        for token_id, bias in value.items()
    }
