"""The paths of OpenAI's API."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from gapless.server.errors import ModelNotFoundError, NotFoundError
from gapless.server.openai.chat import ChatRequest, chat_completion
from gapless.server.openai.completions import CompletionRequest, completion
from gapless.server.openai.embeddings import EmbeddingRequest, embeddings
from gapless.server.openai.responses.answer import response
from gapless.server.openai.responses.request import ResponsesRequest
from gapless.server.service import Service, service_of

router = APIRouter(prefix="/v1", tags=["openai"])


def check_model(service: Service, model: str | None) -> None:
    """ModelNotFoundError unless the request names the model that is served, or none."""
    if model is not None and model != service.model_name:
        raise ModelNotFoundError(
            f"The model {model!r:.200} does not exist here. This server has {service.model_name!r}.",
            param="model",
        )


@router.get("/models")
async def models(request: Request) -> dict[str, Any]:
    """The model that is served."""
    return {"object": "list", "data": [_model(service_of(request))]}


@router.get("/models/{name:path}")
async def model(request: Request, name: str) -> dict[str, Any]:
    """The model of that name."""
    service = service_of(request)
    check_model(service, name)
    return _model(service)


def _model(service: Service) -> dict[str, Any]:
    return {
        "id": service.model_name,
        "object": "model",
        "created": service.started,
        "owned_by": "gapless",
        "root": str(service.model_path),
        "max_model_len": None if service.facts is None else service.facts.max_model_len,
    }


@router.post("/chat/completions", response_model=None)
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    """Answers a conversation."""
    service = service_of(request)
    check_model(service, body.model)
    return chat_completion(service, body, request.state.request_id)


@router.post("/completions", response_model=None)
async def completions(request: Request, body: CompletionRequest) -> Response:
    """Completes texts."""
    service = service_of(request)
    check_model(service, body.model)
    return await completion(service, body, request.state.request_id)


@router.post("/embeddings", response_model=None)
async def embed(request: Request, body: EmbeddingRequest) -> Response:
    """Texts as vectors."""
    service = service_of(request)
    check_model(service, body.model)
    return embeddings(service, body, request.state.request_id)


@router.post("/responses", response_model=None)
async def responses(request: Request, body: ResponsesRequest) -> Response:
    """Answers a conversation, with a list of items."""
    service = service_of(request)
    check_model(service, body.model)
    return response(service, body, request.state.request_id)


@router.api_route("/responses/{response_id}", methods=["GET", "DELETE"], include_in_schema=False)
async def stored_response(response_id: str) -> Response:
    """There is none: nothing is stored."""
    raise NotFoundError(f"There is no response {response_id!r:.200}: responses are not stored.")
