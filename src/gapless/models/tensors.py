"""Which tensor of a file a weight of the graph comes from: tables of names, and their resolution."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gapless.errors import FormatError, UnsupportedModelError
from gapless.graph.ir import Weight
from gapless.loading import Checkpoint, CheckpointKind
from gapless.quantization.source import TensorSource

logger = logging.getLogger(__name__)

I32 = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Stored:
    """How a file keeps a weight. `{i}` in names stands for the layer."""

    name: str
    stack: tuple[str, ...] = ()  # neutral names of the weights whose rows lie there one after the other
    interleaved: bool = False  # rows of each head in pairs (0, half, 1, half + 1, …) for GGUF's llama rope
    add: float = 0.0  # what to add to each value


TensorTable = Mapping[str, Stored]


def table(names: Mapping[str, str]) -> dict[str, Stored]:
    """A table in which every weight has a tensor of its own."""
    return {neutral: Stored(name) for neutral, name in names.items()}


HF = table(
    {
        "embedding.weight": "model.embed_tokens.weight",
        "norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
        "layers.{i}.attention_norm.weight": "model.layers.{i}.input_layernorm.weight",
        "layers.{i}.q.weight": "model.layers.{i}.self_attn.q_proj.weight",
        "layers.{i}.k.weight": "model.layers.{i}.self_attn.k_proj.weight",
        "layers.{i}.v.weight": "model.layers.{i}.self_attn.v_proj.weight",
        "layers.{i}.o.weight": "model.layers.{i}.self_attn.o_proj.weight",
        "layers.{i}.q.bias": "model.layers.{i}.self_attn.q_proj.bias",
        "layers.{i}.k.bias": "model.layers.{i}.self_attn.k_proj.bias",
        "layers.{i}.v.bias": "model.layers.{i}.self_attn.v_proj.bias",
        "layers.{i}.o.bias": "model.layers.{i}.self_attn.o_proj.bias",
        "layers.{i}.q_norm.weight": "model.layers.{i}.self_attn.q_norm.weight",
        "layers.{i}.k_norm.weight": "model.layers.{i}.self_attn.k_norm.weight",
        "layers.{i}.mlp_norm.weight": "model.layers.{i}.post_attention_layernorm.weight",
        "layers.{i}.gate.weight": "model.layers.{i}.mlp.gate_proj.weight",
        "layers.{i}.up.weight": "model.layers.{i}.mlp.up_proj.weight",
        "layers.{i}.down.weight": "model.layers.{i}.mlp.down_proj.weight",
    }
)

GGUF = table(
    {
        "embedding.weight": "token_embd.weight",
        "norm.weight": "output_norm.weight",
        "output.weight": "output.weight",
        "layers.{i}.attention_norm.weight": "blk.{i}.attn_norm.weight",
        "layers.{i}.q.weight": "blk.{i}.attn_q.weight",
        "layers.{i}.k.weight": "blk.{i}.attn_k.weight",
        "layers.{i}.v.weight": "blk.{i}.attn_v.weight",
        "layers.{i}.o.weight": "blk.{i}.attn_output.weight",
        "layers.{i}.q.bias": "blk.{i}.attn_q.bias",
        "layers.{i}.k.bias": "blk.{i}.attn_k.bias",
        "layers.{i}.v.bias": "blk.{i}.attn_v.bias",
        "layers.{i}.o.bias": "blk.{i}.attn_output.bias",
        "layers.{i}.q_norm.weight": "blk.{i}.attn_q_norm.weight",
        "layers.{i}.k_norm.weight": "blk.{i}.attn_k_norm.weight",
        "layers.{i}.mlp_norm.weight": "blk.{i}.ffn_norm.weight",
        "layers.{i}.gate.weight": "blk.{i}.ffn_gate.weight",
        "layers.{i}.up.weight": "blk.{i}.ffn_up.weight",
        "layers.{i}.down.weight": "blk.{i}.ffn_down.weight",
        "layers.{i}.post_attention_norm.weight": "blk.{i}.post_attention_norm.weight",
        "layers.{i}.post_mlp_norm.weight": "blk.{i}.post_ffw_norm.weight",
    }
)

GGUF_INTERLEAVED = {
    **GGUF,
    **{
        f"layers.{{i}}.{part}": Stored(f"blk.{{i}}.attn_{part}", interleaved=True)
        for part in ("q.weight", "k.weight", "q.bias", "k.bias")
    },
}

# Where multimodal wrappers put the text network: (prefix of the plain name, prefix in the file).
_HF_WRAPPERS = (
    ("", "language_model."),  # as transformers 4 saves them
    ("model.", "model.language_model."),  # as transformers 5 does
)
# Tensors that may stand in a file without being weights of the text network.
_NOT_WEIGHTS = (
    "rotary_emb.inv_freq",
    "rope_freqs.",
    "rope_factors_",
    "vision_tower.",
    "multi_modal_projector.",
)


def resolve(
    weights: Mapping[str, Weight], names: TensorTable, checkpoint: Checkpoint, head_dim: int
) -> dict[str, TensorSource]:
    """The source of every weight of a graph. Logs tensors that no weight uses.

    FormatError if a tensor is missing or has another shape than the graph needs; UnsupportedModelError if it
    is of a type that cannot be computed with.
    """
    sources = {
        name: _resolve_one(weight, _entry(name, names), weights, checkpoint, head_dim)
        for name, weight in weights.items()
    }
    used = {source.info.name for source in sources.values()}
    unused = [n for n in checkpoint.tensors if n not in used and not any(part in n for part in _NOT_WEIGHTS)]
    if unused:
        shown = ", ".join(unused[:5]) + (" …" if len(unused) > 5 else "")
        logger.info("%s: %d tensors are not used: %s", checkpoint.path, len(unused), shown)
    return sources


def _entry(neutral: str, names: TensorTable) -> Stored:
    """The table's entry, with the layer filled in."""
    head, _, rest = neutral.partition(".")
    layer, _, part = rest.partition(".")
    if head != "layers":
        return names[neutral]
    stored = names[f"layers.{{i}}.{part}"]
    stack = tuple(name.replace("{i}", layer) for name in stored.stack)
    return Stored(stored.name.replace("{i}", layer), stack, stored.interleaved, stored.add)


def _resolve_one(
    weight: Weight, stored: Stored, weights: Mapping[str, Weight], checkpoint: Checkpoint, head_dim: int
) -> TensorSource:
    file_name = _file_name(stored.name, checkpoint)
    info = checkpoint.tensors.get(file_name)
    if info is None:
        raise FormatError(f"{checkpoint.path}: tensor {file_name!r} ({weight.name}) is missing")
    stack = stored.stack or (weight.name,)
    num_rows = sum(weights[name].shape[0] for name in stack)
    expected = (num_rows, *weight.shape[1:])
    if info.shape != expected:
        raise FormatError(
            f"{checkpoint.path}: tensor {file_name!r} ({weight.name}) has shape {list(info.shape)}, "
            f"the configuration asks for {list(expected)}"
        )
    if not info.type.is_weight:
        raise UnsupportedModelError(f"{checkpoint.path}: tensor {file_name!r} is of type {info.type.name}.")
    return TensorSource(weight, info, _row_map(weight, stored, weights, head_dim), stored.add)


def _file_name(name: str, checkpoint: Checkpoint) -> str:
    if name in checkpoint.tensors or checkpoint.kind is CheckpointKind.GGUF:
        return name
    for plain, wrapped in _HF_WRAPPERS:
        candidate = wrapped + name.removeprefix(plain)
        if name.startswith(plain) and candidate in checkpoint.tensors:
            return candidate
    return name


def _row_map(weight: Weight, stored: Stored, weights: Mapping[str, Weight], head_dim: int) -> I32 | None:
    num_rows = weight.shape[0]
    if stored.interleaved:
        return deinterleaved_rows(num_rows, head_dim)
    if len(stored.stack) < 2:
        return None
    before = stored.stack[: stored.stack.index(weight.name)]
    start = sum(weights[name].shape[0] for name in before)
    return np.arange(start, start + num_rows, dtype=np.int32)


def deinterleaved_rows(num_rows: int, head_dim: int) -> I32:
    """Source rows that undo GGUF's llama layout: row h·d + s·d/2 + j of ours is their row h·d + 2j + s."""
    pairs = np.arange(num_rows, dtype=np.int32).reshape(-1, head_dim // 2, 2)
    return np.ascontiguousarray(pairs.transpose(0, 2, 1)).reshape(-1)
