"""`gapless serve`: logs for a terminal or a journal, then the server."""

from __future__ import annotations

import logging

from gapless.server.config import ServerConfig
from gapless.server.serve import serve


def serve_model(config: ServerConfig) -> None:
    """Serves until it is told to end."""
    # What an operator wants to see without asking: where the server is, what it loads, and each request.
    logging.getLogger("gapless").setLevel(logging.INFO)
    serve(config)
