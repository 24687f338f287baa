"""The graph of a decoder: what is computed on which rows with which weights. It knows no kernels.

Values are in single-assignment form: every node makes new ones. A node may take over the buffer of one of
its inputs (`in_place`), which is then dead. Authors write the nodes of the first group through
`GraphBuilder`; those of the second group are what the passes make of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import ClassVar


class Domain(Enum):
    """Which rows a value has."""

    TOKEN = "token"  # one per token of the step
    LOGIT = "logit"  # one per token whose logits are needed


class Form(Enum):
    """How the numbers of a row are stored."""

    F32 = "f32"
    A8 = "a8"  # int8 with scales: what integer weights multiply


class ActivationKind(Enum):
    """The non-linearities, by the names that the native core knows."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"
    GELU = "gelu"
    RELU = "relu"


@dataclass(frozen=True)
class Value:
    """An activation: [rows of the domain, width]."""

    id: int
    width: int
    domain: Domain = Domain.TOKEN
    form: Form = Form.F32


@dataclass(frozen=True)
class Weight:
    """A parameter by its neutral name. Matrices are (output features, input features)."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class RopeTable:
    """Rotary frequencies [rotary_dim / 2], radians per position; cos and sin are scaled by `magnitude`."""

    inv_freq: tuple[float, ...]
    magnitude: float = 1.0


@dataclass(frozen=True)
class AttentionShape:
    """Heads of one attention, and how its scores are treated."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0  # a token at position p sees positions > p - window; 0: all
    softcap: float = 0.0  # scores become cap * tanh(scores / cap); 0: off

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_width(self) -> int:
        return self.q_width + 2 * self.kv_width


@dataclass(frozen=True)
class Node:
    """One operation. Fields named `out...` are its results; all other fields that hold a Value are read."""

    in_place: ClassVar[str | None] = None  # the field whose buffer `out` takes over, if it is set

    @property
    def inputs(self) -> tuple[Value, ...]:
        return tuple(value for name, value in self._values() if not name.startswith("out"))

    @property
    def outputs(self) -> tuple[Value, ...]:
        return tuple(value for name, value in self._values() if name.startswith("out"))

    @property
    def overwritten(self) -> Value | None:
        """The input whose buffer the result takes over."""
        value = getattr(self, self.in_place) if self.in_place else None
        assert value is None or isinstance(value, Value)
        return value

    @property
    def weights(self) -> tuple[Weight, ...]:
        found: list[Weight] = []
        for field in dataclasses.fields(self):
            content = getattr(self, field.name)
            if isinstance(content, Weight):
                found.append(content)
            elif isinstance(content, tuple):
                for segment in content:
                    found.append(segment.weight)
                    if segment.bias is not None:
                        found.append(segment.bias)
        return tuple(found)

    def _values(self) -> Iterator[tuple[str, Value]]:
        for field in dataclasses.fields(self):
            content = getattr(self, field.name)
            if isinstance(content, Value):
                yield field.name, content
            elif isinstance(content, tuple):
                for item in content:
                    if isinstance(item, Value):
                        yield field.name, item


# --- what authors write ---


@dataclass(frozen=True)
class Embed(Node):
    """out = scale * weight[token id]"""

    weight: Weight
    scale: float
    out: Value


@dataclass(frozen=True)
class RmsNorm(Node):
    """out = x / sqrt(mean(x²) + eps) * weight; as f32, as a8, or both."""

    x: Value
    weight: Weight
    eps: float
    out: Value | None
    out_quantized: Value | None = None


@dataclass(frozen=True)
class Segment:
    """One weight of a linear; its outputs lie beside those of the segments before it."""

    weight: Weight
    bias: Weight | None = None


@dataclass(frozen=True)
class Linear(Node):
    """out = [x @ weight.T + bias of each segment] (+ residual). Authors use one segment and no residual.

    Integer weights read `x_quantized` where it is given, all others `x`.
    """

    in_place: ClassVar[str | None] = "residual"

    x: Value | None
    segments: tuple[Segment, ...]
    out: Value
    residual: Value | None = None
    x_quantized: Value | None = None


@dataclass(frozen=True)
class Activate(Node):
    x: Value
    kind: ActivationKind
    out: Value


@dataclass(frozen=True)
class Mul(Node):
    a: Value
    b: Value
    out: Value


@dataclass(frozen=True)
class Add(Node):
    """out = residual + x"""

    in_place: ClassVar[str | None] = "residual"

    residual: Value
    x: Value
    out: Value


@dataclass(frozen=True)
class HeadNorm(Node):
    """RMS norm of each head of `len(weight)` values."""

    x: Value
    weight: Weight
    eps: float
    out: Value


@dataclass(frozen=True)
class Rope(Node):
    """Rotates the first 2 * len(table) values of each head by position: value j with value j + len(table)."""

    x: Value
    table: RopeTable
    head_dim: int
    out: Value


@dataclass(frozen=True)
class Attention(Node):
    """Appends k and v to the cache of `layer`; out = causal attention of q over that cache."""

    q: Value
    k: Value
    v: Value
    layer: int
    shape: AttentionShape
    out: Value


@dataclass(frozen=True)
class Gather(Node):
    """Picks the rows whose logits are needed."""

    x: Value
    out: Value


@dataclass(frozen=True)
class Softcap(Node):
    """out = cap * tanh(x / cap)"""

    in_place: ClassVar[str | None] = "x"

    x: Value
    cap: float
    out: Value


# --- what passes make ---


@dataclass(frozen=True)
class Concat(Node):
    """Parts side by side. Stands between two passes only."""

    parts: tuple[Value, ...]
    out: Value


@dataclass(frozen=True)
class GatedLinear(Node):
    """out = act(x @ gate.T) * (x @ up.T)"""

    x: Value | None
    gate: Weight
    up: Weight
    kind: ActivationKind
    out: Value
    x_quantized: Value | None = None


@dataclass(frozen=True)
class RopeCache(Node):
    """On rows [q heads | k heads | v heads]: norms and rotates q and k, scales q, caches k and v."""

    in_place: ClassVar[str | None] = "qkv"

    qkv: Value
    layer: int
    shape: AttentionShape
    table: RopeTable
    q_norm: Weight | None
    k_norm: Weight | None
    eps: float
    out: Value


@dataclass(frozen=True)
class CachedAttention(Node):
    """out = causal attention of the (scaled) q heads of `qkv` over the cache of `layer`."""

    qkv: Value
    layer: int
    shape: AttentionShape
    out: Value


@dataclass(frozen=True)
class AddRmsNorm(Node):
    """out = residual + rms_norm(x)"""

    in_place: ClassVar[str | None] = "residual"

    residual: Value
    x: Value
    weight: Weight
    eps: float
    out: Value


@dataclass(frozen=True)
class Quantize(Node):
    x: Value
    out: Value


@dataclass(frozen=True)
class Graph:
    """Nodes in order of execution; `logits` is the result.

    `states` [logit rows, hidden_size] is what the logits are computed from, after the last norm. Embeddings
    are pooled from it; for them, the nodes on logit rows are run no further than to the one that makes it.
    """

    nodes: tuple[Node, ...]
    logits: Value
    states: Value | None = None

    @property
    def results(self) -> tuple[Value, ...]:
        """What is read when the nodes have run."""
        return (self.logits,) if self.states is None else (self.logits, self.states)

    @property
    def weights(self) -> dict[str, Weight]:
        """All parameters by name, in order of first use."""
        found: dict[str, Weight] = {}
        for node in self.nodes:
            for weight in node.weights:
                assert found.setdefault(weight.name, weight) == weight, f"{weight.name} with two shapes"
        return found

    def next_id(self) -> int:
        """The first value number that is free."""
        return 1 + max((value.id for node in self.nodes for value in node.outputs), default=-1)


def check(graph: Graph) -> None:
    """Asserts that values are made once, before they are read, and not read after they were overwritten."""
    made: set[Value] = set()
    dead: set[Value] = set()
    for node in graph.nodes:
        for value in node.inputs:
            assert value in made, f"{node} reads a value that is not there yet"
            assert value not in dead, f"{node} reads a value that was overwritten"
        if node.overwritten is not None:
            dead.add(node.overwritten)
        for value in node.outputs:
            assert value not in made, f"{node} makes a value again"
            made.add(value)
    assert set(graph.results) <= made - dead, "the graph does not make its results"
