"""Tells what a model thinks from what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from gapless.errors import InvalidRequestError
from gapless.server.parsing.deltas import ReasoningDelta
from gapless.server.parsing.pieces import PieceParser, Steps


class Tags(NamedTuple):
    """The texts around a model's thoughts."""

    opening: str
    closing: str

    def opened_by(self, prompt: str) -> bool:
        """Whether a prompt, or its end, leaves the thoughts open, so that the model begins inside of them."""
        return prompt.rstrip().endswith(self.opening)


_THINK = Tags("<think>", "</think>")
_SEED = Tags("<seed:think>", "</seed:think>")
_MISTRAL = Tags("[THINK]", "[/THINK]")
_COHERE = Tags("<|START_THINKING|>", "<|END_THINKING|>")
_KIMI_VL = Tags("◁think▷", "◁/think▷")
_EXAONE = Tags("<thought>", "</thought>")

REASONING_TAGS: Mapping[str, Tags] = MappingProxyType(
    {
        "think": _THINK,
        "deepseek_r1": _THINK,
        "glm45": _THINK,
        "qwen3": _THINK,
        "seed_oss": _SEED,
        "mistral": _MISTRAL,
        "cohere": _COHERE,
        "kimi_vl": _KIMI_VL,
        "exaone": _EXAONE,
    }
)
"""Tags by the names that a user can ask for."""


def find_reasoning_tags(name: str) -> Tags:
    """The tags of that name. InvalidRequestError, with the known names, if there are none."""
    try:
        return REASONING_TAGS[name]
    except KeyError:
        raise InvalidRequestError(
            f"There is no reasoning parser {name!r:.100}. Known: {', '.join(REASONING_TAGS)}.",
            param="reasoning_parser",
        ) from None


def reasoning_tags(template_source: str) -> Tags | None:
    """The tags that a chat template speaks of, if its model thinks aloud."""
    for tags in REASONING_TAGS.values():
        if tags.opening in template_source or tags.closing in template_source:
            return tags
    return None


class ReasoningParser(PieceParser):
    """Splits a model's text into thoughts, which come first if at all, and content.

    `starts_inside`: the prompt has opened the thoughts already. Thoughts that are never closed go on to the
    end. Further tags in the content are content: a model may well write about them. White space around the
    tags is dropped.
    """

    def __init__(self, tags: Tags, starts_inside: bool = False) -> None:
        super().__init__()
        self._tags = tags
        self._starts_inside = starts_inside

    def _read(self) -> Steps[None]:
        yield from self._space()
        opened = yield from self._take(self._tags.opening)  # some models repeat what the prompt ends with
        if opened or self._starts_inside:
            yield from self._space()
            self._drop()
            yield from self._give_until(self._tags.closing, ReasoningDelta)
            yield from self._space()
            self._drop()
        yield from self._give_rest()
