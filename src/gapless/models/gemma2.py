"""Gemma 2: norms around each block, every other layer with a sliding window, soft caps on scores and logits.

Paper: https://arxiv.org/abs/2408.00118
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gapless.graph.builder import GraphBuilder
from gapless.graph.ir import ActivationKind, Graph, Value
from gapless.models import blocks, config, tensors
from gapless.models.keys import Keys
from gapless.models.registry import Architecture
from gapless.models.rope import rope_from_gguf, rope_from_hf
from gapless.models.tensors import Stored

_LAYERS_OF_27B = 46  # GGUF does not tell the scale of the scores; only this size has hidden / heads in it


@dataclass(frozen=True, kw_only=True)
class Gemma2Config(config.ModelConfig):
    attention_scale: float
    attention_softcap: float
    logit_softcap: float
    layer_windows: tuple[int, ...]  # tokens that each layer sees; 0: all


def from_hf(keys: Keys) -> Gemma2Config:
    sizes = config.sizes_from_hf(keys, head_dim=256)
    num_layers = sizes["num_layers"]
    keys.choice("attention_bias", (False,), False)
    keys.choice("use_bidirectional_attention", (False,), False)
    return Gemma2Config(
        **sizes,
        rope=rope_from_hf(keys, sizes["head_dim"], sizes["context_length"]),
        tied_embeddings=config.is_tied(keys, True),
        activation=config.activation_from_hf(
            keys, "hidden_activation", "hidden_act", default="gelu_pytorch_tanh"
        ),
        attention_scale=keys.number("query_pre_attn_scalar", 256, minimum=1) ** -0.5,
        attention_softcap=_softcap(keys, "attn_logit_softcapping", 50.0),
        logit_softcap=_softcap(keys, "final_logit_softcapping", 30.0),
        layer_windows=config.layer_windows_from_hf(
            keys, num_layers, keys.integer("sliding_window", 4096), _is_sliding(num_layers)
        ),
    )


def _softcap(keys: Keys, name: str, default: float) -> float:
    return keys.number(name, 0.0 if keys.is_null(name) else default)


def _is_sliding(num_layers: int) -> list[bool]:
    return [layer % 2 == 0 for layer in range(num_layers)]


def from_gguf(keys: Keys) -> Gemma2Config:
    sizes = config.sizes_from_gguf(keys)
    num_layers, head_dim = sizes["num_layers"], sizes["head_dim"]
    scalar = sizes["hidden_size"] / sizes["num_heads"] if num_layers == _LAYERS_OF_27B else head_dim
    window = keys.integer("attention.sliding_window", 4096)
    return Gemma2Config(
        **sizes,
        rope=rope_from_gguf(keys, head_dim, sizes["context_length"]),
        activation=ActivationKind.GELU_TANH,
        attention_scale=scalar**-0.5,
        attention_softcap=keys.number("attn_logit_softcapping", 50),
        logit_softcap=keys.number("final_logit_softcapping", 30),
        layer_windows=tuple(window if sliding else 0 for sliding in _is_sliding(num_layers)),
    )


def build(graph: GraphBuilder, config: Gemma2Config) -> Graph:
    table = config.rope.table(config.context_length)

    def layer(graph: GraphBuilder, index: int, hidden: Value) -> Value:
        shape = blocks.attention_shape(
            config, config.attention_scale, config.layer_windows[index], config.attention_softcap
        )
        return blocks.sandwich_layer(graph, hidden, index, config, table, shape)

    return blocks.decoder(graph, config, layer, config.hidden_size**0.5, config.logit_softcap)


# Norms around both blocks have their own names. All norms multiply by 1 + weight; GGUF has it added already.
_NAMES = tensors.HF | tensors.table(
    {
        "layers.{i}.post_attention_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
        "layers.{i}.mlp_norm.weight": "model.layers.{i}.pre_feedforward_layernorm.weight",
        "layers.{i}.post_mlp_norm.weight": "model.layers.{i}.post_feedforward_layernorm.weight",
    }
)
HF_TENSORS: dict[str, Stored] = {
    name: replace(stored, add=1.0) if name.endswith("norm.weight") else stored
    for name, stored in _NAMES.items()
}

ARCHITECTURE = Architecture(
    name="gemma2",
    hf_types=("gemma2",),
    gguf_types=("gemma2",),
    from_hf=from_hf,
    from_gguf=from_gguf,
    build=build,
    hf_tensors=HF_TENSORS,
    gguf_tensors=tensors.GGUF,
)
