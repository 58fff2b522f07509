"""Why a value of a plan lies as it does: how it is made, what each mesh axis does to it, what is moved and for whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from sbp.errors import PlanError
from sbp.layout import Broadcast, Layout, Partial, Split
from sbp.rule import BoundRule, Signature
from sbp.wording import counted

if TYPE_CHECKING:
    from sbp.graph import Node
    from sbp.planner.plan import BoxingStep, Plan


@dataclass(frozen=True, slots=True)
class Explanation:
    """What there is to say about a value.

    Attributes
    ----------
    value
        Its name.
    made
        The operation that makes it, with types and layouts; for a source how it is stored.
    axes
        Mesh axis -> why the value is split, whole, or in parts along it.
    unsplit
        Mesh axis -> for each dimension that cannot be split along it, why not.
    steps
        Its boxing, in program order.
    readers
        The nodes that read it, by the layout that they read it in.
    """

    value: str
    made: str
    axes: dict[str, str]
    unsplit: dict[str, tuple[str, ...]]
    steps: tuple[BoxingStep, ...]
    readers: dict[str, tuple[str, ...]]

    def to_json(self) -> dict[str, Any]:
        """The same as plain data."""
        steps = [
            {
                "kind": step.kind, "axis": step.axis, "phase": step.phase, "before": str(step.before),
                "after": str(step.after), "bytes": step.bytes, "seconds": step.seconds,
            }
            for step in self.steps
        ]  # fmt: skip
        return {
            "value": self.value,
            "made": self.made,
            "axes": dict(self.axes),
            "unsplit": {axis: list(why) for axis, why in self.unsplit.items()},
            "boxing": steps,
            "readers": {layout: list(names) for layout, names in self.readers.items()},
        }

    def __str__(self) -> str:
        lines = [self.made]
        for axis, why in self.axes.items():
            lines.append(f"  along {axis}: {why}")
            lines += [f"    not split: {why_not}" for why_not in self.unsplit.get(axis, ())]
        lines += [f"  then {_step(step)}" for step in self.steps]
        for layout, names in self.readers.items():
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            lines.append(f"  read as {layout} by {', '.join(names[:3])}{more}")
        return "\n".join(lines)


def explain(plan: Plan, name: str) -> Explanation:
    """Why a value lies as it does.

    Parameters
    ----------
    name
        A value, or a node with one output.

    Raises
    ------
    PlanError
        There is no such value; the message has near names.
    """
    graph, mesh = plan.graph, plan.mesh
    if name not in graph.values:
        of_node = [node for node in graph.nodes if node.name == name]
        if not of_node:
            near = get_close_matches(name, [*graph.values, *(node.name for node in graph.nodes)], n=3, cutoff=0.5)
            raise PlanError(f"the plan has no value {name!r}" + (f"; near names: {', '.join(near)}." if near else "."))
        if len(of_node[0].outputs) > 1:
            raise PlanError(f"{name!r} makes {', '.join(of_node[0].outputs)}; name one of them.")
        (name,) = of_node[0].outputs
    axes: dict[str, str] = {}
    unsplit: dict[str, tuple[str, ...]] = {}
    if name in graph.producers:
        at, position = graph.producers[name]
        node = graph.nodes[at]
        rule, signature = graph.rule(node), plan.decisions.signatures[node.name]
        made = _call(plan, node, signature)
        for axis, (label, parts) in enumerate(zip(mesh.names, mesh.shape)):
            if parts > 1:
                axes[label] = _why(rule, signature, node, position, axis, label)
                unsplit[label] = tuple(_why_not(rule, position, parts))
    else:
        value = graph.values[name]
        made = f"{name}: {value.kind}, {value.type} stored as {plan.decisions.sources[name]} on {mesh}"
        for axis, (label, parts) in enumerate(zip(mesh.names, mesh.shape)):
            if parts > 1:
                sbp = plan.decisions.sources[name][axis]
                axes[label] = (
                    f"dimension {sbp.axis} is split over {parts} ranks" if isinstance(sbp, Split)
                    else f"each of {parts} ranks has all of it"
                )  # fmt: skip
    readers: dict[str, list[str]] = {}
    for node in graph.nodes:
        for read, layout in zip(node.inputs, plan.decisions.signatures[node.name].inputs):
            if read == name:
                readers.setdefault(str(layout), []).append(node.name)
    steps = tuple(step for step in plan.boxing if step.value == name)
    return Explanation(name, made, axes, unsplit, steps, {layout: tuple(found) for layout, found in readers.items()})


def _call(plan: Plan, node: Node, signature: Signature) -> str:
    def typed(names: Sequence[str], layouts: Sequence[Layout]) -> str:
        return ", ".join(f"{plan.graph.values[name].type} {layout}" for name, layout in zip(names, layouts))

    call = f"{node.op}({typed(node.inputs, signature.inputs)}) -> {typed(node.outputs, signature.outputs)}"
    return f"{node.name}: {call} on {plan.mesh}, {node.phase}"


def _why(rule: BoundRule, signature: Signature, node: Node, position: int, axis: int, label: str) -> str:
    """What the operator does along a mesh axis, in words."""
    sbp = signature.outputs[position][axis]
    along = [layout[axis] for layout in signature.inputs]
    split = [(number, given.axis) for number, given in enumerate(along) if isinstance(given, Split)]
    pending = [number for number, given in enumerate(along) if isinstance(given, Partial)]
    if isinstance(sbp, Split):
        come = ", ".join(f"dimension {dimension} of {node.inputs[number]}" for number, dimension in split)
        return f"dimension {sbp.axis} is split" + (f", as {come} is" if come else "")
    if isinstance(sbp, Partial):
        kept = {number for dimension in rule.outputs[position] for number in dimension}
        for number, dimension in split:
            for factor in rule.inputs[number][dimension]:
                if factor not in kept:
                    return (
                        f"parts of a {sbp.reduce} over {label}, since dimension {dimension} of {node.inputs[number]}, "
                        f"over which the operator takes the {sbp.reduce}, is split: each rank has that of its own part"
                    )
        come = ", ".join(node.inputs[number] for number in pending)
        if come:
            return f"parts of a {sbp.reduce}, as {come} is, which the operator passes on"
        return f"parts of a {sbp.reduce}"
    assert isinstance(sbp, Broadcast)
    return "every rank makes all of it"


def _why_not(rule: BoundRule, position: int, parts: int) -> list[str]:
    """For each dimension of an output that no signature splits over so many ranks, the reason."""
    found = []
    made = [signature.outputs[position][0] for signature in rule.signatures((parts,))]
    possible = {sbp.axis for sbp in made if isinstance(sbp, Split)}
    shape = rule.output_shapes()[position]
    for dimension, numbers in enumerate(rule.outputs[position]):
        if dimension in possible or shape[dimension] == 1:
            continue
        factors = [rule.factors[number] for number in numbers if rule.factors[number].size != 1]
        whole = [factor.name for factor in factors if not factor.splittable]
        if len(factors) > 1 and not whole:
            major, rest = factors[0], shape[dimension] // max(factors[0].size, 1)
            why = (
                f"it is {counted(major.size, 'piece')} of {rest} ({major.name}), and chunks of "
                f"{-(-shape[dimension] // parts)} would cut through some"
            )
        else:
            why = "the operator needs it whole"
        found.append(f"dimension {dimension} (size {shape[dimension]}) over {parts} ranks: {why}")
    return found


def _step(step: BoxingStep) -> str:
    return (
        f"{step.kind} along {step.axis}, {step.phase}: {step.before} -> {step.after}, {step.bytes:,} bytes per rank, "
        f"{1e6 * step.seconds:.3g} us"
    )
