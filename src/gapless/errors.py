"""The exception tree. Every error a user can cause is a GaplessError that names the value and the remedy.

GaplessError
├── LoadError               a model cannot be loaded
│   ├── FormatError         a file breaks its format (also a ValueError)
│   └── UnsupportedModelError   well-formed, but not something Gapless can run
├── InvalidRequestError     a request cannot be served as asked (also a ValueError)
│   └── ContextLengthError  a prompt does not fit the context
├── TemplateError           a chat template is missing or refuses the messages (also a ValueError)
└── EngineError             the engine failed or was shut down under a request
"""


class GaplessError(Exception):
    """Base of all errors raised on purpose by Gapless."""


class LoadError(GaplessError):
    """A model cannot be loaded."""


class FormatError(LoadError, ValueError):
    """A file breaks the rules of its format; the message names the file, the place and the value."""


class UnsupportedModelError(LoadError):
    """A well-formed file asks for an architecture, type or option that Gapless does not have."""


class InvalidRequestError(GaplessError, ValueError):
    """A request or a sampling parameter is out of range; `param` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(InvalidRequestError):
    """Prompt (plus at least one new token) does not fit into `max_model_len`."""


class TemplateError(GaplessError, ValueError):
    """The chat template is missing, does not parse, or raised on these messages."""


class EngineError(GaplessError):
    """The engine stopped, or failed while it held the request."""
