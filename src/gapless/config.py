"""What a user decides about a running model."""

from __future__ import annotations

import os
from dataclasses import dataclass

from gapless.sampling import check

ACTIVATIONS = ("a8", "a16")
KV_DTYPES = ("f16", "bf16", "int8")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Everything needed to start a model. InvalidRequestError (with `param`) for a value out of range."""

    model: str
    """A GGUF file, a Hugging Face folder, or the name of a model that has been pulled."""
    quant: str | None = None
    """InstantQuant of an unquantized checkpoint: "int8" or "int4", with a group size as in "int4:64"."""
    activations: str = "a8"
    """"a8": inputs of quantized layers are rounded to 8 bits; "a16": they are not."""
    num_threads: int | None = None
    """None: what affinity, the container's quota and the physical cores allow."""
    max_model_len: int | None = None
    """Tokens of prompt and output together; None: the model's context, or less if memory is short."""
    max_num_seqs: int = 64
    """Sequences that run at the same time; more wait."""
    kv_dtype: str = "f16"
    """Type of the KV cache: "f16", "bf16", or "int8", which takes about half the memory and is less exact."""
    kv_cache_gib: float | None = None
    """Upper bound of the KV cache; None: half of the free memory. Memory is taken only as the cache fills."""
    max_step_tokens: int = 512
    """Tokens of prompts and outputs that one step computes at most."""
    prefix_caching: bool = True
    """Sequences that begin alike share what has been computed for their beginning."""
    target_tpot_ms: float | None = None
    """Prompts are computed in pieces that aim at a token this often for running sequences; None: at 1.6 times
    their own time, and more while more sequences wait for their prompts than run."""
    trace: str | None = None
    """A file for a trace of every step and slot, to be opened in ui.perfetto.dev; written at the end."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", os.fspath(self.model))
        if self.trace is not None:
            object.__setattr__(self, "trace", os.fspath(self.trace))
        check.one_of("activations", self.activations, ACTIVATIONS)
        check.one_of("kv_dtype", self.kv_dtype, KV_DTYPES)
        if self.num_threads is not None:
            check.integer("num_threads", self.num_threads, 1, 1024)
        if self.max_model_len is not None:
            check.integer("max_model_len", self.max_model_len, 2)
        check.integer("max_num_seqs", self.max_num_seqs, 1, 1024)
        if self.kv_cache_gib is not None:
            check.real("kv_cache_gib", self.kv_cache_gib, 0.0, open_low=True)
        check.integer("max_step_tokens", self.max_step_tokens, 1, 1 << 16)
        check.boolean("prefix_caching", self.prefix_caching)
        if self.target_tpot_ms is not None:
            check.real("target_tpot_ms", self.target_tpot_ms, 0.0, open_low=True)
        if self.max_step_tokens < self.max_num_seqs:  # every running sequence must get its token in each step
            object.__setattr__(self, "max_step_tokens", self.max_num_seqs)
