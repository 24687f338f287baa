"""Decides the packed type of every matrix of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from gapless.errors import UnsupportedModelError
from gapless.graph import ir
from gapless.graph.ir import Domain, Graph
from gapless.loading import TensorType
from gapless.quantization.config import QuantConfig
from gapless.quantization.source import TensorSource

# Bytes per value are of the packed layouts: the numbers, their scales and minima.
_PACKED: Mapping[TensorType, tuple[str, float]] = MappingProxyType(
    {
        TensorType.F32: ("f32", 4.0),
        TensorType.F16: ("f16", 2.0),
        TensorType.BF16: ("bf16", 2.0),
        TensorType.Q4_0: ("int4", 18 / 32),
        TensorType.Q4_1: ("int4", 20 / 32),
        TensorType.Q4_K: ("int4", 148 / 256),
        TensorType.Q5_0: ("int5", 22 / 32),
        TensorType.Q5_1: ("int5", 24 / 32),
        TensorType.Q5_K: ("int5", 180 / 256),
        TensorType.Q6_K: ("int6", 210 / 256),
        TensorType.Q3_K: ("int6", 210 / 256),
        TensorType.Q8_0: ("int8", 34 / 32),
        TensorType.IQ4_NL: ("int8", 34 / 32),
        TensorType.IQ4_XS: ("int8", 34 / 32),
        TensorType.Q2_K: ("int8", 34 / 32),
    }
)
LOSSY = frozenset({TensorType.Q2_K})  # have no packed type that holds all their values


@dataclass(frozen=True)
class Packing:
    """How a matrix is stored in memory. `quant` is what InstantQuant does to it, None: it stays as it is."""

    type: str
    bytes_per_value: float
    quant: QuantConfig | None = None

    @property
    def is_integer(self) -> bool:
        return self.type.startswith("int")


def choose_packing(
    graph: Graph, sources: Mapping[str, TensorSource], quant: QuantConfig | None
) -> dict[str, Packing]:
    """The packing of every matrix. Vectors (norms, biases) are not in it: they are always f32.

    `quant` applies to plain matrices. The embedding and the output layer, where errors show most, get 8 bits
    even under int4. UnsupportedModelError if `quant` is given and there is nothing that it could apply to.
    """
    sensitive = _sensitive(graph)
    chosen: dict[str, Packing] = {}
    for name, source in sources.items():
        kind = source.info.type
        if len(source.weight.shape) != 2:
            continue
        if quant is None or kind.is_quantized:
            chosen[name] = Packing(*_PACKED[kind])
        else:
            applied = QuantConfig(8) if name in sensitive and quant.bits < 8 else quant
            chosen[name] = Packing(applied.name, _quantized_bytes(applied), applied)
    if quant is not None and not any(packing.quant for packing in chosen.values()):
        kinds = sorted({sources[name].info.type.name for name in chosen})
        raise UnsupportedModelError(
            f"The model is already quantized ({', '.join(kinds)}), so {quant.name} cannot be applied. "
            "Leave the quantization away, or give an F16, BF16 or F32 checkpoint."
        )
    return chosen


def _sensitive(graph: Graph) -> frozenset[str]:
    """Names of the embedding and of what makes the logits."""
    found: set[str] = set()
    for node in graph.nodes:
        is_output = isinstance(node, ir.Linear) and node.out.domain is Domain.LOGIT
        if is_output or isinstance(node, ir.Embed):
            found.update(weight.name for weight in node.weights)
    return frozenset(found)


def _quantized_bytes(quant: QuantConfig) -> float:
    scale_bytes = 2 if quant.bits == 8 else 4  # int4 has minima too
    return quant.bits / 8 + (scale_bytes / quant.group_size if quant.group_size > 0 else 0)
