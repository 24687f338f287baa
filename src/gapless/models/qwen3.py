"""Qwen 3 (dense): Llama with norms of q's and k's heads; head_dim is independent of hidden_size.

Paper: https://arxiv.org/abs/2505.09388
"""

from __future__ import annotations

from dataclasses import dataclass

from gapless.graph.builder import GraphBuilder
from gapless.graph.ir import Graph, Value
from gapless.models import blocks, config, tensors
from gapless.models.keys import Keys
from gapless.models.qwen2 import upper_layer_windows
from gapless.models.registry import Architecture
from gapless.models.rope import rope_from_gguf, rope_from_hf


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(config.ModelConfig):
    has_bias: bool  # on q, k, v and o
    layer_windows: tuple[int, ...]  # tokens that each layer sees; 0: all


def from_hf(keys: Keys) -> Qwen3Config:
    sizes = config.sizes_from_hf(keys, head_dim=128)
    return Qwen3Config(
        **sizes,
        rope=rope_from_hf(keys, sizes["head_dim"], sizes["context_length"]),
        tied_embeddings=config.is_tied(keys, False),
        activation=config.activation_from_hf(keys, "hidden_act"),
        has_bias=keys.flag("attention_bias", False),
        layer_windows=upper_layer_windows(keys, sizes["num_layers"]),
    )


def from_gguf(keys: Keys) -> Qwen3Config:
    sizes = config.sizes_from_gguf(keys)
    return Qwen3Config(
        **sizes,
        rope=rope_from_gguf(keys, sizes["head_dim"], sizes["context_length"]),
        has_bias=keys.has_tensor("blk.0.attn_q.bias"),
        layer_windows=(0,) * sizes["num_layers"],
    )


def build(graph: GraphBuilder, config: Qwen3Config) -> Graph:
    table = config.rope.table(config.context_length)

    def layer(graph: GraphBuilder, index: int, hidden: Value) -> Value:
        return blocks.pre_norm_layer(
            graph,
            hidden,
            index,
            config,
            table,
            window=config.layer_windows[index],
            qkv_bias=config.has_bias,
            out_bias=config.has_bias,
            qk_norm=True,
        )

    return blocks.decoder(graph, config, layer)


ARCHITECTURE = Architecture(
    name="qwen3",
    hf_types=("qwen3",),
    gguf_types=("qwen3",),
    from_hf=from_hf,
    from_gguf=from_gguf,
    build=build,
    hf_tensors=tensors.HF,
    gguf_tensors=tensors.GGUF,
)
