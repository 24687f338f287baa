"""Turns a fused graph and its loaded weights into a native Program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from gapless import _native
from gapless.errors import UnsupportedModelError
from gapless.graph import ir
from gapless.graph.ir import Domain, Graph, RopeTable, Value, Weight
from gapless.graph.memory_plan import Buffer, MemoryPlan, plan_memory

Weights = Mapping[str, Any]  # matrices as _native.PackedWeight, vectors as float32 arrays
_HEAD_DIM_STEP = 16  # values of a vector
_NONE = -1  # how the builder says "no buffer"


def lower(
    graph: Graph,
    weights: Weights,
    *,
    max_step_tokens: int,
    max_logit_rows: int,
    kv_dtypes: Sequence[str] | None = None,
) -> _native.Program:
    """The Program of a graph that went through the passes, for steps of at most `max_step_tokens` rows.

    `kv_dtypes`: the type of each layer's KV cache; all are f16 without.
    UnsupportedModelError if the graph has an operation that the native core cannot run, fused or alone.
    """
    plan = plan_memory(
        graph, {Domain.TOKEN: max_step_tokens, Domain.LOGIT: max_logit_rows}, _native.a8_row_bytes
    )
    shape, num_layers = _cache_shape(graph)
    kv_dtypes = kv_dtypes or ["f16"] * num_layers
    assert len(kv_dtypes) == num_layers, (len(kv_dtypes), num_layers)
    builder = _native.ProgramBuilder(
        max_tokens=max_step_tokens,
        max_logit_rows=max_logit_rows,
        vocab_size=graph.logits.width,
        kv_dtypes=kv_dtypes,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
    )
    return _Lowering(builder, weights, plan).run(graph)


def _cache_shape(graph: Graph) -> tuple[ir.AttentionShape, int]:
    caches = [node for node in graph.nodes if isinstance(node, ir.RopeCache)]
    if not caches:
        raise UnsupportedModelError("A network without rotary attention cannot be run.")
    kinds = {(cache.shape.num_kv_heads, cache.shape.head_dim) for cache in caches}
    if len(kinds) > 1:
        raise UnsupportedModelError(f"Layers differ in their (key-value heads, head size): {sorted(kinds)}.")
    shape = caches[0].shape
    if shape.head_dim % _HEAD_DIM_STEP:
        raise UnsupportedModelError(
            f"Heads have {shape.head_dim} values; the native core needs a multiple of {_HEAD_DIM_STEP}."
        )
    return shape, 1 + max(cache.layer for cache in caches)


def _parts(graph: Graph, plan: MemoryPlan) -> dict[int, Buffer]:
    """Where the body may be cut, so that rows go through its parts in different steps: after which nodes, and
    the one buffer of token rows that the rest needs. One cut for each layer but the last, at its end.
    """
    buffers = {buffer for buffer in plan.buffers.values() if buffer.domain is Domain.TOKEN}
    caches = [index for index, node in enumerate(graph.nodes) if isinstance(node, ir.RopeCache)]
    cuts: dict[int, Buffer] = {}
    for first, last in pairwise(caches):
        for index in reversed(range(first, last)):
            needed = [buffer for buffer in buffers if buffer.first <= index < buffer.last]
            if len(needed) == 1:
                cuts[index] = needed[0]
                break
    return cuts


class _Lowering:
    def __init__(self, builder: _native.ProgramBuilder, weights: Weights, plan: MemoryPlan) -> None:
        self._builder = builder
        self._weights = weights
        self._plan = plan
        self._buffers: dict[Buffer, int] = {}
        self._ropes: dict[RopeTable, int] = {}

    def run(self, graph: Graph) -> _native.Program:
        parts = _parts(graph, self._plan)
        for index, node in enumerate(graph.nodes):
            self._emit(node)
            if index in parts:
                self._builder.part(self._buffers[parts[index]])
            if graph.states is not None and graph.states in node.outputs:
                self._builder.states(self._buffer(graph.states))
        return self._builder.build(self._plan.arena_bytes, self._buffer(graph.logits))

    def _emit(self, node: ir.Node) -> None:
        builder, at = self._builder, self._buffer
        match node:
            case ir.Embed():
                builder.embed(self._matrix(node.weight), node.scale, at(node.out))
            case ir.RmsNorm():
                vector = self._vector(node.weight)
                builder.rms_norm(at(node.x), vector, node.eps, at(node.out), at(node.out_quantized))
            case ir.AddRmsNorm():
                builder.add_rms_norm(at(node.x), self._vector(node.weight), node.eps, at(node.residual))
            case ir.Add():
                builder.add(at(node.x), at(node.residual))
            case ir.Quantize():
                builder.quantize(at(node.x), at(node.out))
            case ir.Linear():
                builder.linear(at(node.x), at(node.x_quantized), self._segments(node))
            case ir.GatedLinear():
                gate, up = self._matrix(node.gate), self._matrix(node.up)
                builder.gated_linear(
                    at(node.x), at(node.x_quantized), gate, up, node.kind.value, at(node.out)
                )
            case ir.RopeCache():
                builder.rope_cache(
                    at(node.qkv),
                    node.layer,
                    node.shape.num_heads,
                    self._rope(node.table),
                    node.shape.scale,
                    None if node.q_norm is None else self._vector(node.q_norm),
                    None if node.k_norm is None else self._vector(node.k_norm),
                    node.eps,
                )
            case ir.CachedAttention():
                shape = node.shape
                builder.attention(
                    at(node.qkv), node.layer, shape.num_heads, at(node.out), shape.window, shape.softcap
                )
            case ir.Gather():
                builder.gather(at(node.x), at(node.out))
            case ir.Softcap():
                builder.softcap(at(node.x), node.cap)
            case _:
                raise UnsupportedModelError(
                    f"The native core has no operation for {type(node).__name__} alone."
                )

    def _segments(self, node: ir.Linear) -> list[tuple[_native.PackedWeight, Any, int, int, bool]]:
        found = []
        column = 0
        for segment in node.segments:
            bias = None if segment.bias is None else self._vector(segment.bias)
            accumulate = node.residual is not None
            found.append((self._matrix(segment.weight), bias, self._buffer(node.out), column, accumulate))
            column += segment.weight.shape[0]
        return found

    def _buffer(self, value: Value | None) -> int:
        if value is None:
            return _NONE
        buffer = self._plan.buffers[value]
        if buffer not in self._buffers:
            self._buffers[buffer] = self._builder.buffer(buffer.domain.value, buffer.row_bytes, buffer.offset)
        return self._buffers[buffer]

    def _rope(self, table: RopeTable) -> int:
        if table not in self._ropes:
            inv_freq = np.array(table.inv_freq, np.float32)
            self._ropes[table] = self._builder.rope(inv_freq, table.magnitude)
        return self._ropes[table]

    def _matrix(self, weight: Weight) -> _native.PackedWeight:
        matrix: _native.PackedWeight = self._weights[weight.name]
        return matrix

    def _vector(self, weight: Weight) -> npt.NDArray[np.float32]:
        vector: npt.NDArray[np.float32] = self._weights[weight.name]
        return vector
