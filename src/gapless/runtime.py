"""Puts a running model together: files, tokenizer, Program, KV cache, executor and engine."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from gapless import hub
from gapless.config import EngineConfig
from gapless.engine import Engine, EngineLimits
from gapless.engine.memory import GIB, plan_kv
from gapless.engine.trace import Tracer

if TYPE_CHECKING:
    from gapless.models.loader import LoadedModel
    from gapless.tokenizer import Tokenizer

logger = logging.getLogger("gapless")

LoadProgress = Callable[[int, int], None]  # bytes done, bytes in all

# Rows of logits that are computed at once. More would only make the buffer larger: it holds the whole
# vocabulary in f32.
_MAX_LOGIT_ROWS = 64


@dataclass(frozen=True)
class Runtime:
    """A model that runs. `isa` and the sizes are for reports."""

    path: Path
    model: LoadedModel
    tokenizer: Tokenizer
    engine: Engine
    isa: str
    num_threads: int
    kv_bytes: int
    load_s: float

    def close(self) -> None:
        """Ends the engine, then lets go of the files. Idempotent."""
        self.engine.close()
        self.model.checkpoint.close()


def start(
    config: EngineConfig, progress: LoadProgress | None = None, tracer: Tracer | None = None
) -> Runtime:
    """Loads the model and starts its engine. `tracer`: one of the caller's, instead of `config.trace`.

    LoadError if the model is missing or cannot be run, InvalidRequestError if the configuration does not fit
    it.
    """
    path = hub.resolve(config.model)
    if tracer is None and config.trace is not None:
        tracer = Tracer(config.trace)
    started = time.perf_counter()
    from gapless import _native
    from gapless.loading import open_checkpoint
    from gapless.models.loader import load_model
    from gapless.tokenizer import load_tokenizer

    cpu = _native.cpu_info()
    num_threads = config.num_threads or int(cpu["num_threads"])
    checkpoint = open_checkpoint(path)
    # The vocabulary is read beside the packing of the weights, which runs without the GIL: loading is over
    # sooner, and what the tokenizer needs for a moment comes before the weights have filled the memory.
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="gapless-tokenizer") as beside:
        pending = beside.submit(load_tokenizer, checkpoint)
        model = load_model(
            checkpoint,
            quant=config.quant,
            activations=config.activations,
            num_threads=num_threads,
            max_step_tokens=config.max_step_tokens,
            max_logit_rows=min(config.max_num_seqs, _MAX_LOGIT_ROWS),
            max_model_len=config.max_model_len,
            kv_dtype=config.kv_dtype,
            progress=progress,
        )
        tokenizer = pending.result()
    block_size = _native.Executor.block_size
    plan = plan_kv(
        bytes_per_token=model.kv_bytes_per_token,
        block_size=block_size,
        context_length=model.config.context_length,
        max_num_seqs=config.max_num_seqs,
        max_model_len=config.max_model_len,
        kv_cache_gib=config.kv_cache_gib,
    )
    executor = _native.Executor(
        model.program,
        num_blocks=plan.num_blocks,
        max_num_seqs=config.max_num_seqs,
        max_seq_len=plan.max_model_len,
        max_step_tokens=config.max_step_tokens,
        num_threads=num_threads,
        trace=tracer is not None,
    )
    executor.set_target_tpot((config.target_tpot_ms or 0.0) / 1000)
    limits = EngineLimits(
        config.max_num_seqs,
        plan.max_model_len,
        plan.num_blocks,
        model.config.vocab_size,
        config.prefix_caching,
        model.config.pooling,
    )
    engine = Engine(executor, tokenizer, limits, _native.Sampling, tracer)
    _return_free_memory()
    load_s = time.perf_counter() - started
    logger.info(
        "%s: ISA %s, %d threads, activations %s, weights %.2f GiB, KV cache of %d tokens in %s (%.2f GiB "
        "when full), sequences of up to %d tokens, loaded in %.2f s",
        path.name,
        cpu["isa"],
        num_threads,
        config.activations,
        model.program.weight_bytes / GIB,
        plan.num_blocks * block_size,
        config.kv_dtype,
        executor.kv_bytes / GIB,
        plan.max_model_len,
        load_s,
    )
    return Runtime(path, model, tokenizer, engine, str(cpu["isa"]), num_threads, executor.kv_bytes, load_s)


def _return_free_memory() -> None:
    """Gives back what loading has freed: the allocator keeps up to 14 MB of it."""
    import ctypes

    with contextlib.suppress(OSError, AttributeError):  # only glibc has it
        ctypes.CDLL(None).malloc_trim(0)
