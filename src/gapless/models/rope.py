"""Rotary position embedding: which frequencies, after whatever scaling a checkpoint asks for."""

from __future__ import annotations

from dataclasses import dataclass
from math import log, pi, sqrt

import numpy as np
import numpy.typing as npt

from gapless.errors import FormatError
from gapless.graph.ir import RopeTable
from gapless.models.keys import Keys

DEFAULT_BASE = 10000.0

F32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class RopeConfig:
    """Frequencies base^(-2j / rotary_dim), each divided by its entry in `factors`.

    Contexts of more than `short_context` tokens use `long_factors` instead, where there are any (LongRoPE).
    """

    base: float
    rotary_dim: int
    factors: tuple[float, ...] | None = None
    magnitude: float = 1.0
    long_factors: tuple[float, ...] | None = None
    short_context: int = 0

    def __post_init__(self) -> None:
        if self.base <= 0 or self.rotary_dim < 2 or self.rotary_dim % 2:
            raise FormatError(f"rotary embedding of {self.rotary_dim} values with base {self.base}")
        for factors in (self.factors, self.long_factors):
            if factors is not None and (len(factors) != self.rotary_dim // 2 or min(factors) <= 0):
                raise FormatError(
                    f"rotary embedding of {self.rotary_dim} values needs {self.rotary_dim // 2} positive "
                    f"factors, there are {len(factors)}"
                )

    def table(self, context_length: int) -> RopeTable:
        """The frequencies for contexts of up to `context_length` tokens."""
        inv_freq = frequencies(self.base, self.rotary_dim)
        use_long = self.long_factors is not None and context_length > self.short_context
        factors = self.long_factors if use_long else self.factors
        if factors is not None:
            inv_freq = (inv_freq / np.array(factors, np.float32)).astype(np.float32)
        return RopeTable(tuple(inv_freq.tolist()), self.magnitude)


def frequencies(base: float, rotary_dim: int) -> F32:
    """base^(-2j / rotary_dim) for j in 0 … rotary_dim / 2 - 1, radians per position, in f32."""
    exponents = np.arange(0, rotary_dim, 2, dtype=np.float32) / np.float32(rotary_dim)
    inv_freq: F32 = (np.float32(1) / np.power(np.float32(base), exponents)).astype(np.float32)
    return inv_freq


def rope_from_hf(
    keys: Keys,
    rotary_dim: int,
    context_length: int,
    base: float = DEFAULT_BASE,
    layer_type: str | None = None,
) -> RopeConfig:
    """From `rope_theta` and `rope_scaling` (transformers 4) or `rope_parameters` (5; maybe by layer type).

    `base` is for files that give none.
    """
    parameters = keys.section("rope_parameters")
    if parameters is not None and layer_type is not None:
        parameters = parameters.section(layer_type) or parameters
    theta = (parameters or keys).number("rope_theta", keys.number("rope_theta", base))
    scaling = parameters or keys.section("rope_scaling")
    if scaling is None:
        return RopeConfig(theta, rotary_dim)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    match kind:
        case "default":
            return RopeConfig(theta, rotary_dim)
        case "linear":
            return RopeConfig(theta, rotary_dim, (scaling.number("factor"),) * (rotary_dim // 2))
        case "llama3":
            return RopeConfig(theta, rotary_dim, _llama3_factors(scaling, theta, rotary_dim))
        case "longrope" | "su":
            return _longrope(keys, scaling, theta, rotary_dim, context_length)
    raise scaling.refuse("rope_type", "supported are default, linear, llama3 and longrope")


def _llama3_factors(scaling: Keys, base: float, rotary_dim: int) -> tuple[float, ...]:
    """Llama 3.1: short wavelengths stay, long ones are divided by `factor`, those between are blended."""
    factor = scaling.number("factor")
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    original = scaling.integer("original_max_position_embeddings")
    if factor <= 0 or not 0 < low < high:
        raise FormatError(f"llama3 rope scaling with factor {factor}, low {low} and high {high}")
    turns = original * frequencies(base, rotary_dim).astype(np.float64) / (2 * pi)  # in the original context
    unscaled = np.clip((turns - low) / (high - low), 0, 1)
    return tuple((1 / ((1 - unscaled) / factor + unscaled)).tolist())


def _longrope(keys: Keys, scaling: Keys, base: float, rotary_dim: int, context_length: int) -> RopeConfig:
    original = scaling.integer(
        "original_max_position_embeddings", keys.integer("original_max_position_embeddings", context_length)
    )
    factor = scaling.number("factor", context_length / original)
    magnitude = scaling.number("attention_factor", longrope_magnitude(factor, original))
    short, long = scaling.numbers("short_factor"), scaling.numbers("long_factor")
    if short is None or long is None:
        raise FormatError("longrope scaling without 'short_factor' and 'long_factor'")
    return RopeConfig(base, rotary_dim, short, magnitude, long, original)


def longrope_magnitude(factor: float, original_context: int) -> float:
    """What LongRoPE multiplies cos and sin by. https://arxiv.org/abs/2402.13753"""
    return 1.0 if factor <= 1 or original_context <= 1 else sqrt(1 + log(factor) / log(original_context))


def rope_from_gguf(
    keys: Keys, rotary_dim: int, context_length: int, base: float = DEFAULT_BASE
) -> RopeConfig:
    """From `rope.freq_base`, `rope.scaling.*` and the tensors with frequency factors."""
    theta = keys.number("rope.freq_base", base)
    kind = keys.choice("rope.scaling.type", ("none", "linear", "longrope", "yarn"), "none")
    if kind == "yarn":
        raise keys.refuse("rope.scaling.type", "supported are linear, longrope and frequency factors")
    long, short = keys.tensor("rope_factors_long.weight"), keys.tensor("rope_factors_short.weight")
    if long is not None and short is not None:
        original = keys.integer("rope.scaling.original_context_length", context_length)
        magnitude = keys.number(
            "rope.scaling.attn_factor", longrope_magnitude(context_length / original, original)
        )
        return RopeConfig(theta, rotary_dim, _tuple(short), magnitude, _tuple(long), original)
    factors = keys.tensor("rope_freqs.weight")
    if factors is not None:
        return RopeConfig(theta, rotary_dim, _tuple(factors))
    factor = keys.number("rope.scaling.factor", 0) or keys.number("rope.scale_linear", 1)
    if kind == "linear" or keys.has("rope.scale_linear"):
        return RopeConfig(theta, rotary_dim, (factor,) * (rotary_dim // 2))
    return RopeConfig(theta, rotary_dim)


def _tuple(factors: F32) -> tuple[float, ...]:
    return tuple(factors.reshape(-1).tolist())
