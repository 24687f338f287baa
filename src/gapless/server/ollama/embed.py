"""`/api/embed`, and `/api/embeddings`, its predecessor."""

from __future__ import annotations

import time
from typing import Any

from fastapi.responses import JSONResponse
from starlette.responses import Response

from gapless.server.embedding import embedding_inputs, open_embedding, shortened
from gapless.server.ollama.fields import ModelFields, check_model
from gapless.server.responses import Collector, Items, WholeResponse
from gapless.server.sampling import ListOf, refuse_unsupported
from gapless.server.service import Service
from gapless.server.stream import Stream


class EmbedRequest(ModelFields):
    """Texts to embed. One that is too long is refused, `truncate` or not: half of a text is another text."""

    input: str | ListOf[str]
    dimensions: int | None = None
    truncate: bool | None = None
    options: dict[str, Any] | None = None


class EmbeddingRequest(ModelFields):
    """One text, as older clients ask."""

    prompt: str
    options: dict[str, Any] | None = None


class _Vectors(Collector):
    """The vectors, in the order of the texts."""

    def __init__(self, stream: Stream, dimensions: int | None) -> None:
        self._stream = stream
        self._dimensions = dimensions
        self._vectors: dict[int, list[float]] = {}

    def push(self, items: Items) -> None:
        for index, chunk in items:
            assert chunk.embedding is not None
            self._vectors[index] = shortened(chunk.embedding, self._dimensions).tolist()

    def result(self) -> list[list[float]]:
        return [vector for _, vector in sorted(self._vectors.items())]


class _Embeddings(_Vectors):
    """The answer of `/api/embed`."""

    def __init__(self, model: str, stream: Stream, dimensions: int | None) -> None:
        super().__init__(stream, dimensions)
        self._model = model

    def result(self) -> Any:
        arrival_s = min(generation.arrival_s for generation in self._stream.generations)
        return {
            "model": self._model,
            "embeddings": super().result(),
            "total_duration": round((time.perf_counter() - arrival_s) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": self._stream.num_prompt_tokens,
        }


class _Embedding(_Vectors):
    """The answer of `/api/embeddings`."""

    def result(self) -> Any:
        return {"embedding": super().result()[0]}


def embed(service: Service, request: EmbedRequest, request_id: str) -> Response:
    """Embeds texts. InvalidRequestError, NotReadyError or QueueFullError if they can't be taken."""
    model = check_model(service, request.model)
    refuse_unsupported(request.model_extra or {}, {})
    if not request.input:
        service.require_ready()
        return JSONResponse({"model": model, "embeddings": []})
    stream = open_embedding(service, embedding_inputs(request.input), request.dimensions, request_id)
    answer = _Embeddings(model, stream, request.dimensions)
    return WholeResponse(stream, answer, service.config.request_timeout_s)


def embed_one(service: Service, request: EmbeddingRequest, request_id: str) -> Response:
    """Embeds a text. InvalidRequestError, NotReadyError or QueueFullError if it can't be taken."""
    check_model(service, request.model)
    refuse_unsupported(request.model_extra or {}, {})
    if not request.prompt:
        service.require_ready()
        return JSONResponse({"embedding": []})
    stream = open_embedding(service, embedding_inputs(request.prompt), None, request_id)
    return WholeResponse(stream, _Embedding(stream, None), service.config.request_timeout_s)
