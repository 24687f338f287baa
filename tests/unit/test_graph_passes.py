"""Each pass on the smallest graph that shows it, before and after; and that results stay the same."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gapless.graph import ir, passes
from gapless.graph.builder import GraphBuilder
from gapless.graph.ir import ActivationKind, AttentionShape, Domain, Form, Graph, RopeTable, Value
from gapless.graph.reference import Reference

WIDTH, VOCAB = 8, 11
SHAPE = AttentionShape(num_heads=2, num_kv_heads=1, head_dim=4, scale=0.5)
TABLE = RopeTable((1.0, 0.1))


def names(graph: Graph) -> list[str]:
    return [type(node).__name__ for node in graph.nodes]


def start() -> tuple[GraphBuilder, Value]:
    graph = GraphBuilder()
    return graph, graph.embed("embedding", VOCAB, WIDTH)


def finish(graph: GraphBuilder, hidden: Value) -> Graph:
    return graph.finish(graph.linear(graph.gather(hidden), "output", VOCAB))


def attention(graph: GraphBuilder, x: Value, *, norm: bool = False, bias: str | None = None) -> Value:
    q, k, v = (graph.linear(x, part, width, bias) for part, width in (("q", 8), ("k", 4), ("v", 4)))
    if norm:
        q, k = graph.head_norm(q, "q_norm", 4, 1e-5), graph.head_norm(k, "k_norm", 4, 1e-5)
    return graph.attention(graph.rope(q, TABLE, 4), graph.rope(k, TABLE, 4), v, 0, SHAPE)


def assert_same_results(before: Graph, after: Graph) -> None:
    generator = np.random.default_rng(0)
    weights = {
        weight.name: generator.standard_normal(weight.shape).astype(np.float32)
        for weight in before.weights.values()
    }
    tokens = [3, 1, 4, 1, 5]
    expected = Reference(before, weights).run(tokens)
    np.testing.assert_allclose(Reference(after, weights).run(tokens), expected, rtol=1e-5, atol=1e-5)
    if before.states is not None:
        states = Reference(before, weights).states(tokens)
        np.testing.assert_allclose(Reference(after, weights).states(tokens), states, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("norm", [False, True])
def test_fuse_attention(norm: bool) -> None:
    graph, hidden = start()
    before = finish(graph, attention(graph, hidden, norm=norm))
    after = passes.fuse_attention(before)
    linears = ["Linear"] * 3
    assert names(after) == [
        "Embed", *linears, "Concat", "RopeCache", "CachedAttention", "Gather", "Linear",
    ]  # fmt: skip
    cache = next(node for node in after.nodes if isinstance(node, ir.RopeCache))
    assert (cache.q_norm is not None) is norm
    assert cache.eps == (1e-5 if norm else 1e-6)
    assert_same_results(before, after)


def test_fuse_attention_leaves_q_alone_that_is_read_elsewhere() -> None:
    graph, hidden = start()
    q, k, v = (graph.linear(hidden, part, width) for part, width in (("q", 8), ("k", 4), ("v", 4)))
    q = graph.rope(q, TABLE, 4)
    attended = graph.attention(q, graph.rope(k, TABLE, 4), v, 0, SHAPE)
    before = finish(graph, graph.add(attended, q))
    assert passes.fuse_attention(before) == before


def test_fuse_concat_makes_one_linear_of_several_segments() -> None:
    graph, hidden = start()
    before = finish(graph, attention(graph, hidden))
    after = passes.fuse_concat(passes.fuse_attention(before))
    assert names(after) == ["Embed", "Linear", "RopeCache", "CachedAttention", "Gather", "Linear"]
    qkv = after.nodes[1]
    assert isinstance(qkv, ir.Linear)
    assert [segment.weight.name for segment in qkv.segments] == ["q", "k", "v"]
    assert qkv.out.width == 16
    assert_same_results(before, after)


def test_fuse_concat_needs_one_input() -> None:
    graph, hidden = start()
    other = graph.rms_norm(hidden, "norm", 1e-6)
    q, k, v = graph.linear(hidden, "q", 8), graph.linear(hidden, "k", 4), graph.linear(other, "v", 4)
    attended = graph.attention(graph.rope(q, TABLE, 4), graph.rope(k, TABLE, 4), v, 0, SHAPE)
    before = passes.fuse_attention(finish(graph, attended))
    assert passes.fuse_concat(before) == before


@pytest.mark.parametrize("kind", ActivationKind)
@pytest.mark.parametrize("gate_first", [True, False])
def test_fuse_gated(kind: ActivationKind, gate_first: bool) -> None:
    graph, hidden = start()
    gate = graph.activate(graph.linear(hidden, "gate", 12), kind)
    up = graph.linear(hidden, "up", 12)
    product = graph.mul(gate, up) if gate_first else graph.mul(up, gate)
    before = finish(graph, graph.linear(product, "down", WIDTH))
    after = passes.fuse_gated(before)
    assert names(after) == ["Embed", "GatedLinear", "Linear", "Gather", "Linear"]
    assert_same_results(before, after)


def test_fuse_gated_leaves_biases_alone() -> None:
    graph, hidden = start()
    gate = graph.activate(graph.linear(hidden, "gate", WIDTH, "bias"), ActivationKind.SILU)
    before = finish(graph, graph.mul(gate, graph.linear(hidden, "up", WIDTH)))
    assert passes.fuse_gated(before) == before


@pytest.mark.parametrize("residual_first", [True, False])
def test_fuse_residual_linear(residual_first: bool) -> None:
    graph, hidden = start()
    branch = graph.linear(graph.rms_norm(hidden, "norm", 1e-6), "o", WIDTH, "o.bias")
    total = graph.add(hidden, branch) if residual_first else graph.add(branch, hidden)
    before = finish(graph, total)
    after = passes.fuse_residual_linear(before)
    assert names(after) == ["Embed", "RmsNorm", "Linear", "Gather", "Linear"]
    linear = after.nodes[2]
    assert isinstance(linear, ir.Linear)
    assert linear.residual == hidden
    assert_same_results(before, after)


def test_fuse_residual_linear_keeps_a_residual_that_is_read_later() -> None:
    graph, hidden = start()
    total = graph.add(graph.linear(hidden, "o", WIDTH), graph.rms_norm(hidden, "norm", 1e-6))
    again = graph.mul(total, hidden)
    before = finish(graph, again)
    after = passes.fuse_residual_linear(before)
    assert_same_results(before, after)
    ir.check(after)
    assert all(node.overwritten != hidden for node in after.nodes)


def test_fuse_residual_norm() -> None:
    graph, hidden = start()
    branch = graph.linear(graph.rms_norm(hidden, "norm", 1e-6), "o", WIDTH)
    before = finish(graph, graph.add(hidden, graph.rms_norm(branch, "post_norm", 1e-6)))
    after = passes.fuse_residual_norm(before)
    assert names(after) == ["Embed", "RmsNorm", "Linear", "AddRmsNorm", "Gather", "Linear"]
    assert_same_results(before, after)


def test_quantize_inputs_shares_one_quantization() -> None:
    graph, hidden = start()
    x = graph.rms_norm(hidden, "norm", 1e-6)
    product = graph.mul(graph.linear(x, "a", WIDTH), graph.linear(x, "b", WIDTH))
    before = finish(graph, product)
    after = passes.quantize_inputs(before, {"a", "b"})
    assert names(after) == ["Embed", "RmsNorm", "Quantize", "Linear", "Linear", "Mul", "Gather", "Linear"]
    a, b = after.nodes[3:5]
    assert isinstance(a, ir.Linear)
    assert isinstance(b, ir.Linear)
    assert a.x_quantized is not None
    assert a.x_quantized.form is Form.A8
    assert a.x_quantized == b.x_quantized
    assert a.x is None
    assert b.x is None
    assert_same_results(before, after)


def test_quantize_inputs_keeps_f32_for_plain_weights_beside_integer_ones() -> None:
    graph, hidden = start()
    before = passes.fuse_concat(passes.fuse_attention(finish(graph, attention(graph, hidden))))
    after = passes.quantize_inputs(before, {"q"})
    qkv = next(node for node in after.nodes if isinstance(node, ir.Linear))
    assert qkv.x == hidden
    assert qkv.x_quantized is not None


def test_fuse_norm_quantize_drops_f32_that_nobody_reads() -> None:
    graph, hidden = start()
    x = graph.rms_norm(hidden, "norm", 1e-6)
    before = passes.quantize_inputs(finish(graph, graph.linear(x, "a", WIDTH)), {"a"})
    after = passes.fuse_norm_quantize(before)
    assert names(after) == ["Embed", "RmsNorm", "Linear", "Gather", "Linear"]
    norm = after.nodes[1]
    assert isinstance(norm, ir.RmsNorm)
    assert norm.out is None
    assert norm.out_quantized is not None
    assert_same_results(before, after)


def test_fuse_norm_quantize_keeps_f32_that_somebody_reads() -> None:
    graph, hidden = start()
    x = graph.rms_norm(hidden, "norm", 1e-6)
    product = graph.mul(graph.linear(x, "a", WIDTH), x)
    after = passes.fuse_norm_quantize(passes.quantize_inputs(finish(graph, product), {"a"}))
    norm = after.nodes[1]
    assert isinstance(norm, ir.RmsNorm)
    assert norm.out == x
    assert norm.out_quantized is not None


@pytest.mark.parametrize("is_integer", [False, True])
def test_final_states_stay_f32_whatever_the_head_reads(is_integer: bool) -> None:
    graph, hidden = start()
    states = graph.rms_norm(graph.gather(hidden), "norm", 1e-6)
    before = graph.finish(graph.softcap(graph.linear(states, "output", VOCAB), 3.0), states)
    after = passes.fuse(before, set(before.weights) if is_integer else set())
    assert names(after) == ["Embed", "Gather", "RmsNorm", "Linear", "Softcap"]
    assert after.states == states
    norm = after.nodes[2]
    assert isinstance(norm, ir.RmsNorm)
    assert norm.out == states
    assert (norm.out_quantized is not None) == is_integer
    assert_same_results(before, after)


def test_a_graph_cannot_overwrite_its_final_states() -> None:
    graph, hidden = start()
    states = graph.gather(hidden)
    with pytest.raises(AssertionError, match="results"):
        graph.finish(graph.linear(graph.softcap(states, 3.0), "output", VOCAB), states)


@pytest.mark.parametrize("is_integer", [False, True])
def test_a_whole_layer(is_integer: bool) -> None:
    graph, hidden = start()
    attended = attention(graph, graph.rms_norm(hidden, "norm1", 1e-6), norm=True)
    hidden = graph.add(hidden, graph.linear(attended, "o", WIDTH))
    x = graph.rms_norm(hidden, "norm2", 1e-6)
    gate = graph.activate(graph.linear(x, "gate", 12), ActivationKind.SILU)
    fed = graph.linear(graph.mul(gate, graph.linear(x, "up", 12)), "down", WIDTH)
    before = finish(graph, graph.add(hidden, fed))
    after = passes.fuse(before, set(before.weights) if is_integer else set())
    quantize = ["Quantize"] if is_integer else []
    assert names(after) == [
        "Embed",
        *("RmsNorm", "Linear", "RopeCache", "CachedAttention", *quantize, "Linear"),
        *("RmsNorm", "GatedLinear", *quantize, "Linear"),
        *("Gather", *quantize, "Linear"),
    ]
    assert after.logits == before.logits
    assert after.logits.domain is Domain.LOGIT
    assert_same_results(before, after)


@st.composite
def networks(draw: st.DrawFn) -> Graph:
    """Random networks of everything that authors can write; most match no pattern completely."""
    graph, hidden = start()
    live = [hidden]
    for index in range(draw(st.integers(1, 12))):
        x = draw(st.sampled_from(live))
        match draw(st.sampled_from(["linear", "norm", "activate", "mul", "add", "add", "attention"])):
            case "linear":
                bias = f"{index}.bias" if draw(st.booleans()) else None
                live.append(graph.linear(x, str(index), WIDTH, bias))
            case "norm":
                live.append(graph.rms_norm(x, str(index), 1e-3))
            case "activate":
                live.append(graph.activate(x, ActivationKind.SILU))
            case "mul":
                live.append(graph.mul(x, draw(st.sampled_from(live))))
            case "add":
                residual = draw(st.sampled_from(live))
                if residual != x:
                    live.remove(residual)
                    live.append(graph.add(residual, x))
            case "attention":
                parts = [
                    graph.linear(x, f"{index}.{part}", width)
                    for part, width in zip("qkv", (8, 4, 4), strict=True)
                ]
                q, k = (graph.rope(part, TABLE, 4) for part in parts[:2])
                live.append(graph.attention(q, k, parts[2], index, SHAPE))
    return finish(graph, draw(st.sampled_from(live)))


def overwrites_input(case: str) -> Graph:
    """A branch reads a value that is overwritten before the branch is used."""
    graph, x = start()
    if case == "norm":
        branch = graph.rms_norm(x, "norm", 1e-5)
    elif case == "linear":
        branch = graph.linear(x, "branch", WIDTH)
    elif case == "gated":
        gate, up = graph.linear(x, "gate", WIDTH), graph.linear(x, "up", WIDTH)
    else:
        q, k, v = (graph.linear(x, part, width) for part, width in (("q", 8), ("k", 4), ("v", 4)))
        if case == "attention":
            q_rope, k_rope = graph.rope(q, TABLE, 4), graph.rope(k, TABLE, 4)
            x = q
    sum_ = graph.add(x, graph.linear(graph.embed("other", VOCAB, WIDTH), "other_linear", WIDTH))
    if case == "gated":
        branch = graph.mul(graph.activate(gate, ActivationKind.SILU), up)
    elif case == "attention":
        branch = graph.attention(q_rope, k_rope, v, 0, SHAPE)
    elif case == "concat":
        branch = graph.attention(graph.rope(q, TABLE, 4), graph.rope(k, TABLE, 4), v, 0, SHAPE)
    return finish(graph, graph.add(sum_, branch))


@pytest.mark.parametrize("case", ["norm", "linear", "gated", "concat", "attention"])
def test_a_branch_is_not_moved_past_what_overwrites_its_input(case: str) -> None:
    before = overwrites_input(case)
    assert_same_results(before, passes.fuse(before))


@given(networks(), st.sets(st.integers(0, 11)))
def test_any_network_stays_the_same(before: Graph, integer: set[int]) -> None:
    assert_same_results(before, passes.fuse(before, {str(index) for index in integer}))
