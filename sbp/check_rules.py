"""Rules proven by brute force: every combination of layouts, sharded for real, compared with the unsharded operator.

For every example call of an operator (`Operator.case`) and every combination of input layouts over {S(i), B, P(sum),
P(max), P(min)} the kernel runs once per rank on its shards. Every combination of output layouts under which the
ranks' results are pieces of the unsharded result is *right*. A combination that a rule admits and that is not right
is **unsound**: an error. One that is right and that no rule admits is **missing**; the operator's `reasons` may say
why it is left out.

Gradients are graphs of operators, so they are proven by proving these. Bounds of what is proven: Partial parts of
integers stay away from the limits of their type (where arithmetic wraps around), and numbers are drawn at random, a
few times, floating ones in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from sbp.errors import MeshError, RuleError, SbpError
from sbp.layout import Layout
from sbp.mesh import Mesh
from sbp.operator import REGISTRY, Case, Operator
from sbp.right_signatures import right_signatures
from sbp.rule import BoundRule, Signature
from sbp.trial import Trial
from sbp.wording import counted

DEFAULT_MESHES = ((2,), (3,), (2, 2))
FAST_MESHES = ((2,),)
_BOOLEAN_SEEDS = 6  # times as many sets of random inputs where parts are booleans, which agree by chance more often
_CONFIRMATIONS = 16  # sets of random inputs that a combination must survive to be called missing


@dataclass(frozen=True, slots=True)
class Finding:
    """A combination of layouts that is admitted and wrong, or right and not admitted.

    `detail` says what differs (unsound), or the operator's reason for leaving it out (missing, may be empty).
    """

    operator: str
    case: str
    mesh: tuple[int, ...]
    signature: str
    detail: str = ""

    def __str__(self) -> str:
        mesh = "x".join(map(str, self.mesh))
        return f"{self.operator} {self.case} on {mesh}: {self.signature}" + (f" ({self.detail})" if self.detail else "")


@dataclass(frozen=True, slots=True)
class OperatorReport:
    """What was tried and found for one operator."""

    operator: str
    cases: int
    combinations: int
    admitted: int
    unsound: tuple[Finding, ...] = ()
    missing: tuple[Finding, ...] = ()
    missing_with_reason: tuple[Finding, ...] = ()

    @property
    def sound(self) -> bool:
        """Nothing that is admitted is wrong."""
        return not self.unsound

    def __add__(self, other: OperatorReport) -> OperatorReport:
        return OperatorReport(
            self.operator,
            max(self.cases, other.cases),
            self.combinations + other.combinations,
            self.admitted + other.admitted,
            self.unsound + other.unsound,
            self.missing + other.missing,
            self.missing_with_reason + other.missing_with_reason,
        )

    def __str__(self) -> str:
        lines = [
            f"{self.operator}: {counted(self.cases, 'case')}, {counted(self.combinations, 'combination')}, "
            f"{self.admitted:,} admitted, "
            f"{len(self.unsound)} unsound, {len(self.missing)} missing, {len(self.missing_with_reason)} with reason"
        ]
        lines += [f"  UNSOUND {finding}" for finding in self.unsound]
        lines += [f"  missing {finding}" for finding in self.missing]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Report:
    """What was tried and found for several operators."""

    operators: tuple[OperatorReport, ...]

    @property
    def sound(self) -> bool:
        """Nothing that is admitted is wrong."""
        return all(report.sound for report in self.operators)

    @property
    def summary(self) -> dict[str, int]:
        """Totals: operators, cases, combinations, admitted, unsound, missing, missing_with_reason."""
        return {
            "operators": len(self.operators),
            "cases": sum(report.cases for report in self.operators),
            "combinations": sum(report.combinations for report in self.operators),
            "admitted": sum(report.admitted for report in self.operators),
            "unsound": sum(len(report.unsound) for report in self.operators),
            "missing": sum(len(report.missing) for report in self.operators),
            "missing_with_reason": sum(len(report.missing_with_reason) for report in self.operators),
        }

    def to_json(self) -> dict[str, Any]:
        """Plain data: `summary`, and `operators` by name."""

        def plain(findings: Iterable[Finding]) -> list[dict[str, Any]]:
            return [
                {"case": f.case, "mesh": list(f.mesh), "signature": f.signature, "detail": f.detail} for f in findings
            ]

        return {
            "summary": self.summary,
            "operators": {
                report.operator: {
                    "cases": report.cases,
                    "combinations": report.combinations,
                    "admitted": report.admitted,
                    "unsound": plain(report.unsound),
                    "missing": plain(report.missing),
                    "missing_with_reason": plain(report.missing_with_reason),
                }
                for report in self.operators
            },
        }

    def __str__(self) -> str:
        totals = ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in self.summary.items())
        return "\n".join([*map(str, self.operators), totals])


def check_rules(
    names: Iterable[str] | None = None,
    meshes: Sequence[tuple[int, ...]] = DEFAULT_MESHES,
    seeds: int = 2,
    progress: Callable[[str], None] | None = None,
) -> Report:
    """Check the rules of operators by brute force.

    Parameters
    ----------
    names
        Operators to check; default all that are registered.
    meshes
        Mesh shapes. On one axis every combination of layouts is tried. On several, every admitted signature is; and
        for operators with compound dimensions (reshapes), every combination of S(i) and B as well.
    seeds
        How many sets of random inputs a combination must survive.
    progress
        Called with the name of every operator before its turn.

    Raises
    ------
    GraphError
        An unknown operator.
    MeshError
        A mesh of one rank, on which every layout is the same.
    """
    if any(min(Mesh(tuple(shape)).shape) < 2 for shape in meshes):
        raise MeshError("rules are checked on mesh axes of at least 2 ranks, as on one rank every layout is the same.")
    reports = []
    for op in [REGISTRY[name] for name in (REGISTRY if names is None else dict.fromkeys(names))]:
        if progress is not None:
            progress(op.name)
        total = OperatorReport(op.name, len(op.cases), 0, 0)
        for mesh_shape in meshes:
            total += check_operator(op, mesh_shape, seeds)
        reports.append(total)
    return Report(tuple(reports))


def check_operator(op: Operator, mesh_shape: tuple[int, ...], seeds: int = 2) -> OperatorReport:
    """Check one operator's rule on all of its cases on one mesh; `RuleError` if it has none."""
    if not op.cases:
        raise RuleError(
            f'operator {op.name} has no example calls to check its rule on; add some: {op.name}.case("f32[4,6]").'
        )
    total = OperatorReport(op.name, len(op.cases), 0, 0)
    mesh = Mesh(tuple(mesh_shape))
    for case in op.cases:
        total += _check_case(op, case, mesh, seeds)
    return total


def case_text(op: Operator, case: Case) -> str:
    """A case as it is printed: `(f32[4,6], f32[6,5], axis=1)`."""
    attributes = [f"{name}={value!r}" for name, value in case.attributes.items()]
    return "(" + ", ".join([*map(str, case.types), *attributes]) + ")"


def signature_text(inputs: Sequence[Layout], outputs: Sequence[Layout]) -> str:
    """Layouts as reasons and reports write them; on a one-axis mesh without parentheses: `S(0), B -> S(0)`."""

    def text(layouts: Sequence[Layout]) -> str:
        return ", ".join(str(layout[0]) if len(layout) == 1 else str(layout) for layout in layouts)

    return f"{text(inputs)} -> {text(outputs)}"


def _check_case(op: Operator, case: Case, mesh: Mesh, seeds: int) -> OperatorReport:
    label = case_text(op, case)
    rule = op.bind(case.types, case.attributes)
    outputs = op.infer(case.types, case.attributes)
    made: dict[tuple[tuple[int, ...], int], Trial] = {}

    def trial(shape: tuple[int, ...], seed: int) -> Trial:
        if (shape, seed) not in made:
            made[shape, seed] = Trial(op, case, outputs, Mesh(shape), seed)
        return made[shape, seed]

    problem = trial(mesh.shape, 0).problem
    if problem:
        wrong = Finding(op.name, label, mesh.shape, "unsharded", problem)
        return OperatorReport(op.name, len(op.cases), 1, 0, (wrong,))
    admitted = rule.signatures(mesh.shape)
    unsound = []
    for signature in admitted:
        few_values = any(layout.has_partial and t.dtype == "bool" for t, layout in zip(case.types, signature.inputs))
        count = seeds * (_BOOLEAN_SEEDS if few_values else 1)
        tries = (trial(mesh.shape, seed).difference(signature.inputs, signature.outputs) for seed in range(count))
        reason = next(filter(None, tries), "")
        if reason:
            text = signature_text(signature.inputs, signature.outputs)
            unsound.append(Finding(op.name, label, mesh.shape, text, reason))
    tried = len(admitted)
    missing: list[Finding] = []
    reasoned: list[Finding] = []
    # On an empty tensor every layout is right, which says nothing.
    is_telling = all(0 not in t.shape for t in (*case.types, *outputs))
    if is_telling and (mesh.ndim == 1 or _has_compound(rule)):
        known = set(admitted)
        for found, count in right_signatures(lambda seed: trial(mesh.shape, seed), _CONFIRMATIONS):
            tried += count
            if found is None:
                continue
            if found in known:
                tried -= 1  # counted among the admitted ones
                continue
            if mesh.ndim > 1 and any(
                not rule.admits(one, (size,))
                and not trial((size,), 0).difference(one.inputs, one.outputs, borders=False)
                for size, one in zip(mesh.shape, _on_each_axis(found))
            ):
                continue  # it is missing on one axis already, and listed there
            text = signature_text(found.inputs, found.outputs)
            why = _reason(op, text)
            (reasoned if why else missing).append(Finding(op.name, label, mesh.shape, text, why))
    return OperatorReport(op.name, len(op.cases), tried, len(admitted), tuple(unsound), tuple(missing), tuple(reasoned))


def _reason(op: Operator, signature: str) -> str:
    """The operator's reason for leaving a signature out; keys may be globs, such as `P(max), * -> *`."""
    for pattern, reason in op.reasons.items():
        if fnmatchcase(signature, pattern):
            return reason
    return ""


def _on_each_axis(signature: Signature) -> Iterator[Signature]:
    """The one-axis signatures whose product a signature would be."""
    for axis in range(len((signature.inputs or signature.outputs)[0])):
        inputs, outputs = (
            tuple(Layout((layout[axis],)) for layout in layouts) for layouts in (signature.inputs, signature.outputs)
        )
        yield Signature(inputs, outputs)


def _has_compound(rule: BoundRule) -> bool:
    return any(len(dimension) > 1 for operand in (*rule.inputs, *rule.outputs) for dimension in operand)


def require_sound(report: Report) -> None:
    """Raise `SbpError` with every unsound combination of a report."""
    wrong = [str(finding) for item in report.operators for finding in item.unsound]
    if wrong:
        raise SbpError("rules admit layouts that give wrong numbers; correct these rules:\n" + "\n".join(wrong))
