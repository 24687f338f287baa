"""The tool that passes are written with."""

from __future__ import annotations

import dataclasses

from gapless.graph.ir import Domain, Form, Graph, Node, Value, check


class Rewriter:
    """Looks at a graph, collects replacements of its nodes, and applies them all at once.

    New nodes stand where the node they replace stood, so a pass that fuses several replaces the last of them.
    """

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._next_id = graph.next_id()
        self._position = {id(node): index for index, node in enumerate(graph.nodes)}
        self._producer = {value: node for node in graph.nodes for value in node.outputs}
        self._readers: dict[Value, list[Node]] = {}
        for node in graph.nodes:
            for value in node.inputs:
                self._readers.setdefault(value, []).append(node)
        self._overwritten_at: dict[Value, int] = {}
        for node in graph.nodes:
            self._note_overwritten(node, self._position[id(node)])
        self._replaced: dict[int, tuple[Node, ...]] = {}

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self._graph.nodes

    def producer(self, value: Value | None) -> Node | None:
        """The node that makes a value, as the graph was before any replacement."""
        return None if value is None else self._producer.get(value)

    def readers(self, value: Value) -> list[Node]:
        return self._readers.get(value, [])

    def has_one_reader(self, value: Value) -> bool:
        return len(self.readers(value)) == 1 and value not in self._graph.results

    def is_dead_after(self, value: Value, node: Node) -> bool:
        """Whether no later node reads the value."""
        last = self._position[id(node)]
        return value not in self._graph.results and all(
            self._position[id(reader)] <= last for reader in self.readers(value)
        )

    def can_move(self, node: Node, to: Node) -> bool:
        """Whether a node would read the same values in the place of a later one."""
        position = self._position[id(to)]
        return all(self._overwritten_at.get(value, position) >= position for value in node.inputs)

    def value(self, width: int, domain: Domain, form: Form = Form.F32) -> Value:
        """A new value."""
        self._next_id += 1
        return Value(self._next_id - 1, width, domain, form)

    def is_replaced(self, node: Node) -> bool:
        return id(node) in self._replaced

    def replace(self, node: Node, *new: Node) -> None:
        """Puts `new` in the place of a node; nothing removes it."""
        assert not self.is_replaced(node)
        self._replaced[id(node)] = new
        for made in new:
            self._note_overwritten(made, self._position[id(node)])

    def _note_overwritten(self, node: Node, position: int) -> None:
        if node.overwritten is not None:
            self._overwritten_at.setdefault(node.overwritten, position)

    def finish(self) -> Graph:
        nodes: list[Node] = []
        for node in self._graph.nodes:
            nodes.extend(self._replaced.get(id(node), (node,)))
        graph = dataclasses.replace(self._graph, nodes=tuple(nodes))
        check(graph)
        return graph
