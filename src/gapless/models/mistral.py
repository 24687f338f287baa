"""Mistral 7B and its kin: Llama with an optional sliding window. In GGUF it calls itself llama.

Paper: https://arxiv.org/abs/2310.06825
"""

from __future__ import annotations

from dataclasses import replace

from gapless.models import llama, tensors
from gapless.models.keys import Keys
from gapless.models.llama import LlamaConfig
from gapless.models.registry import Architecture

_DEFAULT_WINDOW = 4096  # of transformers, where the key is absent; null switches it off


def from_hf(keys: Keys) -> LlamaConfig:
    default = 0 if keys.is_null("sliding_window") else _DEFAULT_WINDOW
    return replace(llama.from_hf(keys), sliding_window=keys.integer("sliding_window", default, minimum=0))


ARCHITECTURE = Architecture(
    name="mistral",
    hf_types=("mistral",),
    gguf_types=(),
    from_hf=from_hf,
    from_gguf=llama.from_gguf,
    build=llama.build,
    hf_tensors=tensors.HF,
    gguf_tensors=tensors.GGUF_INTERLEAVED,
)
