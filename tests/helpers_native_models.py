"""Runs a model in the native core without an engine above it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from gapless import _native
from gapless.models import load_model
from helpers_models import Array

NUM_BLOCKS = 8  # of 16 tokens: the context of the tiny models


def native_logprobs(path: Path, tokens: Array, *, step_tokens: int = 64, **options: Any) -> Array:
    """Log-probabilities [num_tokens, vocab_size] of what follows each token; `options` are load_model's."""
    with _running(path, step_tokens, options) as (executor, vocab_size):
        sampling = _native.Sampling(
            max_tokens=1, temperature=0.0, num_logprobs=vocab_size, num_prompt_logprobs=vocab_size
        )
        found = np.full((len(tokens), vocab_size), np.nan)
        for event in _events(executor, tokens, sampling):
            if event[0] in ("token", "prompt_logprobs"):
                row = event[2] - 1 if event[0] == "prompt_logprobs" else len(tokens) - 1
                for token_id, logprob in event[-1]:
                    found[row, token_id] = logprob
    assert not np.isnan(found).any()
    return found


def native_embeddings(
    path: Path, tokens: Array, normalize: bool = False, *, step_tokens: int = 64, **options: Any
) -> dict[str, Array]:
    """The embedding of a prompt [hidden_size] by each kind of pooling; `options` are load_model's."""
    found = {}
    with _running(path, step_tokens, options) as (executor, _):
        for pooling in ("last", "mean", "cls"):
            sampling = _native.Sampling(max_tokens=0, pooling=pooling, normalize=normalize)
            *_, embedding, finished = _events(executor, tokens, sampling)
            assert finished == ("finished", 1, "stop", len(tokens))
            assert embedding[:2] == ("embedding", 1)
            found[pooling] = embedding[2]
    return found


@contextlib.contextmanager
def _running(path: Path, step_tokens: int, options: dict[str, Any]) -> Iterator[tuple[_native.Executor, int]]:
    """An executor with one slot, and the size of the vocabulary."""
    model = load_model(path, num_threads=1, max_step_tokens=step_tokens, max_logit_rows=8, **options)
    executor = _native.Executor(
        model.program,
        num_blocks=NUM_BLOCKS,
        max_num_seqs=1,
        max_seq_len=NUM_BLOCKS * _native.Executor.block_size,
        max_step_tokens=step_tokens,
        num_threads=1,
    )
    try:
        yield executor, model.config.vocab_size
    finally:
        executor.close()
        model.checkpoint.close()


def _events(
    executor: _native.Executor, tokens: Array, sampling: _native.Sampling
) -> Iterator[tuple[Any, ...]]:
    """Runs one sequence; its events up to the end."""
    blocks = np.arange(NUM_BLOCKS, dtype=np.int32)
    executor.admit(0, 1, np.asarray(tokens, np.int32), blocks, sampling)
    while True:
        events = executor.wait(60.0)
        assert events, "nothing happens"
        for event in events:
            assert event[0] != "failed", event
            yield event
            if event[0] == "finished":
                return
