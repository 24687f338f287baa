"""Computes a graph, fused or not, in plain numpy: what it means, for tests. Slow, f32, one sequence.

Quantized activations are kept exact here, so that passes change nothing but rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from gapless.graph import ir
from gapless.graph.ir import ActivationKind, AttentionShape, Graph, RopeTable, Value, Weight

F32: TypeAlias = Any  # float32 arrays; numpy does not keep the type through its operations


class Reference:
    """A sequence in the making: each `run` takes its next tokens and returns logits, each `states` final
    states."""

    def __init__(self, graph: Graph, weights: Mapping[str, F32], cache_type: type = np.float32) -> None:
        """`weights`: float32 arrays by neutral name, shaped as the graph says.

        Keys and values are rounded to `cache_type` (the native core's is float16).
        """
        self._graph = graph
        self._weights = weights
        self._cache_type = cache_type
        self._cache: dict[int, tuple[F32, F32]] = {}  # layer → K, V [num_positions, num_kv_heads, head_dim]
        self._num_done = 0

    def run(self, token_ids: npt.ArrayLike, logit_rows: npt.ArrayLike | None = None) -> F32:
        """Logits [rows, vocab_size] of the tokens that `logit_rows` names (all, if None)."""
        return self._run(token_ids, logit_rows)[self._graph.logits]

    def states(self, token_ids: npt.ArrayLike) -> F32:
        """What embeddings are pooled from: the states after the last norm [num_tokens, hidden_size]."""
        assert self._graph.states is not None
        return self._run(token_ids, None)[self._graph.states]

    def _run(self, token_ids: npt.ArrayLike, logit_rows: npt.ArrayLike | None) -> dict[Value, F32]:
        tokens = np.asarray(token_ids, np.int64)
        rows = np.arange(len(tokens)) if logit_rows is None else np.asarray(logit_rows)
        positions = self._num_done + np.arange(len(tokens))
        step = _Step(self._weights, self._cache, self._cache_type, tokens, positions, rows)
        for node in self._graph.nodes:
            step.compute(node)
        self._num_done += len(tokens)
        return step.values


class _Step:
    def __init__(
        self,
        weights: Mapping[str, F32],
        cache: dict[int, tuple[F32, F32]],
        cache_type: type,
        tokens: Any,
        positions: Any,
        rows: Any,
    ) -> None:
        self.values: dict[Value, F32] = {}
        self._weights = weights
        self._cache = cache
        self._cache_type = cache_type
        self._tokens, self._positions, self._rows = tokens, positions, rows

    def compute(self, node: ir.Node) -> None:
        result = self._result(node)
        for value in node.outputs:
            self.values[value] = result

    def _result(self, node: ir.Node) -> F32:
        values = self.values
        match node:
            case ir.Embed():
                return np.float32(node.scale) * self._weight(node.weight)[self._tokens]
            case ir.RmsNorm():
                return rms_norm(values[node.x], self._weight(node.weight), node.eps)
            case ir.AddRmsNorm():
                return values[node.residual] + rms_norm(values[node.x], self._weight(node.weight), node.eps)
            case ir.Linear():
                return self._linear(node)
            case ir.GatedLinear():
                x = self._input(node)
                gate = x @ self._weight(node.gate).T
                return activate(gate, node.kind) * (x @ self._weight(node.up).T)
            case ir.Activate():
                return activate(values[node.x], node.kind)
            case ir.Mul():
                return values[node.a] * values[node.b]
            case ir.Add():
                return values[node.residual] + values[node.x]
            case ir.HeadNorm():
                return head_norm(values[node.x], self._weight(node.weight), node.eps)
            case ir.Rope():
                return rope(values[node.x], node.table, node.head_dim, self._positions)
            case ir.Attention():
                self._append(node.layer, node.shape, values[node.k], values[node.v])
                return self._attend(node.layer, node.shape, values[node.q] * np.float32(node.shape.scale))
            case ir.Concat():
                return np.concatenate([values[part] for part in node.parts], axis=1)
            case ir.RopeCache():
                return self._rope_cache(node)
            case ir.CachedAttention():
                return self._attend(node.layer, node.shape, values[node.qkv][:, : node.shape.q_width])
            case ir.Gather():
                return values[node.x][self._rows]
            case ir.Softcap():
                return softcap(values[node.x], node.cap)
            case ir.Quantize():
                return values[node.x]
        raise NotImplementedError(type(node).__name__)

    def _weight(self, weight: Weight) -> F32:
        found = self._weights[weight.name]
        assert found.shape == weight.shape, (weight, found.shape)
        return found

    def _input(self, node: ir.Linear | ir.GatedLinear) -> F32:
        value = node.x_quantized if node.x is None else node.x
        assert value is not None
        return self.values[value]

    def _linear(self, node: ir.Linear) -> F32:
        x = self._input(node)
        parts = []
        for segment in node.segments:
            y = x @ self._weight(segment.weight).T
            parts.append(y if segment.bias is None else y + self._weight(segment.bias))
        result = np.concatenate(parts, axis=1)
        return result if node.residual is None else self.values[node.residual] + result

    def _rope_cache(self, node: ir.RopeCache) -> F32:
        shape = node.shape
        q, k, v = np.split(self.values[node.qkv], [shape.q_width, shape.q_width + shape.kv_width], axis=1)
        if node.q_norm is not None:
            q = head_norm(q, self._weight(node.q_norm), node.eps)
        if node.k_norm is not None:
            k = head_norm(k, self._weight(node.k_norm), node.eps)
        q = rope(q, node.table, shape.head_dim, self._positions) * np.float32(shape.scale)
        k = rope(k, node.table, shape.head_dim, self._positions)
        self._append(node.layer, shape, k, v)
        return np.concatenate([q, k, v], axis=1)

    def _append(self, layer: int, shape: AttentionShape, k: F32, v: F32) -> None:
        rounded = [part.astype(self._cache_type).astype(np.float32) for part in (k, v)]
        new = [part.reshape(len(part), shape.num_kv_heads, shape.head_dim) for part in rounded]
        if layer in self._cache:
            new = [np.concatenate([old, part]) for old, part in zip(self._cache[layer], new, strict=True)]
        self._cache[layer] = (new[0], new[1])

    def _attend(self, layer: int, shape: AttentionShape, q: F32) -> F32:
        keys, values = self._cache[layer]
        q_heads = q.reshape(len(q), shape.num_heads, shape.head_dim)
        distance = self._positions[:, None] - np.arange(len(keys))[None, :]
        visible = (distance >= 0) & ((distance < shape.window) if shape.window else True)
        out = np.empty_like(q_heads)
        for head in range(shape.num_heads):
            kv_head = head * shape.num_kv_heads // shape.num_heads
            scores = q_heads[:, head] @ keys[:, kv_head].T  # [num_tokens, num_positions]
            if shape.softcap:
                scores = softcap(scores, shape.softcap)
            out[:, head] = softmax(np.where(visible, scores, -np.inf)) @ values[:, kv_head]
        return out.reshape(q.shape)


def rms_norm(x: F32, weight: F32, eps: float) -> F32:
    mean_square = np.mean(np.square(x), axis=-1, keepdims=True, dtype=np.float32)
    return x / np.sqrt(mean_square + np.float32(eps)) * weight


def head_norm(x: F32, weight: F32, eps: float) -> F32:
    """RMS norm of each head of `len(weight)` values."""
    return rms_norm(x.reshape(len(x), -1, len(weight)), weight, eps).reshape(x.shape)


def rope(x: F32, table: RopeTable, head_dim: int, positions: Any) -> F32:
    """Rotates value j of each head with value j + n, n = len(table.inv_freq), by position * inv_freq[j]."""
    half = len(table.inv_freq)
    angles = positions.astype(np.float32)[:, None] * np.array(table.inv_freq, np.float32)
    cos = (np.cos(angles) * np.float32(table.magnitude))[:, None, :]
    sin = (np.sin(angles) * np.float32(table.magnitude))[:, None, :]
    heads = x.reshape(len(x), -1, head_dim)
    first, second, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
    turned = [first * cos - second * sin, second * cos + first * sin, rest]
    return np.concatenate(turned, axis=-1).reshape(x.shape)


def softcap(x: F32, cap: float) -> F32:
    return np.float32(cap) * np.tanh(x / np.float32(cap))


def softmax(scores: F32) -> F32:
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def activate(x: F32, kind: ActivationKind) -> F32:
    match kind:
        case ActivationKind.SILU:
            return x / (1 + np.exp(np.minimum(-x, 88)))  # beyond, e^-x is no f32; the result is as good as 0
        case ActivationKind.GELU_TANH:
            z = np.clip(x, -100, 100)  # tanh is 1 long before, and the cube of more has no f32
            return 0.5 * x * (1 + np.tanh(np.float32(np.sqrt(2 / np.pi)) * (z + np.float32(0.044715) * z**3)))
        case ActivationKind.GELU:
            return np.array([0.5 * v * (1 + math.erf(v / math.sqrt(2))) for v in x.flat], np.float32).reshape(
                x.shape
            )
        case ActivationKind.RELU:
            return np.maximum(x, 0)
