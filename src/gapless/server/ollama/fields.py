"""What the requests of Ollama's API have in common: the model's name, and the options of sampling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import AliasChoices, BaseModel, ConfigDict, Field

from gapless.errors import InvalidRequestError
from gapless.sampling import SamplingParams, StructuredOutputs
from gapless.server.chat import ChatStyle, checked_logprobs
from gapless.server.errors import ModelNotFoundError
from gapless.server.sampling import ListOf, SamplingFields, refuse_unsupported
from gapless.server.service import Service

_DEFAULT_TAG = ":latest"
# How a runner is started: decided here when the server is.
_RUNNER_OPTIONS = frozenset(
    {
        "f16_kv",
        "logits_all",
        "low_vram",
        "main_gpu",
        "num_batch",
        "num_ctx",
        "num_gpu",
        "num_keep",
        "num_thread",
        "numa",
        "use_mlock",
        "use_mmap",
        "vocab_only",
    }
)


class ModelFields(BaseModel):
    """Names a model. Older clients call it `name`."""

    model_config = ConfigDict(extra="allow")

    model: str | None = Field(None, validation_alias=AliasChoices("model", "name"))
    keep_alive: Any = None


class Options(BaseModel):
    """How the answer is sampled. None stands for the model's default."""

    model_config = ConfigDict(extra="allow")

    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | ListOf[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    def sampling_params(
        self, defaults: Mapping[str, float], logprobs: int | None, constraint: StructuredOutputs | None
    ) -> SamplingParams:
        """The engine's parameters. InvalidRequestError for values out of range."""
        unknown = frozenset(self.model_extra or ()) - _RUNNER_OPTIONS
        refuse_unsupported(dict.fromkeys((f"options.{name:.100}" for name in unknown), True), {})
        fields = SamplingFields(
            # 0 and less: as many as fit.
            max_tokens=self.num_predict if self.num_predict and self.num_predict > 0 else None,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=None if self.seed == -1 else self.seed,
            stop=self.stop,
            repetition_penalty=self.repeat_penalty,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
        )
        return fields.sampling_params(defaults, logprobs=logprobs, structured_outputs=constraint)


class GenerationFields(ModelFields):
    """Of every request that generates."""

    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: Options | None = None
    think: bool | str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @property
    def wants_stream(self) -> bool:
        return self.stream is not False

    @property
    def num_logprobs(self) -> int | None:
        return checked_logprobs(self.logprobs, self.top_logprobs)

    def sampling_params(self, defaults: Mapping[str, float]) -> SamplingParams:
        """The engine's parameters. InvalidRequestError for what can't be had."""
        refuse_unsupported(self.model_extra or {}, {})
        options = self.options or Options()
        return options.sampling_params(defaults, self.num_logprobs, self._constraint())

    def _constraint(self) -> StructuredOutputs | None:
        if self.format is None or self.format == "":
            return None
        if self.format == "json":
            return StructuredOutputs(json_object=True)
        if isinstance(self.format, dict):
            return StructuredOutputs(json=self.format)
        raise InvalidRequestError(
            f"format is {self.format!r:.100}; it must be 'json' or a JSON schema.", param="format"
        )

    def template_variables(self, style: ChatStyle) -> dict[str, Any]:
        """What the chat template gets beside messages. InvalidRequestError if the model has no thoughts."""
        if self.think is None:
            return {}
        if self.think is not False and style.reasoning is None:
            raise InvalidRequestError("This model does not think aloud. Leave think out.", param="think")
        if isinstance(self.think, str):  # a level
            return {"enable_thinking": True, "reasoning_effort": self.think}
        return {"enable_thinking": self.think}


def tagged_name(service: Service) -> str:
    """The model's name as Ollama writes it: there is always a tag."""
    name = service.model_name
    return name if ":" in name.rpartition("/")[2] else name + _DEFAULT_TAG


def check_model(service: Service, name: str | None) -> str:
    """The name as the client gave it. ModelNotFoundError unless it is that of the model that is served."""
    if name is None or name in (service.model_name, tagged_name(service)):
        return name or tagged_name(service)
    raise ModelNotFoundError(
        f"model {name!r:.200} not found; this server has {tagged_name(service)!r}", param="model"
    )
