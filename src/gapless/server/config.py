"""What an operator decides about a server."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path

from gapless.config import EngineConfig
from gapless.sampling import check

MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Everything needed to serve a model. InvalidRequestError (with `param`) for a value out of range."""

    engine: EngineConfig
    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = field(default=None, repr=False)
    """Clients must send it as a bearer token; None: everybody is served."""
    served_model_name: str | None = None
    """The name in `/v1/models`; None: the file's."""
    max_queue: int = 1024
    """Sequences that may wait for a slot; more are refused with status 429."""
    max_body_mib: float = 4.0
    """Larger request bodies are refused."""
    header_timeout_s: float = 10.0
    """A connection that has not sent a whole request head within this time is closed."""
    body_timeout_s: float = 30.0
    """The same for a request's body."""
    send_timeout_s: float = 30.0
    """A client that takes nothing of what is sent to it for this long is dropped."""
    keep_alive_s: float = 30.0
    """How long an idle connection is kept."""
    request_timeout_s: float | None = None
    """A request that runs longer ends with an error; None: there is no limit."""
    drain_timeout_s: float = 30.0
    """After SIGTERM, running requests have this long to end."""
    num_tokenizers: int = 1
    """Processes that render chat templates and encode prompts."""
    cors_origins: tuple[str, ...] = ("*",)
    """Origins of web pages that may use the server; `*`: all of them."""
    tool_call_parser: str | None = None
    """How the model writes tool calls; None: what its chat template tells."""
    reasoning_parser: str | None = None
    """How the model marks its reasoning; None: what its chat template tells."""
    chat_template: str | None = None
    """A file with a chat template to use instead of the model's own."""
    access_log: bool = True

    def __post_init__(self) -> None:
        check.integer("port", self.port, 0, 65535)
        check.integer("max_queue", self.max_queue, 1)
        check.integer("num_tokenizers", self.num_tokenizers, 1, 64)
        for name in (
            "max_body_mib",
            "header_timeout_s",
            "body_timeout_s",
            "send_timeout_s",
            "keep_alive_s",
            "request_timeout_s",
            "drain_timeout_s",
        ):
            if (value := getattr(self, name)) is not None:
                check.real(name, value, 0.0, open_low=True)
        if self.api_key is not None and not self.api_key.strip():
            check.refuse("api_key", self.api_key, "a key that is not empty")
        if self.chat_template is not None and not Path(self.chat_template).is_file():
            check.refuse("chat_template", self.chat_template, "a file with a chat template")

    @property
    def max_body_bytes(self) -> int:
        return int(self.max_body_mib * MIB)

    @property
    def is_public(self) -> bool:
        """Whether other machines can reach the server."""
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host != "localhost"
