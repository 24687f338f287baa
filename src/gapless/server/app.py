"""The HTTP application: which path does what."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from gapless._version import __version__
from gapless.errors import GaplessError
from gapless.server.config import ServerConfig
from gapless.server.errors import HttpError, http_error, status_error
from gapless.server.metrics import kv_usage
from gapless.server.middleware import PAGE_HEADERS, Authentication, BodyLimits, RequestContext, respond
from gapless.server.ollama import routes as ollama_routes
from gapless.server.openai import routes as openai_routes
from gapless.server.service import Service

_PAGE_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


def make_app(config: ServerConfig, on_fatal: Callable[[GaplessError], None]) -> FastAPI:
    """The application of one server. `on_fatal` learns why it cannot go on.

    LoadError if there is no such model.
    """
    service = Service(config, on_fatal)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.close()

    app = FastAPI(
        title="Gapless",
        version=__version__,
        description="Language models on the CPU, with OpenAI's and Ollama's APIs.",
        lifespan=lifespan,
        docs_url=None,  # those pages load scripts from elsewhere
        redoc_url=None,
    )
    app.state.service = service
    _add_operations(app, service)
    app.include_router(openai_routes.router)
    app.include_router(ollama_routes.router)
    _add_page(app)
    _add_error_handlers(app)
    # The last one added is the outermost.
    app.add_middleware(BodyLimits, max_bytes=config.max_body_bytes, timeout_s=config.body_timeout_s)
    app.add_middleware(Authentication, api_key=config.api_key)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=list(config.cors_origins),
        allow_methods=["*"],
        allow_headers=["*"],
        expose_headers=["x-request-id"],
    )
    app.add_middleware(RequestContext, access_log=config.access_log)
    return app


def _add_operations(app: FastAPI, service: Service) -> None:
    @app.get("/health", tags=["operations"])
    async def health() -> Response:
        """200 when requests can be served, 503 while the model is loaded."""
        service.require_ready()
        return JSONResponse({"status": "ok"})

    @app.get("/metrics", tags=["operations"])
    async def metrics() -> Response:
        """Prometheus metrics, with vLLM's names where they mean the same."""
        text = service.metrics.render(await service.stats(), service.facts)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/stats", tags=["operations"])
    async def stats() -> dict[str, Any]:
        """What the chat page shows."""
        answer: dict[str, Any] = {
            "model": service.model_name,
            "status": "ok" if service.is_ready else "loading",
            "loading": service.loaded_share,
            "generation_tokens_per_s": service.metrics.tokens_per_s,
        }
        if (current := await service.stats()) is not None and service.facts is not None:
            answer |= {
                "num_running": int(current.values["num_running"]),
                "num_waiting": int(current.values["num_waiting"]),
                "max_num_seqs": service.facts.max_num_seqs,
                "kv_usage": kv_usage(current.values),
            }
        return answer

    @app.get("/version", tags=["operations"])
    async def version() -> dict[str, str]:
        """The server's version."""
        return {"version": __version__}


def _add_page(app: FastAPI) -> None:
    folder = resources.files("gapless.server") / "page"
    files = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}

    def page(name: str) -> Response:
        kind = _PAGE_TYPES.get(name[name.rfind(".") :])
        if name not in files or kind is None:
            raise HTTPException(404)
        return Response(files[name], media_type=kind, headers=dict(PAGE_HEADERS))

    @app.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)  # HEAD: Ollama's clients
    async def index() -> Response:
        return page("index.html")

    @app.get("/page/{name}", include_in_schema=False)
    async def part(name: str) -> Response:
        return page(name)


def _add_error_handlers(app: FastAPI) -> None:
    async def refuse(request: Request, error: Exception) -> Response:
        return respond(http_error(error), request.url.path)

    async def refuse_body(request: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return respond(_validation_error(error), request.url.path)

    async def refuse_http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        path = request.url.path
        messages = {404: f"There is no {path}.", 405: f"{path} does not take {request.method}."}
        message = messages.get(error.status_code, str(error.detail))
        if error.__cause__ is not None:  # FastAPI could not read the body
            message = f"The body cannot be read as JSON: {error.__cause__}"
        return respond(status_error(error.status_code, message), path, **(error.headers or {}))

    app.add_exception_handler(GaplessError, refuse)
    app.add_exception_handler(RequestValidationError, refuse_body)
    app.add_exception_handler(HTTPException, refuse_http)
    app.add_exception_handler(Exception, refuse)


def _validation_error(error: RequestValidationError) -> HttpError:
    """The first thing that is wrong with a body, in words."""
    faults = error.errors()
    first = faults[0]
    if first["type"] == "json_invalid":
        reason = first.get("ctx", {}).get("error", "")
        return HttpError(400, f"The body is not JSON: {reason}", "invalid_request_error")
    if isinstance(error.body, bytes):
        return HttpError(400, "Send a body of content-type application/json.", "invalid_request_error")
    # A field that may have one of several types has a fault for each of them.
    param = _field(first, error.body)
    reasons = dict.fromkeys(fault["msg"] for fault in faults if _field(fault, error.body) == param)
    message = f"{param or 'The body'}: {'; or: '.join(reasons)}"
    return HttpError(400, message, "invalid_request_error", param or None)


def _field(fault: Mapping[str, Any], body: Any) -> str:
    """`messages[0].role`: where a fault is. The rest of its location is types that were tried."""
    name, value = "", body
    for part in fault["loc"][1:20]:
        if isinstance(part, int) and isinstance(value, list):
            name, value = f"{name}[{part}]", value[part]
        elif isinstance(value, dict) and (part in value or fault["type"] == "missing"):
            name, value = f"{name}.{part:.100}" if name else f"{part:.100}", value.get(part)
        else:
            break
    return name
