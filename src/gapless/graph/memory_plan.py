"""Places every activation in one arena, so that buffers which are needed at the same time do not overlap."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gapless.graph.ir import Domain, Form, Graph, Value

ALIGNMENT = 64  # bytes: a cache line, and the widest vector


@dataclass(frozen=True)
class Buffer:
    """A place in the arena: `num_rows` rows of `row_bytes`, needed from node `first` up to node `last`."""

    domain: Domain
    row_bytes: int
    num_rows: int
    offset: int
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        return self.row_bytes * self.num_rows

    def overlaps(self, other: Buffer) -> bool:
        """Whether the two share a byte at the same time."""
        return (
            self.first <= other.last
            and other.first <= self.last
            and self.offset < other.offset + other.nbytes
            and other.offset < self.offset + self.nbytes
        )


@dataclass(frozen=True)
class MemoryPlan:
    """The buffer of each value (values that take over one another share it), and the size of the arena."""

    buffers: Mapping[Value, Buffer]
    arena_bytes: int


def plan_memory(
    graph: Graph, num_rows: Mapping[Domain, int], a8_row_bytes: Callable[[int], int]
) -> MemoryPlan:
    """Plans for at most `num_rows` rows of each domain; `a8_row_bytes(width)` is the size of a quantized row.

    Largest first, each at the lowest offset that is free during its life: simple, and within a few percent of
    the largest sum of live buffers on decoder graphs.
    """
    owner = _owners(graph)
    life = _lives(graph, owner)
    row_bytes = {
        value: a8_row_bytes(value.width) if value.form is Form.A8 else 4 * value.width for value in life
    }
    placed: dict[Value, Buffer] = {}
    for value in sorted(life, key=lambda v: (-row_bytes[v] * num_rows[v.domain], v.id)):
        first, last = life[value]
        size = row_bytes[value] * num_rows[value.domain]
        offset = _lowest_gap(size, [b for b in placed.values() if b.first <= last and first <= b.last])
        placed[value] = Buffer(value.domain, row_bytes[value], num_rows[value.domain], offset, first, last)
    arena_bytes = max((_aligned(buffer.offset + buffer.nbytes) for buffer in placed.values()), default=0)
    return MemoryPlan({value: placed[owner[value]] for value in owner}, arena_bytes)


def _owners(graph: Graph) -> dict[Value, Value]:
    """The first value in each chain of values that take over one another's buffer."""
    owner: dict[Value, Value] = {}
    for node in graph.nodes:
        for value in node.outputs:
            owner[value] = value if node.overwritten is None else owner[node.overwritten]
    return owner


def _lives(graph: Graph, owner: Mapping[Value, Value]) -> dict[Value, tuple[int, int]]:
    """From which node to which node each buffer is needed.

    A step with many logit rows runs the nodes on logit rows several times, for some rows each. So the token
    rows that they read are needed until the end, as the logits are.
    """
    life: dict[Value, tuple[int, int]] = {}
    to_the_end = {owner[graph.logits]}
    for index, node in enumerate(graph.nodes):
        for value in (*node.inputs, *node.outputs):
            first, _ = life.get(owner[value], (index, index))
            life[owner[value]] = (first, index)
        if any(value.domain is Domain.LOGIT for value in node.outputs):
            to_the_end.update(owner[value] for value in node.inputs if value.domain is Domain.TOKEN)
    for value in to_the_end:
        life[value] = (life[value][0], len(graph.nodes))
    return life


def _lowest_gap(size: int, taken: list[Buffer]) -> int:
    offset = 0
    for buffer in sorted(taken, key=lambda b: b.offset):
        if offset + size <= buffer.offset:
            break
        offset = max(offset, _aligned(buffer.offset + buffer.nbytes))
    return offset


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
