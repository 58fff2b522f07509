"""Every signature that takes parts, run by the executor on real parts; and wrong marks, which that must notice.

Random programs seldom bring a Partial with all its parts to the operator that takes it. Here each such operand is made
by a reduction over a split dimension, so that every rank holds a part of its own.
"""

import copy
from fnmatch import fnmatchcase

import numpy
import pytest
from hand_plans import physical
from own_operators import OWN

from sbp.check_rules import check_operator, signature_text
from sbp.dtype import is_floating
from sbp.graph import Initial
from sbp.layout import Layout, Partial
from sbp.mesh import Mesh
from sbp.operator import REGISTRY, TensorType, _bind
from sbp.ops import library as ops
from sbp.rule import Signature
from sbp.runtime.verify import verify
from sbp.trace import GraphBuilder
from sbp.trial import draw_inputs

MESH = Mesh((2,))
REDUCTIONS = {"sum": ops.sum, "max": ops.max, "min": ops.min}


def taking_parts(op, case):
    """The signatures with Partial inputs, of numbers that may be added and compared."""
    for signature in op.bind(case.types, case.attributes).signatures(MESH.shape):
        kinds = [(kind, layout[0]) for kind, layout in zip(case.types, signature.inputs)]
        parts = [(kind, sbp) for kind, sbp in kinds if isinstance(sbp, Partial)]
        if parts and all(is_floating(kind.dtype) and 0 not in kind.shape for kind, _ in parts):
            yield signature


def run(op, case, signature, seed=0):
    """One call whose Partial operands are reductions of three rows split over the ranks; whether all is right."""
    rng = numpy.random.default_rng(seed)
    builder, feeds = GraphBuilder("parts"), {}
    drawn = draw_inputs(op, case, rng)
    with builder:
        operands = []
        for number, (kind, layout, array) in enumerate(zip(case.types, signature.inputs, drawn)):
            sbp = layout[0]
            if not isinstance(sbp, Partial):
                operands.append(builder.source(f"x{number}", kind, "input", Initial("zeros", ())))
                feeds[f"x{number}"] = array
                continue
            rows = builder.source(f"x{number}", TensorType((3, *kind.shape), kind.dtype), "input", None)
            others = [draw_inputs(op, case, rng)[number] for _ in range(2)]
            # Two rows lie on the first rank; a sum is what the case draws.
            others.append(array - others[0] - others[1] if sbp.reduce == "sum" else array)
            feeds[f"x{number}"] = numpy.stack(others)
            operands.append(REDUCTIONS[sbp.reduce](rows, axis=0))
        made = op(*operands, **case.attributes)
    made = made if isinstance(made, tuple) else (made,)
    graph = builder.finish(list(made))

    def choose(name, found):
        node = next(node for node in graph.nodes if node.name == name)
        if node.outputs[0] == made[0].name:
            return signature
        return Signature((Layout.parse("S(0)"),), (Layout.parse(str(by_output[node.outputs[0]])),))

    by_output = {x.name: layout for x, layout in zip(operands, signature.inputs)}
    plan = physical(graph, MESH, choose, lambda _, found: found[0])
    return verify(graph, plan, feeds=feeds).passed


@pytest.mark.parametrize("name", OWN)
def test_every_signature_that_takes_parts(name):
    op = REGISTRY[name]
    for case in op.cases[:2]:
        for signature in taking_parts(op, case):
            assert run(op, case, signature), f"{name} {case}: {signature}"


# Operator -> marks (linear, monotone, antitone) that it has not, each of a kind of its own.
WRONG = [
    ("sigmoid", 0, "all"), ("relu", 0, "all"), ("square", 0, "all"), ("abs", 0, "all"), ("max", 0, "all"),
    ("add", 0, "each"), ("mul", 0, "all"), ("matmul", 0, "all"), ("div", 0, "y"), ("softmax", 0, "all"),
    ("layer_norm", 0, "x"), ("where", 0, "x"), ("attention", 0, "q"), ("sum", 1, "all"), ("mean", 1, "all"),
    ("mul", 1, "all"), ("neg", 1, "all"), ("abs", 1, "all"), ("square", 1, "all"), ("matmul", 1, "x"),
    ("sub", 1, "all"), ("cumsum", 1, "all"), ("softmax", 1, "all"), ("exp", 2, "all"), ("relu", 2, "all"),
    ("add", 2, "all"), ("max", 2, "all"), ("convolution", 1, "x"), ("avg_pool2d", 1, "all"), ("silu", 1, "all"),
]  # fmt: skip
KINDS = ("linear", "monotone", "antitone")


@pytest.mark.parametrize("name, kind, mark", WRONG, ids=[f"{name}-{KINDS[kind]}-{mark}" for name, kind, mark in WRONG])
def test_a_wrong_mark_is_noticed(name, kind, mark, monkeypatch):
    """By the prover, and by running the signatures that it adds."""
    op = REGISTRY[name]
    before = [set(op.bind(case.types, case.attributes).signatures(MESH.shape)) for case in op.cases]
    marks = list(op._passing)
    marks[kind] = f"{marks[kind]} | {mark}" if isinstance(marks[kind], str) and marks[kind] else mark
    monkeypatch.setattr(op, "_passing", tuple(marks))
    _bind.cache_clear()
    try:
        report = check_operator(op, MESH.shape)
        verdicts = [
            run(op, case, signature, seed)
            for case, right in zip(op.cases, before)
            for signature in taking_parts(op, case)
            if signature not in right
            for seed in range(2)
        ]
    finally:
        _bind.cache_clear()
    assert report.unsound
    assert False in verdicts


LIGHT = [name for name in OWN if 0 < len(REGISTRY[name].input_names) <= 2]


@pytest.mark.parametrize("kind", range(3), ids=KINDS)
def test_whatever_mark_is_added_is_proven_wrong_or_known(kind):
    """No operator's rule has a right mark left out: each signature that a further mark adds is unsound, or has a reason
    why it is not admitted."""
    tried = 0
    for name in LIGHT:
        op = copy.copy(REGISTRY[name])
        marks = list(op._passing)
        marks[kind] = "all"
        op.cases = [case for case in op.cases if all(0 not in kind.shape for kind in case.types)][:2]
        right = [set(REGISTRY[name].bind(c.types, c.attributes).signatures(MESH.shape)) for c in op.cases]
        op._passing = tuple(marks)
        added = [
            signature
            for case, known in zip(op.cases, right)
            for signature in op.bind(case.types, case.attributes).signatures(MESH.shape)
            if signature not in known and any(layout.has_partial for layout in signature.inputs)
        ]
        if not added:
            continue
        tried += 1
        noticed = {finding.signature for finding in check_operator(op, MESH.shape).unsound}
        texts = {signature_text(one.inputs, one.outputs) for one in added}
        left = {text for text in texts - noticed if not any(fnmatchcase(text, glob) for glob in op.reasons)}
        assert not left, f"{name}: {left} are added by a wrong mark and not noticed"
    assert tried > 20
