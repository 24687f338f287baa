"""What all requests that generate have in common: the fields of sampling, with OpenAI's and vLLM's names."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler
from pydantic_core import CoreSchema

from gapless.errors import InvalidRequestError
from gapless.sampling import SamplingParams, StructuredOutputs

logger = logging.getLogger("gapless.server")

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024

# Fields that clients send and that change nothing here: what they ask for is always or never so.
_WITHOUT_EFFECT = frozenset(
    {
        "metadata",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)


@dataclass(frozen=True)
class _FirstErrorOnly:
    """pydantic's `FailFast`, which cannot stand in a union."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return {**handler(source), "fail_fast": True}


T = TypeVar("T")

# A list in a request. A body of some MB can have a million wrong items, and an error for each of them takes
# seconds and GBs: the first says enough.
ListOf = Annotated[list[T], _FirstErrorOnly()]


class StreamOptions(BaseModel):
    """How a stream is sent."""

    include_usage: bool | None = None


class JsonSchemaFormat(BaseModel):
    """A named JSON schema."""

    model_config = ConfigDict(extra="allow")

    name: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """What the answer must look like."""

    type: str
    json_schema: JsonSchemaFormat | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    def structured_outputs(self) -> StructuredOutputs | None:
        """The constraint, if it is one."""
        if self.type == "text":
            return None
        if self.type == "json_object":
            if self.schema_ is not None:
                return StructuredOutputs(json=self.schema_)
            return StructuredOutputs(json_object=True)
        if self.type == "json_schema":
            schema = self.schema_ if self.json_schema is None else self.json_schema.schema_
            if schema is None:
                raise InvalidRequestError(
                    "response_format of type json_schema needs json_schema.schema.", param="response_format"
                )
            return StructuredOutputs(json=schema if isinstance(schema, dict) else str(schema).lower())
        raise InvalidRequestError(
            f"response_format.type is {self.type!r:.100}; known are text, json_object and json_schema.",
            param="response_format.type",
        )


class StructuredOutputsFields(BaseModel):
    """vLLM's `structured_outputs`. Unknown fields are refused at use: pydantic lists them all."""

    model_config = ConfigDict(extra="allow")

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: ListOf[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None

    def structured_outputs(self) -> StructuredOutputs:
        """The constraint. InvalidRequestError for a field that does not exist."""
        for name in self.model_extra or ():
            raise InvalidRequestError(
                f"structured_outputs has no field {name!r:.100}; it has json, regex, choice, grammar, "
                "json_object, disable_any_whitespace and whitespace_pattern.",
                param="structured_outputs",
            )
        fields = self.model_dump(exclude={"json_"})
        return StructuredOutputs(json=self.json_, **fields)


class SamplingFields(BaseModel):
    """Fields of every request that generates. None stands for the model's default."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | ListOf[str] | None = None
    stop_token_ids: ListOf[int] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    priority: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsFields | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: ListOf[str] | None = None
    guided_grammar: str | None = None

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    def constraint(self) -> StructuredOutputs | None:
        """What the output must look like, by whichever field it is said; two of them are a mistake."""
        found: dict[str, StructuredOutputs | None] = {}
        if self.response_format is not None:
            found["response_format"] = self.response_format.structured_outputs()
        if self.structured_outputs is not None:
            found["structured_outputs"] = self.structured_outputs.structured_outputs()
        for name in ("json", "regex", "choice", "grammar"):
            if (value := getattr(self, f"guided_{name}")) is not None:
                found[f"guided_{name}"] = StructuredOutputs(**{name: value})
        given = {name: constraint for name, constraint in found.items() if constraint is not None}
        if len(given) > 1:
            raise InvalidRequestError(
                f"{' and '.join(given)} exclude each other: an output has one form.", param=next(iter(given))
            )
        return next(iter(given.values()), None)

    def sampling_params(self, defaults: Mapping[str, float], **more: Any) -> SamplingParams:
        """The engine's parameters. `defaults`: those that the model recommends; `more` wins over all.

        InvalidRequestError for values out of range.
        """
        fields: dict[str, Any] = {
            "n": self.n,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "seed": self.seed,
            "stop": _checked_stop(self.stop),
            "stop_token_ids": self.stop_token_ids,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "repetition_penalty": self.repetition_penalty,
            "logit_bias": _token_biases(self.logit_bias),
            "ignore_eos": self.ignore_eos,
            "min_tokens": self.min_tokens,
            "skip_special_tokens": self.skip_special_tokens,
            "include_stop_str_in_output": self.include_stop_str_in_output,
        }
        for name, value in defaults.items():
            if fields.get(name) is None:
                fields[name] = int(value) if name == "top_k" else value
        return SamplingParams(**{**fields, **more})


def refuse_unsupported(fields: Mapping[str, Any], unsupported: Mapping[str, str]) -> None:
    """InvalidRequestError for what is asked and cannot be had; a line in the log for what is not known.

    `unsupported`: names of fields, and what to do instead.
    """
    for name, remedy in unsupported.items():
        if fields.get(name):
            raise InvalidRequestError(f"{name} is not supported. {remedy}", param=name)
    for name in frozenset(fields) - frozenset(unsupported) - _WITHOUT_EFFECT:
        _warn_of(name[:100])


@lru_cache(maxsize=256)  # once a name is enough
def _warn_of(name: str) -> None:
    logger.warning("The field %r of a request is not known, and is ignored", name)


def _checked_stop(stop: str | list[str] | None) -> str | list[str] | None:
    strings = [stop] if isinstance(stop, str) else stop or []
    if len(strings) > MAX_STOP_STRINGS or any(len(one) > MAX_STOP_CHARACTERS for one in strings):
        raise InvalidRequestError(
            f"stop has at most {MAX_STOP_STRINGS} strings of at most {MAX_STOP_CHARACTERS} characters.",
            param="stop",
        )
    return None if stop == "" else stop


def _token_biases(biases: dict[str, Any] | None) -> dict[int, float] | None:
    try:
        return None if biases is None else {int(token_id): float(bias) for token_id, bias in biases.items()}
    except (ValueError, TypeError, OverflowError):
        raise InvalidRequestError(
            "logit_bias maps token ids (as strings) to numbers from -100 to 100.", param="logit_bias"
        ) from None
