"""Phi 3, 3.5 and 4: Llama with q/k/v and gate/up each in one tensor, LongRoPE, and partly rotated heads.

Report: https://arxiv.org/abs/2404.14219
"""

from __future__ import annotations

from dataclasses import dataclass

from gapless.graph.builder import GraphBuilder
from gapless.graph.ir import Graph, Value
from gapless.models import blocks, config, tensors
from gapless.models.keys import Keys
from gapless.models.registry import Architecture
from gapless.models.rope import rope_from_gguf, rope_from_hf
from gapless.models.tensors import Stored


@dataclass(frozen=True, kw_only=True)
class Phi3Config(config.ModelConfig):
    sliding_window: int = 0  # tokens that a layer sees; 0: all


def from_hf(keys: Keys) -> Phi3Config:
    sizes = config.sizes_from_hf(keys)
    keys.choice("attention_bias", (False,), False)
    parameters = keys.section("rope_parameters") or keys
    part = parameters.number("partial_rotary_factor", keys.number("partial_rotary_factor", 1.0), maximum=1.0)
    return Phi3Config(
        **sizes,
        rope=rope_from_hf(keys, int(sizes["head_dim"] * part), sizes["context_length"]),
        tied_embeddings=config.is_tied(keys, False),
        activation=config.activation_from_hf(keys, "hidden_act"),
        sliding_window=keys.integer("sliding_window", 0, minimum=0),
    )


def from_gguf(keys: Keys) -> Phi3Config:
    sizes = config.sizes_from_gguf(keys)
    rotary_dim = keys.integer("rope.dimension_count", sizes["head_dim"], maximum=sizes["head_dim"])
    return Phi3Config(
        **sizes,
        rope=rope_from_gguf(keys, rotary_dim, sizes["context_length"]),
        sliding_window=keys.integer("attention.sliding_window", 0, minimum=0),
    )


def build(graph: GraphBuilder, config: Phi3Config) -> Graph:
    table = config.rope.table(config.context_length)

    def layer(graph: GraphBuilder, index: int, hidden: Value) -> Value:
        return blocks.pre_norm_layer(graph, hidden, index, config, table, window=config.sliding_window)

    return blocks.decoder(graph, config, layer)


def _stacked(qkv: str, gate_up: str) -> dict[str, Stored]:
    parts = {
        ("layers.{i}.q.weight", "layers.{i}.k.weight", "layers.{i}.v.weight"): qkv,
        ("layers.{i}.gate.weight", "layers.{i}.up.weight"): gate_up,
    }
    return {name: Stored(tensor, stack) for stack, tensor in parts.items() for name in stack}


ARCHITECTURE = Architecture(
    name="phi3",
    hf_types=("phi3",),
    gguf_types=("phi3",),
    from_hf=from_hf,
    from_gguf=from_gguf,
    build=build,
    hf_tensors=tensors.HF
    | _stacked("model.layers.{i}.self_attn.qkv_proj.weight", "model.layers.{i}.mlp.gate_up_proj.weight"),
    gguf_tensors=tensors.GGUF | _stacked("blk.{i}.attn_qkv.weight", "blk.{i}.ffn_up.weight"),
)
