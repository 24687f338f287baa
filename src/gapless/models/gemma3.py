"""Gemma 3 (text): Gemma 2 with norms of q's and k's heads instead of soft caps; five layers of six have a
sliding window and rotary frequencies of their own.

Report: https://arxiv.org/abs/2503.19786
"""

from __future__ import annotations

from dataclasses import dataclass

from gapless.graph.builder import GraphBuilder
from gapless.graph.ir import ActivationKind, Graph, Value
from gapless.models import blocks, config, tensors
from gapless.models.gemma2 import HF_TENSORS
from gapless.models.keys import Keys
from gapless.models.registry import Architecture
from gapless.models.rope import RopeConfig, rope_from_gguf, rope_from_hf

_PATTERN = 6  # every sixth layer sees everything
_LOCAL_BASE, _GLOBAL_BASE = 10000.0, 1000000.0
_LAYERS_OF_27B = 62  # GGUF does not tell the scale of the scores; only this size has hidden / heads in it

_HF_DEFAULTS = {  # the published 4B leaves these out
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
}


@dataclass(frozen=True, kw_only=True)
class Gemma3Config(config.ModelConfig):
    local_rope: RopeConfig  # of the layers with a window; `rope` is the others'
    attention_scale: float
    attention_softcap: float
    logit_softcap: float
    layer_windows: tuple[int, ...]  # tokens that each layer sees; 0: all


def from_hf(keys: Keys) -> Gemma3Config:
    sizes = config.sizes_from_hf(keys, **_HF_DEFAULTS)
    num_layers, head_dim, context_length = sizes["num_layers"], sizes["head_dim"], sizes["context_length"]
    keys.choice("attention_bias", (False,), False)
    keys.choice("use_bidirectional_attention", (False,), False)
    pattern = keys.integer("sliding_window_pattern", keys.integer("_sliding_window_pattern", _PATTERN))
    return Gemma3Config(
        **sizes,
        rope=rope_from_hf(keys, head_dim, context_length, _GLOBAL_BASE, "full_attention"),
        local_rope=_local_rope_from_hf(keys, head_dim, context_length),
        tied_embeddings=config.is_tied(keys, True),
        activation=config.activation_from_hf(
            keys, "hidden_activation", "hidden_act", default="gelu_pytorch_tanh"
        ),
        attention_scale=keys.number("query_pre_attn_scalar", 256, minimum=1) ** -0.5,
        attention_softcap=keys.number("attn_logit_softcapping", 0),
        logit_softcap=keys.number("final_logit_softcapping", 0),
        layer_windows=config.layer_windows_from_hf(
            keys, num_layers, keys.integer("sliding_window", 4096), _is_sliding(num_layers, pattern)
        ),
    )


def _local_rope_from_hf(keys: Keys, head_dim: int, context_length: int) -> RopeConfig:
    base = keys.number("rope_local_base_freq", _LOCAL_BASE)
    if keys.section("rope_parameters") is None:
        return RopeConfig(base, head_dim)
    return rope_from_hf(keys, head_dim, context_length, base, "sliding_attention")


def _is_sliding(num_layers: int, pattern: int) -> list[bool]:
    return [(layer + 1) % pattern != 0 for layer in range(num_layers)]


def from_gguf(keys: Keys) -> Gemma3Config:
    sizes = config.sizes_from_gguf(keys)
    num_layers, head_dim = sizes["num_layers"], sizes["head_dim"]
    scalar = sizes["hidden_size"] / sizes["num_heads"] if num_layers == _LAYERS_OF_27B else head_dim
    window = keys.integer("attention.sliding_window", 1024)
    pattern = keys.integer("attention.sliding_window_pattern", _PATTERN)
    return Gemma3Config(
        **sizes,
        rope=rope_from_gguf(keys, head_dim, sizes["context_length"], _GLOBAL_BASE),
        local_rope=RopeConfig(keys.number("rope.freq_base_swa", _LOCAL_BASE), head_dim),
        activation=ActivationKind.GELU_TANH,
        attention_scale=scalar**-0.5,
        attention_softcap=keys.number("attn_logit_softcapping", 0),
        logit_softcap=keys.number("final_logit_softcapping", 0),
        layer_windows=tuple(window if sliding else 0 for sliding in _is_sliding(num_layers, pattern)),
    )


def build(graph: GraphBuilder, config: Gemma3Config) -> Graph:
    global_table = config.rope.table(config.context_length)
    local_table = config.local_rope.table(config.context_length)

    def layer(graph: GraphBuilder, index: int, hidden: Value) -> Value:
        window = config.layer_windows[index]
        shape = blocks.attention_shape(config, config.attention_scale, window, config.attention_softcap)
        table = local_table if window else global_table
        return blocks.sandwich_layer(graph, hidden, index, config, table, shape, qk_norm=True)

    return blocks.decoder(graph, config, layer, config.hidden_size**0.5, config.logit_softcap)


ARCHITECTURE = Architecture(
    name="gemma3",
    hf_types=("gemma3", "gemma3_text"),
    gguf_types=("gemma3",),
    from_hf=from_hf,
    from_gguf=from_gguf,
    build=build,
    hf_tensors=HF_TENSORS,
    gguf_tensors=tensors.GGUF,
)
