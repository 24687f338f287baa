"""Qwen 2 and 2.5: Llama with biases on q, k and v, and windows on the upper layers of some sizes.

Paper: https://arxiv.org/abs/2407.10671
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
class Qwen2Config(config.ModelConfig):
    layer_windows: tuple[int, ...]  # tokens that each layer sees; 0: all


def from_hf(keys: Keys) -> Qwen2Config:
    sizes = config.sizes_from_hf(keys)
    return Qwen2Config(
        **sizes,
        rope=rope_from_hf(keys, sizes["head_dim"], sizes["context_length"]),
        tied_embeddings=config.is_tied(keys, False),
        activation=config.activation_from_hf(keys, "hidden_act"),
        layer_windows=upper_layer_windows(keys, sizes["num_layers"]),
    )


def upper_layer_windows(keys: Keys, num_layers: int) -> tuple[int, ...]:
    """With `use_sliding_window`, layers from `max_window_layers` on have a window."""
    if not keys.flag("use_sliding_window", False):
        keys.integer("sliding_window", 0, minimum=0)  # present in most files, without effect
        keys.items("layer_types")
        return (0,) * num_layers
    first = keys.integer("max_window_layers", 28, minimum=0)
    is_sliding = [layer >= first for layer in range(num_layers)]
    return config.layer_windows_from_hf(keys, num_layers, keys.integer("sliding_window", 4096), is_sliding)


def from_gguf(keys: Keys) -> Qwen2Config:
    sizes = config.sizes_from_gguf(keys)
    return Qwen2Config(
        **sizes,
        rope=rope_from_gguf(keys, sizes["head_dim"], sizes["context_length"]),
        layer_windows=(0,) * sizes["num_layers"],
    )


def build(graph: GraphBuilder, config: Qwen2Config) -> Graph:
    table = config.rope.table(config.context_length)

    def layer(graph: GraphBuilder, index: int, hidden: Value) -> Value:
        window = config.layer_windows[index]
        return blocks.pre_norm_layer(graph, hidden, index, config, table, window=window, qkv_bias=True)

    return blocks.decoder(graph, config, layer)


ARCHITECTURE = Architecture(
    name="qwen2",
    hf_types=("qwen2",),
    gguf_types=("qwen2",),
    from_hf=from_hf,
    from_gguf=from_gguf,
    build=build,
    hf_tensors=tensors.HF,
    gguf_tensors=tensors.GGUF,
)
