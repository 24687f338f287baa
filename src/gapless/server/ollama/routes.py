"""The paths of Ollama's API."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute

from gapless._version import __version__
from gapless.server.ollama import models
from gapless.server.ollama.chat import ChatRequest, chat
from gapless.server.ollama.embed import EmbeddingRequest, EmbedRequest, embed, embed_one
from gapless.server.ollama.fields import ModelFields, check_model
from gapless.server.ollama.generate import GenerateRequest, generate
from gapless.server.service import service_of

# Clients ask for a version to learn what the server can do. This is the one whose API is spoken here.
OLLAMA_VERSION = "0.13.0"


class _JsonRoute(APIRoute):
    """Takes a body for JSON though it is called a form, as it is in the examples of Ollama's documentation.

    But not from a web page: only what is called JSON makes a browser ask whether the page may send it.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            if "origin" not in request.headers:
                others = [line for line in request.scope["headers"] if line[0] != b"content-type"]
                headers = [*others, (b"content-type", b"application/json")]
                request = Request({**request.scope, "headers": headers}, request.receive)
            return await handler(request)

        return handle


router = APIRouter(prefix="/api", tags=["ollama"], route_class=_JsonRoute)


@router.post("/chat", response_model=None)
async def api_chat(request: Request, body: ChatRequest) -> Response:
    """Answers a conversation."""
    return chat(service_of(request), body, request.state.request_id)


@router.post("/generate", response_model=None)
async def api_generate(request: Request, body: GenerateRequest) -> Response:
    """Generates a text."""
    return generate(service_of(request), body, request.state.request_id)


@router.post("/embed", response_model=None)
async def api_embed(request: Request, body: EmbedRequest) -> Response:
    """Texts as vectors."""
    return embed(service_of(request), body, request.state.request_id)


@router.post("/embeddings", response_model=None)
async def api_embeddings(request: Request, body: EmbeddingRequest) -> Response:
    """A text as a vector."""
    return embed_one(service_of(request), body, request.state.request_id)


@router.head("/tags", include_in_schema=False)
@router.get("/tags", response_model=None)
async def api_tags(request: Request) -> Response:
    """The models on this server."""
    return _json(models.tags(service_of(request)))


@router.get("/ps", response_model=None)
async def api_ps(request: Request) -> Response:
    """The models in memory."""
    return _json(models.running(service_of(request)))


@router.post("/show", response_model=None)
async def api_show(request: Request, body: ModelFields) -> Response:
    """All that is known of a model."""
    service = service_of(request)
    check_model(service, body.model)
    return _json(models.show(service))


@router.head("/version", include_in_schema=False)
@router.get("/version", response_model=None)
async def api_version() -> Response:
    """The version of Ollama's API, and of the server."""
    return _json({"version": OLLAMA_VERSION, "gapless": __version__})


def _json(value: Any) -> Response:
    # A file's metadata may have numbers that are none, which JSON lacks: they become null.
    return Response(msgspec.json.encode(value), media_type="application/json")
