"""Llama 1 to 3.x, and what shares its network: SmolLM, Yi, DeepSeek's Llama distillations, TinyLlama.

Papers: https://arxiv.org/abs/2302.13971, https://arxiv.org/abs/2407.21783
"""

from __future__ import annotations

from dataclasses import dataclass

from gapless.graph.builder import GraphBuilder
from gapless.graph.ir import Graph, Value
from gapless.models import blocks, config, tensors
from gapless.models.keys import Keys
from gapless.models.registry import Architecture
from gapless.models.rope import rope_from_gguf, rope_from_hf


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(config.ModelConfig):
    qkv_bias: bool = False
    out_bias: bool = False
    sliding_window: int = 0  # tokens that a layer sees; 0: all


def from_hf(keys: Keys) -> LlamaConfig:
    sizes = config.sizes_from_hf(keys)
    keys.choice("mlp_bias", (False,), False)
    has_bias = keys.flag("attention_bias", False)
    return LlamaConfig(
        **sizes,
        rope=rope_from_hf(keys, sizes["head_dim"], sizes["context_length"]),
        tied_embeddings=config.is_tied(keys, False),
        activation=config.activation_from_hf(keys, "hidden_act"),
        qkv_bias=has_bias,
        out_bias=has_bias,
    )


def from_gguf(keys: Keys) -> LlamaConfig:
    sizes = config.sizes_from_gguf(keys)
    rotary_dim = keys.integer("rope.dimension_count", sizes["head_dim"], maximum=sizes["head_dim"])
    return LlamaConfig(
        **sizes,
        rope=rope_from_gguf(keys, rotary_dim, sizes["context_length"]),
        qkv_bias=keys.has_tensor("blk.0.attn_q.bias"),
        out_bias=keys.has_tensor("blk.0.attn_output.bias"),
    )


def build(graph: GraphBuilder, config: LlamaConfig) -> Graph:
    table = config.rope.table(config.context_length)

    def layer(graph: GraphBuilder, index: int, hidden: Value) -> Value:
        return blocks.pre_norm_layer(
            graph,
            hidden,
            index,
            config,
            table,
            window=config.sliding_window,
            qkv_bias=config.qkv_bias,
            out_bias=config.out_bias,
        )

    return blocks.decoder(graph, config, layer)


ARCHITECTURE = Architecture(
    name="llama",
    hf_types=("llama",),
    gguf_types=("llama",),
    from_hf=from_hf,
    from_gguf=from_gguf,
    build=build,
    hf_tensors=tensors.HF,
    gguf_tensors=tensors.GGUF_INTERLEAVED,
)
