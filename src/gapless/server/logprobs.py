"""Log-probabilities as the APIs show them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gapless.server.messages import TokenLogprob, TokenLogprobs

# JSON has no infinity: what is impossible gets this, as in OpenAI's API.
IMPOSSIBLE = -9999.0


def chat_logprobs(positions: Iterable[TokenLogprobs], num_top: int) -> list[dict[str, Any]]:
    """The `content` of a chat choice's logprobs."""
    return [
        {**_entry(position[0]), "top_logprobs": [_entry(one) for one in _likeliest(position, num_top)]}
        for position in positions
    ]


def _entry(one: TokenLogprob) -> dict[str, Any]:
    return {"token": _text(one), "logprob": _value(one), "bytes": list(one.piece)}


def _likeliest(position: TokenLogprobs, count: int) -> list[TokenLogprob]:
    return sorted(position, key=lambda one: one.rank)[:count]


def _text(one: TokenLogprob) -> str:
    return one.piece.decode("utf-8", "replace")


def _value(one: TokenLogprob) -> float:
    return IMPOSSIBLE if one.logprob is None else one.logprob


class CompletionLogprobs:
    """Logprobs of a completion's choice: lists over its tokens. Offsets count characters."""

    def __init__(self, num_top: int) -> None:
        self._num_top = num_top
        self._offset = 0

    def lists(self, positions: Iterable[TokenLogprobs]) -> dict[str, Any]:
        """For the tokens that follow those of earlier calls."""
        result: dict[str, list[Any]] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for position in positions:
            chosen = position[0]
            result["text_offset"].append(self._offset)
            result["tokens"].append(_text(chosen))
            result["token_logprobs"].append(_value(chosen) if chosen.rank else None)
            result["top_logprobs"].append(self._top(position) if chosen.rank else None)
            self._offset += len(_text(chosen))
        return result

    def _top(self, position: TokenLogprobs) -> dict[str, float]:
        chosen = position[0]
        top = {_text(one): _value(one) for one in _likeliest(position, self._num_top)}
        return top if _text(chosen) in top else {**top, _text(chosen): _value(chosen)}
