"""Chat templates: the model's own way to write a conversation as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from gapless.errors import TemplateError
from gapless.tokenizer.messages import normalized_messages, with_serialized_arguments

if TYPE_CHECKING:
    import jinja2


class ChatTemplate:
    """A jinja2 template, compiled at first use and rendered in a sandbox with bounded time and output.

    `special_tokens` are the variables that templates expect, such as `bos_token`. `tool_source` is the
    template for requests with tools, where a model has one of its own for them.
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, tool_source: str | None = None
    ) -> None:
        self.source = source
        self.tool_source = tool_source
        self.special_tokens = dict(special_tokens or {})

    def render(
        self,
        /,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The conversation as text, ending where the model's answer begins if `add_generation_prompt`.

        Contents stand in it as they are, so a user's `<|im_end|>` looks like the template's: to get token
        ids, use `Tokenizer.encode_chat`, which knows them apart. `variables` are passed to the template
        (`enable_thinking`, for example). TemplateError if the template does not parse, raises, or takes too
        long; InvalidRequestError if a message is malformed.
        """
        return self.render_prepared(self.prepare(messages, tools, add_generation_prompt, **variables))

    def prepare(
        self,
        /,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> dict[str, Any]:
        """What `render_prepared` takes: everything that a request says, checked and in normal form."""
        normalized = normalized_messages(messages)
        if "developer" not in self._source_for(tools):
            for message in normalized:
                if message["role"] == "developer":
                    message["role"] = "system"
        return {
            **variables,
            "messages": normalized,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }

    def render_prepared(self, request: Mapping[str, Any]) -> str:
        """Render what `prepare` returned."""
        try:
            return self._render(request)
        except TypeError as error:
            # Some templates paste tool arguments into text and so want them as a JSON string.
            serialized = with_serialized_arguments(request["messages"])
            if serialized == request["messages"]:
                raise TemplateError(f"The chat template failed: {error}") from error
        try:
            return self._render({**request, "messages": serialized})
        except TypeError as error:
            raise TemplateError(f"The chat template failed: {error}") from error

    def _render(self, request: Mapping[str, Any]) -> str:
        from gapless.tokenizer.sandbox import render

        return render(self._compiled(request["tools"]), {**self.special_tokens, **request})

    def _source_for(self, tools: Any) -> str:
        return self.tool_source if tools and self.tool_source else self.source

    def _compiled(self, tools: Any) -> jinja2.Template:
        return self._tool_template if tools else self._template

    @cached_property
    def _template(self) -> jinja2.Template:
        from gapless.tokenizer.sandbox import compile_template

        return compile_template(self.source)

    @cached_property
    def _tool_template(self) -> jinja2.Template:
        from gapless.tokenizer.sandbox import compile_template

        return self._template if self.tool_source is None else compile_template(self.tool_source)
