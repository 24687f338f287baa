"""`/v1/embeddings`."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict

from gapless.errors import InvalidRequestError
from gapless.sampling import SamplingParams
from gapless.server.messages import Whole
from gapless.server.responses import Collector, GenerationResponse, Items, WholeResponse
from gapless.server.sampling import refuse_unsupported
from gapless.server.service import PromptOrIds, Service
from gapless.server.stream import Stream

MAX_INPUTS = 2048
_FORMATS = ("float", "base64")


class EmbeddingRequest(BaseModel):
    """OpenAI's embedding request."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    input: str | list[int] | list[str] | list[list[int]]
    encoding_format: str | None = None
    dimensions: int | None = None


class EmbeddingCollector(Collector):
    """All vectors, in the order of the inputs; of each the first `dimensions` components, normalised."""

    def __init__(self, model: str, stream: Stream, encoding_format: str, dimensions: int | None) -> None:
        self._model = model
        self._stream = stream
        self._format = encoding_format
        self._dimensions = dimensions
        self._vectors: dict[int, bytes] = {}

    def push(self, items: Items) -> None:
        """Takes vectors."""
        for index, chunk in items:
            assert chunk.embedding is not None
            self._vectors[index] = chunk.embedding

    def result(self) -> dict[str, Any]:
        """OpenAI's list of embeddings."""
        num_tokens = self._stream.num_prompt_tokens
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": self._shown(vector)}
                for index, vector in sorted(self._vectors.items())
            ],
            "model": self._model,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }

    def _shown(self, data: bytes) -> str | list[float]:
        vector = shortened(data, self._dimensions)
        if self._format == "base64":
            return base64.b64encode(vector.astype("<f4").tobytes()).decode()
        values: list[float] = vector.tolist()
        return values


def shortened(data: bytes, dimensions: int | None) -> Any:
    """A vector [hidden_size] as float32 [dimensions], of length 1: models trained for it allow the cut."""
    vector = np.frombuffer(data, np.float32)
    if dimensions is None or dimensions >= len(vector):
        return vector
    cut = vector[:dimensions]
    norm = float(np.linalg.norm(cut))
    return cut / norm if norm else cut


def embeddings(service: Service, request: EmbeddingRequest, request_id: str) -> GenerationResponse:
    """Answers an embedding request.

    InvalidRequestError, NotReadyError or QueueFullError if it cannot be taken.
    """
    facts = service.require_ready()
    refuse_unsupported(request.model_extra or {}, {})
    encoding_format = request.encoding_format or "float"
    if encoding_format not in _FORMATS:
        raise InvalidRequestError(
            f"encoding_format is {encoding_format!r:.100}; known are float and base64.",
            param="encoding_format",
        )
    if request.dimensions is not None and not 1 <= request.dimensions <= facts.hidden_size:
        raise InvalidRequestError(
            f"dimensions is {request.dimensions}; this model has vectors of {facts.hidden_size}.",
            param="dimensions",
        )
    stream = service.open(
        embedding_inputs(request.input), SamplingParams(), request_id=request_id, is_embedding=True
    )
    collector = EmbeddingCollector(service.model_name, stream, encoding_format, request.dimensions)
    return WholeResponse(stream, collector, service.config.request_timeout_s)


def embedding_inputs(given: Any) -> list[PromptOrIds]:
    """One text or many, or token ids, as prompts. InvalidRequestError for none, and for too many."""
    inputs = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    if not 1 <= len(inputs) <= MAX_INPUTS:
        raise InvalidRequestError(
            f"input has {len(inputs)} texts; 1 to {MAX_INPUTS} are taken.", param="input"
        )
    return [Whole(one) if isinstance(one, str) else one for one in inputs]
