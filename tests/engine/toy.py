"""A model without weights: a tokenizer whose tokens are bytes, over the scripted executor."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

from fake_executor import FakeExecutor, make_sampling

from gapless.engine import Engine, EngineLimits
from gapless.engine.trace import Tracer
from gapless.llm import LLM
from gapless.runtime import Runtime
from gapless.tokenizer import ChatTemplate, Tokenizer
from gapless.tokenizer.tokenizer import TokenizerSettings
from gapless.tokenizer.vocabulary import PieceStyle, TokenKind, Vocabulary

BOS, EOS = 256, 257
VOCAB_SIZE = 258
TEMPLATE = "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }};{% endfor %}"


class ByteEncoder:
    def encode(self, text: str, parse_special: bool, guard: str = "") -> list[int]:
        if guard:
            text = text.replace(guard, "")
        return list(text.encode())


def byte_tokenizer(bos: int | None = BOS, template: str | None = TEMPLATE) -> Tokenizer:
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["<bos>", "<eos>"]
    kinds = bytearray([TokenKind.BYTE] * 256 + [TokenKind.CONTROL] * 2)
    return Tokenizer(
        Vocabulary(pieces, kinds, PieceStyle.SENTENCEPIECE),
        ByteEncoder(),
        TokenizerSettings(bos_token_id=bos, eos_token_ids=frozenset({EOS})),
        None if template is None else ChatTemplate(template),
    )


@contextlib.contextmanager
def running_engine(
    executor: FakeExecutor | None = None, tokenizer: Tokenizer | None = None, tracer: Tracer | None = None
) -> Iterator[tuple[Engine, FakeExecutor]]:
    executor = executor or FakeExecutor()
    limits = EngineLimits(executor.max_num_seqs, executor.max_seq_len, executor.num_blocks, VOCAB_SIZE)
    engine = Engine(executor, tokenizer or byte_tokenizer(), limits, make_sampling, tracer)
    try:
        yield engine, executor
    finally:
        engine.close()


@contextlib.contextmanager
def toy_llm(
    executor: FakeExecutor | None = None, tracer: Tracer | None = None, **options: Any
) -> Iterator[LLM]:
    with running_engine(executor, byte_tokenizer(**options), tracer) as (engine, _):
        checkpoint = SimpleNamespace(close=lambda: None, generation_config=MappingProxyType({}))
        model = SimpleNamespace(
            checkpoint=checkpoint, program=SimpleNamespace(weight_bytes=0), config=SimpleNamespace()
        )
        runtime = Runtime(Path("toy"), model, engine.tokenizer, engine, "generic", 1, 0, 0.0)
        with LLM.from_runtime(runtime) as llm:
            yield llm


def say(text: str, end: bool = True) -> Any:
    """A script: the model says `text`, then ends (or begins again)."""
    ids = [*text.encode(), EOS] if end else list(text.encode())
    return lambda token_ids, num_prompt: ids[(len(token_ids) - num_prompt) % len(ids)]
