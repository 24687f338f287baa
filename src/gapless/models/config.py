"""What every decoder's configuration has, and how the two file kinds spell it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gapless.errors import FormatError, UnsupportedModelError
from gapless.graph.ir import ActivationKind
from gapless.models.keys import Keys
from gapless.models.rope import RopeConfig
from gapless.sampling import Pooling

MAX_HEAD_DIM = 4096  # far above any real one: tables of this size are made before tensors are looked at

# Keys that say nothing about what the network computes, or repeat what others say.
HARMLESS_HF_KEYS = frozenset(
    {
        "_name_or_path",
        "architectures",
        "attention_dropout",
        "auto_map",
        "bos_token_id",
        "boi_token_index",
        "cache_implementation",
        "chunk_size_feed_forward",
        "dtype",
        "embd_pdrop",
        "eoi_token_index",
        "eos_token_id",
        "id2label",
        "image_token_index",
        "initializer_range",
        "is_decoder",
        "is_encoder_decoder",
        "keys_to_ignore_at_inference",
        "label2id",
        "max_window_layers",
        "mm_tokens_per_image",
        "model_type",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "resid_pdrop",
        "return_dict",
        "sep_token_id",
        "text_config",
        "torch_dtype",
        "transformers_version",
        "transformers.js_config",
        "use_cache",
        "vision_config",
    }
)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and constants of a decoder. Models add what only they have."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_length: int  # tokens that the model was trained for, after rope scaling
    norm_eps: float
    rope: RopeConfig
    tied_embeddings: bool
    activation: ActivationKind = ActivationKind.SILU
    pooling: Pooling | None = Pooling.LAST  # of embeddings, by its files; None: a way that Gapless lacks

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise FormatError(
                f"{self.num_heads} heads cannot share {self.num_kv_heads} key-value heads evenly"
            )
        if self.rope.rotary_dim > self.head_dim:
            raise FormatError(
                f"{self.rope.rotary_dim} rotary values do not fit into heads of {self.head_dim}"
            )


def sizes_from_hf(keys: Keys, **defaults: int | float) -> dict[str, Any]:
    """The fields that all models spell alike in config.json; `rope`, ties and activation are the model's.

    `defaults`, by key, are for models whose published files leave keys out.
    """
    if keys.has("quantization_config"):
        raise keys.refuse("quantization_config", "checkpoints in such a format are not supported yet")

    def integer(name: str, otherwise: int | None = None, **bounds: int) -> int:
        default = defaults.get(name, otherwise)
        return keys.integer(name, None if default is None else int(default), **bounds)

    num_heads, hidden_size = integer("num_attention_heads"), integer("hidden_size")
    num_layers = integer("num_hidden_layers")
    _check_num_layers(num_layers, keys)
    return {
        "vocab_size": integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": integer("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": integer("num_key_value_heads", num_heads),
        "head_dim": integer("head_dim", max(1, hidden_size // num_heads), maximum=MAX_HEAD_DIM),
        "context_length": integer("max_position_embeddings"),
        "norm_eps": keys.number("rms_norm_eps", defaults.get("rms_norm_eps")),
    }


def sizes_from_gguf(keys: Keys) -> dict[str, Any]:
    """The fields that all models spell alike in GGUF; `rope` and activation are the model's."""
    if keys.has("expert_count") and keys.integer("expert_count", minimum=0):
        raise keys.refuse("expert_count", "mixtures of experts are not supported yet")
    num_heads = keys.integer("attention.head_count")
    hidden_size = keys.integer("embedding_length")
    num_layers = keys.integer("block_count")
    _check_num_layers(num_layers, keys)
    default_dim = max(1, hidden_size // num_heads)
    head_dim = keys.integer("attention.key_length", default_dim, maximum=MAX_HEAD_DIM)
    if keys.integer("attention.value_length", head_dim) != head_dim:
        raise keys.refuse("attention.value_length", f"it must equal the key length, {head_dim}")
    return {
        "vocab_size": keys.tensor_shape("token_embd.weight")[0],
        "hidden_size": hidden_size,
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": keys.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "context_length": keys.integer("context_length"),
        "norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "tied_embeddings": not keys.has_tensor("output.weight"),
    }


def _check_num_layers(num_layers: int, keys: Keys) -> None:
    # Before a graph of that size is built: the number may be anything.
    if num_layers > keys.num_tensors:
        raise FormatError(f"{num_layers} layers in a checkpoint of {keys.num_tensors} tensors")


def is_tied(keys: Keys, default: bool) -> bool:
    """Whether the output layer is the embedding. Where config.json does not say: `default`, unless a tensor
    decides; the tensor may also be there redundantly."""
    has_output = keys.has_tensor("lm_head.weight") or keys.has_tensor("language_model.lm_head.weight")
    return keys.flag("tie_word_embeddings", default or not has_output)


def activation_from_hf(keys: Keys, *names: str, default: str = "silu") -> ActivationKind:
    """The activation under the first of the keys `names` that is present."""
    known = {
        "silu": ActivationKind.SILU,
        "swish": ActivationKind.SILU,
        "gelu": ActivationKind.GELU,
        "gelu_pytorch_tanh": ActivationKind.GELU_TANH,
        "gelu_new": ActivationKind.GELU_TANH,
        "relu": ActivationKind.RELU,
    }
    name = next((name for name in names if keys.has(name)), names[0])
    return known[keys.choice(name, tuple(known), default)]


def layer_windows_from_hf(
    keys: Keys, num_layers: int, window: int, is_sliding: list[bool]
) -> tuple[int, ...]:
    """Window of each layer (0: all), by `layer_types` if present, else by the model's own pattern."""
    kinds = keys.items("layer_types")
    if kinds is not None:
        known = ("full_attention", "sliding_attention")
        if len(kinds) != num_layers or not all(kind in known for kind in kinds):
            raise UnsupportedModelError(f"'layer_types' must name {known[0]} or {known[1]} for each layer.")
        is_sliding = [kind == "sliding_attention" for kind in kinds]
    return tuple(window if sliding else 0 for sliding in is_sliding)
