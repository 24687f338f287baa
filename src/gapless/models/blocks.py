"""The parts that decoders are made of, in the words of the papers. Weights are named `layers.<i>.<part>`."""

from __future__ import annotations

from collections.abc import Callable

from gapless.graph.builder import GraphBuilder
from gapless.graph.ir import AttentionShape, Graph, RopeTable, Value
from gapless.models.config import ModelConfig

Layer = Callable[[GraphBuilder, int, Value], Value]


def decoder(
    graph: GraphBuilder, config: ModelConfig, layer: Layer, embedding_scale: float = 1.0, softcap: float = 0.0
) -> Graph:
    """Embedding, the layers, a last norm, and logits for the rows that need them."""
    hidden = graph.embed("embedding.weight", config.vocab_size, config.hidden_size, embedding_scale)
    for index in range(config.num_layers):
        hidden = layer(graph, index, hidden)
    states = graph.rms_norm(graph.gather(hidden), "norm.weight", config.norm_eps)
    output = "embedding.weight" if config.tied_embeddings else "output.weight"
    logits = graph.linear(states, output, config.vocab_size)
    return graph.finish(graph.softcap(logits, softcap) if softcap else logits, states)


def attention_shape(
    config: ModelConfig, scale: float | None = None, window: int = 0, softcap: float = 0.0
) -> AttentionShape:
    """The configuration's shape; scores are multiplied by head_dim^-0.5 unless `scale` is given."""
    scale = config.head_dim**-0.5 if scale is None else scale
    return AttentionShape(config.num_heads, config.num_kv_heads, config.head_dim, scale, window, softcap)


def attention(
    graph: GraphBuilder,
    x: Value,
    layer: int,
    shape: AttentionShape,
    table: RopeTable,
    *,
    qkv_bias: bool = False,
    out_bias: bool = False,
    norm_eps: float | None = None,
) -> Value:
    """Grouped-query attention with rotary positions; `norm_eps` asks for RMS norms of q's and k's heads."""
    at = f"layers.{layer}"

    def project(part: str, width: int) -> Value:
        return graph.linear(x, f"{at}.{part}.weight", width, f"{at}.{part}.bias" if qkv_bias else None)

    q, k, v = project("q", shape.q_width), project("k", shape.kv_width), project("v", shape.kv_width)
    if norm_eps is not None:
        q = graph.head_norm(q, f"{at}.q_norm.weight", shape.head_dim, norm_eps)
        k = graph.head_norm(k, f"{at}.k_norm.weight", shape.head_dim, norm_eps)
    q, k = graph.rope(q, table, shape.head_dim), graph.rope(k, table, shape.head_dim)
    heads = graph.attention(q, k, v, layer, shape)
    return graph.linear(heads, f"{at}.o.weight", x.width, f"{at}.o.bias" if out_bias else None)


def gated_mlp(graph: GraphBuilder, x: Value, layer: int, config: ModelConfig) -> Value:
    """down(act(gate(x)) * up(x))"""
    at = f"layers.{layer}"
    gate = graph.linear(x, f"{at}.gate.weight", config.intermediate_size)
    up = graph.linear(x, f"{at}.up.weight", config.intermediate_size)
    return graph.linear(graph.mul(graph.activate(gate, config.activation), up), f"{at}.down.weight", x.width)


def pre_norm_layer(
    graph: GraphBuilder,
    hidden: Value,
    layer: int,
    config: ModelConfig,
    table: RopeTable,
    *,
    window: int = 0,
    qkv_bias: bool = False,
    out_bias: bool = False,
    qk_norm: bool = False,
) -> Value:
    """Llama's layer: h += attention(norm(h)); h += mlp(norm(h))."""
    x = graph.rms_norm(hidden, f"layers.{layer}.attention_norm.weight", config.norm_eps)
    attended = attention(
        graph,
        x,
        layer,
        attention_shape(config, window=window),
        table,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
        norm_eps=config.norm_eps if qk_norm else None,
    )
    hidden = graph.add(hidden, attended)
    x = graph.rms_norm(hidden, f"layers.{layer}.mlp_norm.weight", config.norm_eps)
    return graph.add(hidden, gated_mlp(graph, x, layer, config))


def sandwich_layer(
    graph: GraphBuilder,
    hidden: Value,
    layer: int,
    config: ModelConfig,
    table: RopeTable,
    shape: AttentionShape,
    qk_norm: bool = False,
) -> Value:
    """Gemma's layer: norms before and after; h += norm(attention(norm(h))); h += norm(mlp(norm(h)))."""
    at, eps = f"layers.{layer}", config.norm_eps
    x = graph.rms_norm(hidden, f"{at}.attention_norm.weight", eps)
    attended = attention(graph, x, layer, shape, table, norm_eps=eps if qk_norm else None)
    hidden = graph.add(hidden, graph.rms_norm(attended, f"{at}.post_attention_norm.weight", eps))
    x = graph.rms_norm(hidden, f"{at}.mlp_norm.weight", eps)
    fed = gated_mlp(graph, x, layer, config)
    return graph.add(hidden, graph.rms_norm(fed, f"{at}.post_mlp_norm.weight", eps))
