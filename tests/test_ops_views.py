"""Views, cutting and joining against PyTorch, and the rules that reshapes get."""

import math

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from operator_programs import Program, check_against_torch

from sbp.errors import RuleError
from sbp.layout import Broadcast, Layout, Split
from sbp.mesh import Mesh
from sbp.operator import REGISTRY, TensorType, parse_type
from sbp.ops import library as ops
from sbp.rule import Signature

RNG = numpy.random.default_rng(6)
X = RNG.standard_normal((4, 6))
CUBE = RNG.standard_normal((2, 3, 4))

torch = pytest.importorskip("torch")

PROGRAMS = {
    "reshape": (lambda x: x.reshape(2, -1, 3), lambda x: x.reshape(2, -1, 3), X),
    "reshape to a scalar's shape": (lambda x: x.reshape(1, 1), lambda x: x.reshape(1, 1), X[:1, :1]),
    "permute": (lambda x: x.permute(2, 0, 1), lambda x: x.permute(2, 0, 1), CUBE),
    "permute from the end": (lambda x: x.permute(-1, 0, 1), lambda x: x.permute(-1, 0, 1), CUBE),
    "transpose": (lambda x: x.transpose(), lambda x: x.transpose(-2, -1), CUBE),
    "transpose outer": (lambda x: x.transpose(0, 2), lambda x: x.transpose(0, 2), CUBE),
    "squeeze": (lambda x: ops.squeeze(x, axis=1), lambda x: x.squeeze(1), CUBE[:, :1]),
    "squeeze all": (ops.squeeze, torch.squeeze, CUBE[:1, :, :1]),
    "unsqueeze": (lambda x: ops.unsqueeze(x, axis=-1), lambda x: x.unsqueeze(-1), X),
    "expand": (lambda x: x.expand(5, -1, 6), lambda x: x.expand(5, -1, 6), X),
    "expand ones": (lambda x: x.expand(2, 4, 6), lambda x: x.expand(2, 4, 6), X[:, :1]),
    "slice": (lambda x: ops.slice(x, starts=(1, -4), stops=(None, -1)), lambda x: x[1:, -4:-1], X),
    "slice by steps": (lambda x: ops.slice(x, starts=(0, 1), stops=(4, 6), steps=(3, 2)), lambda x: x[0:4:3, 1:6:2], X),
    "slice of nothing": (lambda x: ops.slice(x, starts=(3, 0), stops=(1, 6)), lambda x: x[3:1], X),
    "narrow": (lambda x: ops.narrow(x, 1, 2, 3), lambda x: x.narrow(1, 2, 3), X),
    "select": (lambda x: ops.select(x, 1, -1), lambda x: x.select(1, -1), CUBE),
    "pad": (lambda x: ops.pad(x, before=(0, 1), after=(2, 0)), lambda x: torch.nn.functional.pad(x, (1, 0, 0, 2)), X),
    "split": (lambda x: ops.split(x, sizes=(1, 2, 3), axis=-1), lambda x: x.split((1, 2, 3), -1), X),
    "split, some unused": (
        lambda x: ops.split(x, sizes=(1, 2, 3), axis=1)[1],
        lambda x: x.split((1, 2, 3), 1)[1],
        X,
    ),
    "split, two of three used": (
        lambda x: ops.split(x, sizes=(1, 2, 3), axis=1)[::2],
        lambda x: x.split((1, 2, 3), 1)[::2],
        X,
    ),
    "chunk": (lambda x: ops.chunk(x, 4, axis=1), lambda x: x.chunk(4, 1), X),
    "tril": (lambda x: ops.tril(x, diagonal=1), lambda x: x.tril(1), CUBE),
    "triu": (lambda x: ops.triu(x, diagonal=-1), lambda x: x.triu(-1), X),
}


@pytest.mark.parametrize("label", PROGRAMS)
def test_equals_pytorch(label):
    mine, theirs, x = PROGRAMS[label]
    check_against_torch(mine, theirs, x)


def test_concat_and_stack():
    check_against_torch(lambda *xs: ops.concat(*xs, axis=-1), lambda *xs: torch.cat(xs, -1), X, X[:, :1], X[:, 2:5])
    check_against_torch(lambda *xs: ops.stack(*xs, axis=1), lambda *xs: torch.stack(xs, 1), X, 2 * X, X + 1)
    check_against_torch(lambda x: ops.concat(x, axis=0), lambda x: x, X)


def test_nothing_is_moved_as_well():
    nothing = X[:0]
    check_against_torch(lambda x, y: ops.concat(x, y, axis=0), lambda x, y: torch.cat((x, y), 0), X, nothing)
    check_against_torch(lambda x: x.reshape(2, 0, 5), lambda x: x.reshape(2, 0, 5), nothing)


def test_one_piece_is_still_a_tuple():
    program = Program(lambda x: ops.split(x, sizes=(6,), axis=1), X)
    numpy.testing.assert_array_equal(program.forward()[0], X)
    assert program.outputs == ["split:0"]


RULES = {
    ((8, 4), (2, 4, 4)): "(f0 f1) f2 -> f0 f1 f2",
    ((6, 4), (4, 6)): "(f0 f1^) f4^ -> (f0 f2^) f3^",
    ((2, 3, 4), (6, 4)): "f0 f1 f2 -> (f0 f1) f2",
    ((4, 6), (24,)): "f0 f1 -> (f0 f1)",
    ((1, 5), (5, 1)): "1 f0 -> f0 1",
    ((), (1,)): "*none^ -> 1",
    ((4, 3, 5), (2, 6, 5)): "(f0 f1) f2 f3 -> f0 (f1 f2) f3",
    ((2, 0), (2, 0, 3)): "f0 f1 -> f0 f1 f2^",
    ((2, 0), (0, 3)): "f0^ f1^ -> f2^ f3^",
    ((2, 3, 5), (3, 2, 5)): "f0^ f2^ f4 -> f1^ f3^ f4",
}


@pytest.mark.parametrize("shape, target", RULES, ids=str)
def test_reshape_rules(shape, target):
    from sbp.ops.views import reshape_rule

    assert reshape_rule(shape, target)[0] == RULES[shape, target]


def test_a_mesh_splits_a_compound_dimension_factor_by_factor():
    rule = REGISTRY["reshape"].bind([TensorType((8, 4), "f32")], {"shape": (2, 4, 4)})
    both = Layout.parse("S(0), S(0)")
    assert rule.admits(Signature((both,), (Layout.parse("S(0), S(1)"),)), (2, 2))
    assert not rule.admits(Signature((both,), (Layout.parse("S(0), S(0)"),)), (2, 2))


factors = st.lists(st.sampled_from([1, 2, 3, 4, 5]), min_size=1, max_size=5)


@st.composite
def reshapes(draw):
    sizes = draw(factors)

    def grouped(order):
        shape, cuts = [1], draw(st.lists(st.booleans(), min_size=len(order), max_size=len(order)))
        for size, cut in zip(order, cuts):
            if cut:
                shape.append(size)
            else:
                shape[-1] *= size
        return tuple(shape)

    return grouped(sizes), grouped(draw(st.permutations(sizes)) if draw(st.booleans()) else sizes)


@given(reshapes(), st.sampled_from([2, 3, 4]))
def test_reshape_admits_exactly_the_splits_that_are_boxes_on_both_sides(shapes, parts):
    """Of all one-axis signatures over S(i), those right on numbered elements: sound, and none of even size missing."""
    shape, target = shapes
    elements = numpy.arange(math.prod(shape))
    x, y = elements.reshape(shape), elements.reshape(target)
    rule = REGISTRY["reshape"].bind([TensorType(shape, "f32")], {"shape": target})
    mesh = Mesh((parts,))
    for i in range(len(shape)):
        for j in range(len(target)):
            before, after = Layout((Split(i),)), Layout((Split(j),))
            boxes = [
                (x[before.shard(shape, (parts,), place).slices], y[after.shard(target, (parts,), place).slices])
                for place in mesh.coordinates()
            ]
            right = all(a.size == b.size and (a.ravel() == b.ravel()).all() for a, b in boxes)
            admitted = rule.admits(Signature((before,), (after,)), (parts,))
            assert right or not admitted
            if shape[i] % parts == 0 and target[j] % parts == 0:
                assert admitted or not right


REFUSED = [
    ("reshape", "f32[4,6]", {"shape": (5, 5)}, "24 elements"),
    ("reshape", "f32[4,6]", {"shape": (-1, -1)}, "one -1"),
    ("reshape", "f32[4,6]", {"shape": (-1, 5)}, "do not divide"),
    ("permute", "f32[4,6]", {"order": (0, 0)}, "each of the 2 dimensions"),
    ("permute", "f32[4,6]", {"order": (0, 2)}, "no dimension 2"),
    ("squeeze", "f32[4,6]", {"axis": 1}, "size 6"),
    ("expand", "f32[4,6]", {"shape": (4, 7)}, "from 6 to 7"),
    ("expand", "f32[4,6]", {"shape": (-1, 4, 6)}, "-1"),
    ("slice", "f32[4,6]", {"starts": (0,), "stops": (1,)}, "per dimension"),
    ("slice", "f32[4]", {"starts": (3,), "stops": (0,), "steps": (-1,)}, "flip"),
    ("pad", "f32[4]", {"before": (-1,), "after": (0,)}, "at least 0"),
    ("split", "f32[4,6]", {"sizes": (1, 2), "axis": 1}, "add up to 6"),
]


@pytest.mark.parametrize("name, text, attributes, message", REFUSED)
def test_refuses(name, text, attributes, message):
    with pytest.raises(RuleError, match=message):
        REGISTRY[name].infer([parse_type(text)], attributes)


@pytest.mark.parametrize(
    "types, axis, message",
    [
        (("f32[4,6]", "f32[5,5]"), 1, "dimension d0"),
        (("f32[4]", "i64[4]"), 0, "element types"),
        (("f32[4]", "f32[4,1]"), 0, "ranks"),
        ((), 0, "at least one"),
    ],
)
def test_concat_refuses(types, axis, message):
    with pytest.raises(RuleError, match=message):
        REGISTRY["concat"].infer([parse_type(text) for text in types], {"axis": axis})


def test_partial_passes_through_every_view():
    for name, attributes in (("reshape", {"shape": (24,)}), ("pad", {"before": (1, 0), "after": (0, 0)})):
        rule = REGISTRY[name].bind([TensorType((4, 6), "f32")], attributes)
        for text in ("P", "P(max)", "P(min)"):
            assert rule.admits(Signature((Layout.parse(text),), (Layout.parse(text),)), (2,))
    rule = REGISTRY["pad"].bind([TensorType((4, 6), "f32")], {"before": (1, 0), "after": (0, 0), "value": 1.0})
    assert not rule.admits(Signature((Layout.parse("P"),), (Layout.parse("P"),)), (2,))
    assert rule.admits(Signature((Layout((Broadcast(),)),), (Layout((Broadcast(),)),)), (2,))
