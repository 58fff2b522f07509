"""Who reads a value, and when: the uses of every value, grouped by phase, as planning and lowering both see them.

Within one group a layout is made once, however many uses it has. Between the forward group and the later ones a plan
chooses what is kept: a copy may live on to the backward phase, or be made again there from what is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

from sbp.graph import STATE_KINDS, Graph

OUTPUT, UPDATE = -1, -2
"""Operand numbers of uses at the end of the step: the value leaves as an output, or becomes a state's next value."""


@dataclass(frozen=True, slots=True)
class Use:
    """One reading of a value: by input `operand` of node number `node`; or, at the end, as output or as update."""

    node: int
    operand: int
    state: str = ""


@dataclass(frozen=True, slots=True)
class Group:
    """Uses that share their copies; `first` and `last` are the times (node numbers) of the earliest and latest."""

    uses: tuple[Use, ...]

    @property
    def first(self) -> int:
        """Time of the earliest use."""
        return self.uses[0].node

    @property
    def last(self) -> int:
        """Time of the latest use."""
        return self.uses[-1].node


def groups_of(graph: Graph) -> dict[str, tuple[Group, ...]]:
    """Value -> its groups in time order.

    A value that is made in the step, or fed to it, has at most two: uses in the forward phase, and later ones. A state
    value, which stays in its stored layout throughout, has one per phase. Values without uses are absent.
    """
    end = len(graph.nodes)
    updated: dict[str, list[str]] = {}
    for state, new in graph.updates.items():
        updated.setdefault(new, []).append(state)
    outputs = set(graph.outputs)
    result = {}
    for name in graph.values:
        uses = [Use(node, operand) for node, operand in graph.consumers[name]]
        phases = [graph.nodes[use.node].phase for use in uses]
        if name in outputs:
            uses.append(Use(end, OUTPUT))
        uses.extend(Use(end, UPDATE, state) for state in updated.get(name, ()))
        phases += [phases[-1] if phases else "forward"] * (len(uses) - len(phases))
        if is_resident(graph, name):
            keys = phases
        else:
            producer = graph.producers.get(name)
            made_forward = producer is None or graph.nodes[producer[0]].phase == "forward"
            keys = ["forward" if made_forward and phase == "forward" else "later" for phase in phases]
        groups = []
        for key in dict.fromkeys(keys):
            groups.append(Group(tuple(use for use, of in zip(uses, keys) if of == key)))
        if groups:
            result[name] = tuple(groups)
    return result


def is_resident(graph: Graph, value: str) -> bool:
    """Whether the value stays in its stored layout for the whole step."""
    return value not in graph.producers and graph.values[value].kind in STATE_KINDS
