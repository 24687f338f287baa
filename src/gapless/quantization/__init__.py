"""Turns checkpoint tensors into packed weights: which get which type, and the loading of all of them."""

from gapless.quantization.config import QuantConfig
from gapless.quantization.load import load_weights, read_f32

__all__ = ["QuantConfig", "load_weights", "read_f32"]
