"""Fusions. Each pass takes a graph and returns one that computes the same in fewer, larger steps.

They look at patterns of nodes, never at which model a graph is of.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace
from typing import TypeGuard

from gapless.graph import ir
from gapless.graph.ir import Form, Graph, Value, Weight
from gapless.graph.rewrite import Rewriter


def fuse(graph: Graph, integer_weights: Set[str] = frozenset()) -> Graph:
    """All passes. `integer_weights` names the matrices that want quantized (a8) inputs; none: a16."""
    for fusion in (fuse_attention, fuse_concat, fuse_gated, fuse_residual_linear, fuse_residual_norm):
        graph = fusion(graph)
    return fuse_norm_quantize(quantize_inputs(graph, integer_weights))


def fuse_attention(graph: Graph) -> Graph:
    """attention(rope(norm(q)), rope(norm(k)), v), norms optional → concat, rope_cache, cached_attention."""
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        if not isinstance(node, ir.Attention):
            continue
        q_rope, k_rope = rewriter.producer(node.q), rewriter.producer(node.k)
        if not isinstance(q_rope, ir.Rope) or not isinstance(k_rope, ir.Rope) or q_rope.table != k_rope.table:
            continue
        q_norm, k_norm = rewriter.producer(q_rope.x), rewriter.producer(k_rope.x)
        q, k, chain = q_rope.x, k_rope.x, [q_rope.out, k_rope.out]
        norms: tuple[Weight | None, Weight | None] = (None, None)
        eps = 1e-6
        if isinstance(q_norm, ir.HeadNorm) and isinstance(k_norm, ir.HeadNorm) and q_norm.eps == k_norm.eps:
            chain += [q_norm.out, k_norm.out]
            q, k, norms, eps = q_norm.x, k_norm.x, (q_norm.weight, k_norm.weight), q_norm.eps
        if not all(rewriter.has_one_reader(value) for value in chain):
            continue
        moved = [made_by for value in chain if (made_by := rewriter.producer(value)) is not None]
        if not all(rewriter.can_move(made_by, node) for made_by in moved):
            continue
        for made_by in moved:
            rewriter.replace(made_by)
        qkv = rewriter.value(node.shape.qkv_width, node.out.domain)
        ready = rewriter.value(qkv.width, qkv.domain)
        rewriter.replace(
            node,
            ir.Concat((q, k, node.v), qkv),
            ir.RopeCache(qkv, node.layer, node.shape, q_rope.table, *norms, eps, ready),
            ir.CachedAttention(ready, node.layer, node.shape, node.out),
        )
    return rewriter.finish()


def fuse_concat(graph: Graph) -> Graph:
    """concat(linear(x), linear(x), …) → one linear of several segments."""
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        if not isinstance(node, ir.Concat) or not all(rewriter.has_one_reader(part) for part in node.parts):
            continue
        parts = [rewriter.producer(part) for part in node.parts]
        linears = [part for part in parts if isinstance(part, ir.Linear) and part.residual is None]
        if len(linears) != len(parts) or len({linear.x for linear in linears}) != 1:
            continue
        if not rewriter.can_move(linears[0], node):
            continue
        for linear in linears:
            rewriter.replace(linear)
        segments = tuple(segment for linear in linears for segment in linear.segments)
        rewriter.replace(node, ir.Linear(linears[0].x, segments, node.out))
    return rewriter.finish()


def fuse_gated(graph: Graph) -> Graph:
    """activate(linear(x)) * linear(x) → gated_linear, for linears without bias."""
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        if not isinstance(node, ir.Mul):
            continue
        for gated, plain in ((node.a, node.b), (node.b, node.a)):
            activate, up = rewriter.producer(gated), rewriter.producer(plain)
            if not isinstance(activate, ir.Activate):
                continue
            gate = rewriter.producer(activate.x)
            if not _is_plain_matrix(gate) or not _is_plain_matrix(up) or gate.x != up.x or gate is up:
                continue
            if not all(rewriter.has_one_reader(value) for value in (gated, plain, gate.out)):
                continue
            if not rewriter.can_move(gate, node):
                continue
            for old in (gate, activate, up):
                rewriter.replace(old)
            weights = gate.segments[0].weight, up.segments[0].weight
            rewriter.replace(node, ir.GatedLinear(gate.x, *weights, activate.kind, node.out))
            break
    return rewriter.finish()


def _is_plain_matrix(node: ir.Node | None) -> TypeGuard[ir.Linear]:
    return (
        isinstance(node, ir.Linear)
        and len(node.segments) == 1
        and node.segments[0].bias is None
        and node.residual is None
    )


def fuse_residual_linear(graph: Graph) -> Graph:
    """residual + linear(x) → a linear that adds to the residual in place."""
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        for residual, branch in _additions(rewriter, node):
            made_by = rewriter.producer(branch)
            if made_by is None or not rewriter.can_move(made_by, node):
                continue
            if isinstance(made_by, ir.Linear) and made_by.residual is None:
                rewriter.replace(made_by)
                rewriter.replace(node, replace(made_by, residual=residual, out=node.outputs[0]))
                break
    return rewriter.finish()


def fuse_residual_norm(graph: Graph) -> Graph:
    """residual + rms_norm(x) → add_rms_norm, in place."""
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        for residual, branch in _additions(rewriter, node):
            made_by = rewriter.producer(branch)
            if made_by is None or not rewriter.can_move(made_by, node):
                continue
            if isinstance(made_by, ir.RmsNorm) and made_by.out_quantized is None:
                fused = ir.AddRmsNorm(residual, made_by.x, made_by.weight, made_by.eps, node.outputs[0])
                rewriter.replace(made_by)
                rewriter.replace(node, fused)
                break
    return rewriter.finish()


def _additions(rewriter: Rewriter, node: ir.Node) -> list[tuple[Value, Value]]:
    """The ways to see an addition as (residual to overwrite, branch that nobody else reads)."""
    if not isinstance(node, ir.Add) or node.residual == node.x:
        return []
    return [
        (residual, branch)
        for residual, branch in ((node.residual, node.x), (node.x, node.residual))
        if rewriter.is_dead_after(residual, node)
        and rewriter.has_one_reader(branch)
        and not rewriter.is_replaced(node)
    ]


def quantize_inputs(graph: Graph, integer_weights: Set[str]) -> Graph:
    """Gives every linear with integer weights a quantized input; linears that read one value share it."""
    rewriter = Rewriter(graph)
    quantized: dict[Value, Value] = {}
    for node in graph.nodes:
        if not isinstance(node, ir.Linear | ir.GatedLinear) or node.x is None:
            continue
        is_integer = [weight.name in integer_weights for weight in _matrices(node)]
        if not any(is_integer):
            continue
        new: list[ir.Node] = []
        if node.x not in quantized:
            quantized[node.x] = rewriter.value(node.x.width, node.x.domain, Form.A8)
            new.append(ir.Quantize(node.x, quantized[node.x]))
        x = None if all(is_integer) else node.x
        rewriter.replace(node, *new, replace(node, x=x, x_quantized=quantized[node.x]))
    return rewriter.finish()


def _matrices(node: ir.Linear | ir.GatedLinear) -> list[Weight]:
    if isinstance(node, ir.Linear):
        return [segment.weight for segment in node.segments]
    return [node.gate, node.up]


def fuse_norm_quantize(graph: Graph) -> Graph:
    """quantize(rms_norm(x)) → a norm that writes a8 rows, and f32 rows only if somebody reads them."""
    rewriter = Rewriter(graph)
    for node in graph.nodes:
        if not isinstance(node, ir.Quantize):
            continue
        norm = rewriter.producer(node.x)
        if isinstance(norm, ir.RmsNorm) and norm.out_quantized is None:
            out = None if rewriter.has_one_reader(node.x) else norm.out
            rewriter.replace(norm, replace(norm, out=out, out_quantized=node.out))
            rewriter.replace(node)
    return rewriter.finish()
