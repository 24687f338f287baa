"""`/v1/embeddings`."""

from __future__ import annotations

import base64
from typing import Any

from pydantic import BaseModel, ConfigDict

from gapless.errors import InvalidRequestError
from gapless.server.embedding import embedding_inputs, open_embedding, shortened
from gapless.server.responses import Collector, GenerationResponse, Items, WholeResponse
from gapless.server.sampling import ListOf, refuse_unsupported
from gapless.server.service import Service
from gapless.server.stream import Stream

_FORMATS = ("float", "base64")


class EmbeddingRequest(BaseModel):
    """OpenAI's embedding request."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    input: str | ListOf[int] | ListOf[str] | ListOf[ListOf[int]]
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


def embeddings(service: Service, request: EmbeddingRequest, request_id: str) -> GenerationResponse:
    """Answers an embedding request.

    InvalidRequestError, NotReadyError or QueueFullError if it cannot be taken.
    """
    refuse_unsupported(request.model_extra or {}, {})
    encoding_format = request.encoding_format or "float"
    if encoding_format not in _FORMATS:
        raise InvalidRequestError(
            f"encoding_format is {encoding_format!r:.100}; known are float and base64.",
            param="encoding_format",
        )
    stream = open_embedding(service, embedding_inputs(request.input), request.dimensions, request_id)
    collector = EmbeddingCollector(service.model_name, stream, encoding_format, request.dimensions)
    return WholeResponse(stream, collector, service.config.request_timeout_s)
