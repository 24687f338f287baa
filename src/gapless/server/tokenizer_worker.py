"""The tokenizer's process: chat templates and encoding, away from the threads that compute."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zmq

from gapless import hub
from gapless.errors import ContextLengthError, GaplessError, InvalidRequestError
from gapless.loading import open_checkpoint
from gapless.server.channel import Codec, open_socket, pack_ids, unpack_ids
from gapless.server.failures import failure_of
from gapless.server.messages import (
    Chat,
    Decode,
    Decoded,
    Encode,
    Encoded,
    Fatal,
    FillIn,
    FromTokenizer,
    Prompt,
    Refused,
    Text,
    TokenizerReady,
    ToTokenizer,
    Whole,
)
from gapless.server.process import Settings, lifeline_has_ended, say_last_words
from gapless.tokenizer import ChatTemplate, Tokenizer, load_tokenizer

logger = logging.getLogger("gapless.server")

# Texts longer than this are encoded in pieces until it is clear that they fit: a MB takes a second.
_PIECE_CHARACTERS = 1 << 16
_TAIL_TOKENS = 16


class TokenizerWorker:
    """Answers one message at a time."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def ready(self) -> TokenizerReady:
        tokenizer, template = self._tokenizer, self._tokenizer.chat_template
        sources = () if template is None else (template.source, template.tool_source or "")
        return TokenizerReady(
            has_chat_template=template is not None,
            chat_template="\n".join(filter(None, sources)),
            can_fill_in=tokenizer.fim_tokens is not None,
            control_tokens=list(tokenizer.special_tokens),
        )

    def answer(self, message: ToTokenizer) -> FromTokenizer:
        try:
            if isinstance(message, Decode):
                return Decoded(message.number, self._tokenizer.decode(unpack_ids(message.token_ids)))
            return self._encoded(message)
        except GaplessError as error:
            return Refused(message.number, failure_of(error))
        except Exception as error:
            logger.exception("A prompt could not be encoded")
            return Refused(message.number, failure_of(error))

    def _encoded(self, message: Encode) -> Encoded:
        self._check_length(message.prompt, message.max_tokens)
        ids = self._encode(message.prompt)
        return Encoded(message.number, pack_ids(ids), self._tokenizer.decode(ids[-_TAIL_TOKENS:]))

    def _encode(self, prompt: Prompt) -> list[int]:
        tokenizer = self._tokenizer
        if isinstance(prompt, Text):
            return tokenizer.encode(prompt.text, add_special_tokens=True, parse_special=prompt.parse_special)
        if isinstance(prompt, Chat):
            return tokenizer.encode_chat(
                prompt.messages, prompt.tools, prompt.add_generation_prompt, **prompt.variables
            )
        if isinstance(prompt, Whole):
            return tokenizer.encode_whole(prompt.text)
        if (fim := tokenizer.fim_tokens) is None:
            raise InvalidRequestError(
                "This model has no tokens for filling in text, so it can't take a suffix.", param="suffix"
            )
        before, after = tokenizer.encode(prompt.prefix), tokenizer.encode(prompt.suffix)
        bos = (
            [] if not tokenizer.add_bos_token or tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        )
        return [*bos, fim.prefix_id, *before, fim.suffix_id, *after, fim.middle_id]

    def _check_length(self, prompt: Prompt, max_tokens: int) -> None:
        """ContextLengthError for a prompt that is far too long, without encoding all of it."""
        num_tokens = 0
        for text in _texts(prompt):
            for start in range(0, len(text) if len(text) > _PIECE_CHARACTERS else 0, _PIECE_CHARACTERS):
                piece = text[start : start + _PIECE_CHARACTERS]
                num_tokens += len(self._tokenizer.encode(piece)) - 1  # the cut may have parted one token
                if num_tokens > max_tokens:
                    raise ContextLengthError(
                        f"This model's maximum context length is {max_tokens} tokens (max_model_len), and "
                        f"the prompt is too long with more than {num_tokens}: shorten it or raise "
                        "max_model_len.",
                        param="messages" if isinstance(prompt, Chat) else "prompt",
                    )


def _texts(prompt: Prompt) -> Iterator[str]:
    if isinstance(prompt, Text | Whole):
        yield prompt.text
    elif isinstance(prompt, FillIn):
        yield prompt.prefix
        yield prompt.suffix
    else:
        for message in prompt.messages:
            content: Any = message.get("content")
            parts = content if isinstance(content, list) else [content]
            for part in parts:
                text = part.get("text") if isinstance(part, dict) else part
                if isinstance(text, str):
                    yield text


def load(settings: Settings) -> Tokenizer:
    """The model's tokenizer, with the operator's chat template if there is one."""
    # The checkpoint stays open as long as the process runs: the tokenizer reads its vocabulary from it.
    tokenizer = load_tokenizer(open_checkpoint(hub.resolve(settings.engine.model)))
    if settings.chat_template is not None:
        special = {} if tokenizer.chat_template is None else tokenizer.chat_template.special_tokens
        tokenizer.chat_template = ChatTemplate(Path(settings.chat_template).read_text("utf-8"), special)
    return tokenizer


def run(settings: Settings) -> None:
    """Answers messages until the lifeline ends."""
    codec: Codec[ToTokenizer] = Codec(ToTokenizer)
    socket = open_socket(zmq.DEALER, connect=settings.address)
    try:
        worker = TokenizerWorker(load(settings))
    except Exception as error:
        say_last_words(socket, codec.encode(Fatal(failure_of(error))))
        return
    socket.send(codec.encode(worker.ready()))
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    while True:
        ready = dict(poller.poll())
        if sys.stdin.fileno() in ready and lifeline_has_ended():
            return
        if socket in ready:
            socket.send(codec.encode(worker.answer(codec.decode(socket.recv()))))
