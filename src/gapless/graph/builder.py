"""How a model's author writes a graph: one method per operation, each returns the value it makes."""

from __future__ import annotations

from gapless.graph import ir
from gapless.graph.ir import ActivationKind, AttentionShape, Domain, Graph, RopeTable, Value, Weight


class GraphBuilder:
    """Collects nodes. Weights are named by their neutral names; their shapes follow from the values."""

    def __init__(self) -> None:
        self._nodes: list[ir.Node] = []
        self._num_values = 0

    def embed(self, weight: str, vocab_size: int, width: int, scale: float = 1.0) -> Value:
        """scale * weight[token id]: [num_tokens, width]"""
        out = self._value(width)
        return self._add(ir.Embed(Weight(weight, (vocab_size, width)), scale, out), out)

    def rms_norm(self, x: Value, weight: str, eps: float) -> Value:
        """x / sqrt(mean(x²) + eps) * weight"""
        out = self._value(x.width, x.domain)
        return self._add(ir.RmsNorm(x, Weight(weight, (x.width,)), eps, out), out)

    def linear(self, x: Value, weight: str, width: int, bias: str | None = None) -> Value:
        """x @ weight.T + bias: [rows, width]"""
        out = self._value(width, x.domain)
        segment = ir.Segment(
            Weight(weight, (width, x.width)), None if bias is None else Weight(bias, (width,))
        )
        return self._add(ir.Linear(x, (segment,), out), out)

    def activate(self, x: Value, kind: ActivationKind) -> Value:
        out = self._value(x.width, x.domain)
        return self._add(ir.Activate(x, kind, out), out)

    def mul(self, a: Value, b: Value) -> Value:
        assert (a.width, a.domain) == (b.width, b.domain)
        out = self._value(a.width, a.domain)
        return self._add(ir.Mul(a, b, out), out)

    def add(self, residual: Value, x: Value) -> Value:
        """residual + x. The residual must not be read afterwards."""
        assert (residual.width, residual.domain) == (x.width, x.domain)
        out = self._value(x.width, x.domain)
        return self._add(ir.Add(residual, x, out), out)

    def head_norm(self, x: Value, weight: str, head_dim: int, eps: float) -> Value:
        """RMS norm of each head of `head_dim` values."""
        out = self._value(x.width)
        return self._add(ir.HeadNorm(x, Weight(weight, (head_dim,)), eps, out), out)

    def rope(self, x: Value, table: RopeTable, head_dim: int) -> Value:
        """Rotary position embedding of each head, by halves."""
        out = self._value(x.width)
        return self._add(ir.Rope(x, table, head_dim, out), out)

    def attention(self, q: Value, k: Value, v: Value, layer: int, shape: AttentionShape) -> Value:
        """Causal attention over the cache of `layer`, to which k and v are added: [num_tokens, q_width]"""
        assert (q.width, k.width, v.width) == (shape.q_width, shape.kv_width, shape.kv_width)
        out = self._value(q.width)
        return self._add(ir.Attention(q, k, v, layer, shape, out), out)

    def gather(self, x: Value) -> Value:
        """The rows whose logits are needed; what follows is computed for these only."""
        out = self._value(x.width, Domain.LOGIT)
        return self._add(ir.Gather(x, out), out)

    def softcap(self, x: Value, cap: float) -> Value:
        """cap * tanh(x / cap). `x` must not be read afterwards."""
        out = self._value(x.width, x.domain)
        return self._add(ir.Softcap(x, cap, out), out)

    def finish(self, logits: Value, states: Value | None = None) -> Graph:
        """The graph that ends in `logits` [rows that need them, vocab_size].

        `states`: the final states [rows that need them, hidden_size], if embeddings are to be had.
        """
        graph = Graph(tuple(self._nodes), logits, states)
        ir.check(graph)
        return graph

    def _value(self, width: int, domain: Domain = Domain.TOKEN) -> Value:
        self._num_values += 1
        return Value(self._num_values - 1, width, domain)

    def _add(self, node: ir.Node, out: Value) -> Value:
        self._nodes.append(node)
        return out
