"""Live buffers never overlap, and dead ones are used again."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import given
from hypothesis import strategies as st

from gapless.graph import ir
from gapless.graph.ir import (
    Activate,
    ActivationKind,
    Add,
    Domain,
    Embed,
    Form,
    Graph,
    Quantize,
    Value,
    Weight,
)
from gapless.graph.memory_plan import ALIGNMENT, MemoryPlan, plan_memory

NUM_ROWS = {Domain.TOKEN: 7, Domain.LOGIT: 3}


def a8_row_bytes(width: int) -> int:
    return width + 4 * (-(-width // 32))


def plan(graph: Graph) -> MemoryPlan:
    return plan_memory(graph, NUM_ROWS, a8_row_bytes)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Random graphs of additions in place, element-wise copies, quantizations and gathers."""
    width = draw(st.integers(1, 100))
    live = [Value(0, width)]
    nodes: list[ir.Node] = [Embed(Weight("embedding", (5, width)), 1.0, live[0])]
    for index in range(1, draw(st.integers(1, 30)) + 1):
        x = draw(st.sampled_from(live))
        same = [value for value in live if (value.width, value.domain) == (x.width, x.domain) and value != x]
        kind = draw(st.sampled_from(["activate", "add", "quantize", "gather"]))
        if kind == "add" and same:
            residual = draw(st.sampled_from(same))
            out = Value(index, x.width, x.domain)
            live.remove(residual)
            nodes.append(Add(residual, x, out))
        elif kind == "quantize":
            nodes.append(Quantize(x, Value(index, x.width, x.domain, Form.A8)))
            continue
        elif kind == "gather" and x.domain is Domain.TOKEN:
            out = Value(index, x.width, Domain.LOGIT)
            nodes.append(ir.Gather(x, out))
        else:
            out = Value(index, x.width, x.domain)
            nodes.append(Activate(x, ActivationKind.RELU, out))
        live.append(out)
    graph = Graph(tuple(nodes), live[-1])
    ir.check(graph)
    return graph


@given(graphs())
def test_live_buffers_do_not_overlap(graph: Graph) -> None:
    planned = plan(graph)
    distinct = {id(buffer): buffer for buffer in planned.buffers.values()}
    for one, other in combinations(distinct.values(), 2):
        assert not one.overlaps(other), (one, other)


@given(graphs())
def test_buffers_lie_aligned_inside_the_arena_and_live_while_they_are_used(graph: Graph) -> None:
    planned = plan(graph)
    for value, buffer in planned.buffers.items():
        expected_row = a8_row_bytes(value.width) if value.form is Form.A8 else 4 * value.width
        assert buffer.row_bytes == expected_row
        assert buffer.nbytes == expected_row * NUM_ROWS[value.domain]
        assert buffer.offset % ALIGNMENT == 0
        assert 0 <= buffer.offset <= planned.arena_bytes - buffer.nbytes
    for index, node in enumerate(graph.nodes):
        for value in (*node.inputs, *node.outputs):
            assert planned.buffers[value].first <= index <= planned.buffers[value].last
    assert planned.buffers[graph.logits].last == len(graph.nodes)


@given(graphs())
def test_a_node_in_place_shares_the_buffer(graph: Graph) -> None:
    planned = plan(graph)
    for node in graph.nodes:
        if node.overwritten is not None:
            assert planned.buffers[node.overwritten] is planned.buffers[node.outputs[0]]


def test_a_chain_needs_two_buffers() -> None:
    values = [Value(index, 16) for index in range(10)]
    nodes: list[ir.Node] = [Embed(Weight("embedding", (5, 16)), 1.0, values[0])]
    nodes += [Activate(x, ActivationKind.RELU, out) for x, out in pairwise(values)]
    assert plan(Graph(tuple(nodes), values[-1])).arena_bytes == 2 * 16 * 4 * 7


def test_what_the_head_reads_outlives_the_head() -> None:
    """The head runs once for every few rows that need logits, and gathers again each time."""
    hidden, gathered, logits = Value(0, 16), Value(1, 16, Domain.LOGIT), Value(2, 64, Domain.LOGIT)
    nodes = (
        Embed(Weight("embedding", (5, 16)), 1.0, hidden),
        ir.Gather(hidden, gathered),
        ir.Linear(gathered, (ir.Segment(Weight("output", (64, 16))),), logits),
    )
    planned = plan(Graph(nodes, logits))
    assert planned.buffers[hidden].last == len(nodes)
    assert planned.arena_bytes == 448 + 192 + 768
