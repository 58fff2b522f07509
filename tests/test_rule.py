"""Rules: what one line says about shapes, and exactly which layouts follow from it."""

import math
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sbp.errors import RuleError
from sbp.layout import Broadcast, Layout, Partial, Split, chunk
from sbp.mesh import Mesh
from sbp.rule import Passing, Signature, _chunk_sizes, bind, parse_rule


def bound(text, shapes, sizes=None, passing=()):
    return bind(parse_rule(text), shapes, sizes, passing)


def spelled(signature):
    """`S(0), B -> S(0)` on one mesh axis, `(S(0), B), (B, B) -> ...` on several."""
    sides = (signature.inputs, signature.outputs)
    return " -> ".join(", ".join(str(x[0]) if len(x) == 1 else str(x) for x in side) for side in sides)


def signature(text):
    """A signature of one input and one output."""
    left, _, right = text.partition("->")
    return Signature((Layout.parse(left),), (Layout.parse(right),))


SUM = Passing(frozenset({0}), frozenset({0}), "sum", "sum")

EXACT = {
    "matrix product": (
        "b m k+, k+ n -> b m n",
        [(4, 6, 8), (8, 2)],
        {"B, B -> B", "S(0), B -> S(0)", "S(1), B -> S(1)", "S(2), S(0) -> P", "B, S(1) -> S(2)"},
    ),
    "a dimension never split": (
        "b s h^, h^ -> b s h^", [(4, 6, 8), (8,)], {"B, B -> B", "S(0), B -> S(0)", "S(1), B -> S(1)"},
    ),
    "a maximum": ("m n> -> m", [(4, 6)], {"B -> B", "S(0) -> S(0)", "S(1) -> P(max)"}),
    "a minimum over all": ("m< n< -> ", [(4, 6)], {"B -> B", "S(0) -> P(min)", "S(1) -> P(min)"}),
    "elementwise": ("... -> ...", [(2, 3, 4)], {"B -> B", "S(0) -> S(0)", "S(1) -> S(1)", "S(2) -> S(2)"}),
    "elementwise of a scalar": ("... -> ...", [()], {"B -> B"}),
    "broadcasting over missing dimensions": (
        "..., ... -> ...", [(4, 6), (6,)], {"B, B -> B", "S(0), B -> S(0)", "S(1), S(0) -> S(1)"},
    ),
    "broadcasting over size one": (
        "..., ... -> ...", [(4, 1), (1, 6)], {"B, B -> B", "S(0), B -> S(0)", "B, S(1) -> S(1)"},
    ),
    "marks on a group": ("*b+ n -> n", [(2, 3, 4)], {"B -> B", "S(0) -> P", "S(1) -> P", "S(2) -> S(0)"}),
    "an output that lacks it": (
        "m+ k+, k -> m, k", [(4, 6), (6,)], {"B, B -> B, B", "S(0), B -> S(0), P", "S(1), S(0) -> P, S(0)"},
    ),
    "a dimension of size one": ("m 1 -> m", [(4, 1)], {"B -> B", "S(0) -> S(0)"}),
    "a view that splits a dimension": (
        "b (h d) -> b h d", [(4, 6)], {"B -> B", "S(0) -> S(0)", "S(1) -> S(1)"},
    ),
    "a view that joins dimensions": ("b s d -> (b s) d", [(4, 6, 3)], {"B -> B", "S(0) -> S(0)", "S(2) -> S(1)"}),
    "a broadcast scalar": ("..., ... -> ...", [(3,), ()], {"B, B -> B", "S(0), B -> S(0)"}),
}  # fmt: skip


@pytest.mark.parametrize("name", EXACT)
def test_exact_signatures_on_one_axis(name):
    text, shapes, expected = EXACT[name]
    sizes = {"h": 2} if "(h d)" in text else None
    rule = bound(text, shapes, sizes)
    found = [spelled(one) for one in rule.signatures((2,))]
    assert set(found) == expected
    assert len(found) == len(set(found)), "a signature is listed twice"
    assert found[0] == ", ".join(["B"] * len(shapes)) + " -> " + ", ".join(["B"] * len(rule.outputs))
    assert all(rule.admits(one, (2,)) for one in rule.signatures((2,)))


def test_sources_have_output_layouts_only():
    rule = bound(" -> m n", [], {"m": 4, "n": 6})
    assert [spelled(one) for one in rule.signatures((2,))] == [" -> B", " -> S(0)", " -> S(1)"]


def test_partial_passes_only_where_it_is_said():
    text, shapes = "m k+, k+ n -> m n", [(4, 6), (6, 8)]
    both = (SUM, Passing(frozenset({1}), frozenset({0}), "sum", "sum"))
    plain = {spelled(one) for one in bound(text, shapes).signatures((2,))}
    passing = {spelled(one) for one in bound(text, shapes, None, both).signatures((2,))}
    assert passing - plain == {"P, B -> P", "B, P -> P"} and plain < passing
    exchange = Passing(frozenset({0}), frozenset({0}), "max", "min")
    assert "P(max) -> P(min)" in {
        spelled(one) for one in bound("... -> ...", [(3,)], None, (exchange,)).signatures((2,))
    }


def test_several_axes_choose_in_turn():
    rule = bound("m k+, k+ n -> m n", [(4, 6), (6, 8)])
    found = {spelled(one) for one in rule.signatures((2, 2))}
    one_axis = list(rule.signatures((2,)))
    expected = set()
    for first, second in product(one_axis, one_axis):
        inputs = [Layout((a[0], b[0])) for a, b in zip(first.inputs, second.inputs)]
        outputs = [Layout((a[0], b[0])) for a, b in zip(first.outputs, second.outputs)]
        expected.add(spelled(Signature(tuple(inputs), tuple(outputs))))
    assert found == expected
    assert "(S(0), S(1)), (B, S(0)) -> (S(0), P)" in found
    assert "(S(0), S(0)), (B, B) -> (S(0), S(0))" in found


def test_axes_of_one_rank_offer_nothing():
    rule = bound("m k+, k+ n -> m n", [(4, 6), (6, 8)])
    assert {spelled(one) for one in rule.signatures((1,))} == {"B, B -> B"}
    wide = {spelled(one) for one in rule.signatures((2, 1))}
    assert wide == {
        " -> ".join(", ".join(f"({sbp}, B)" for sbp in side.split(", ")) for side in spelled(one).split(" -> "))
        for one in rule.signatures((2,))
    }
    given_with_splits = Signature((Layout.parse("S(0), S(1)"), Layout.parse("B, B")), (Layout.parse("S(0), P(max)"),))
    assert rule.admits(given_with_splits, (2, 1)), "what stands on the axis of one rank means B"


def test_different_reductions_do_not_meet_in_one_layout():
    """A sum over one axis of maxima over the other depends on the order, so no value is laid out like that."""
    passing = Passing(frozenset({0}), frozenset({0}), "sum", "sum")
    rule = bound("m n> -> m", [(4, 6)], None, (passing,))
    found = {spelled(one) for one in rule.signatures((2, 2))}
    assert "(P, P) -> (P, P)" in found and "(S(1), S(1)) -> (P(max), P(max))" in found
    assert not any("P(max)" in text and "P)" in text.replace("P(max)", "") for text in found)


def test_a_view_reaches_further_on_two_axes():
    """Of (a b) only the major factor splits, but once it is used up the next one does: not a product of 1-D rules."""
    rule = bound("(a b) c -> a b c", [(8, 4)], {"a": 2})
    wanted = signature("S(0), S(0) -> S(0), S(1)")
    assert rule.admits(wanted, (2, 2))
    assert not rule.admits(signature("S(0) -> S(1)"), (2,))
    assert not rule.admits(wanted, (4, 2)), "a has two rows, four ranks would cut through b"
    assert rule.admits(signature("S(0), S(1) -> S(0), S(2)"), (2, 2))


@pytest.mark.parametrize(
    ("flat", "major", "parts", "split"),
    [
        (12, 4, 2, "S(0) -> S(0)"),
        (12, 4, 4, "S(0) -> S(0)"),
        (12, 3, 2, None),  # 2 rows of 4 are 8 of 12, but chunks hold 6
        (10, 5, 3, "S(0) -> S(0)"),  # chunks of 4, 4, 2 are rows 2, 2, 1
        (15, 5, 3, None),  # rows 2, 2, 1 are 6, 6, 3, chunks hold 5
        (4, 2, 3, "S(0) -> S(0)"),  # chunks of 2, 2, 0 are rows 1, 1, 0
        (7, 7, 3, "S(0) -> S(0)"),  # no minor factor: any split
        (5, 1, 2, "S(0) -> S(1)"),  # no major factor: the minor one splits
    ],
)
def test_compound_dimensions_split_where_chunks_hold_whole_rows(flat, major, parts, split):
    rule = bound("(h d) -> h d", [(flat,)], {"h": major})
    others = {spelled(one) for one in rule.signatures((parts,))} - {"B -> B"}
    assert split in others if split else not others


@given(
    st.lists(st.integers(1, 6), min_size=1, max_size=3),
    st.lists(st.integers(2, 4), min_size=1, max_size=2),
)
@settings(max_examples=200)
def test_views_are_admitted_exactly_where_boxes_hold_the_same_elements(factors, mesh_shape):
    """Independent of how the rule decides: two layouts fit if on every rank the flat indices in both boxes agree."""
    names = [f"d{i}" for i in range(len(factors))]
    rule = bound(f"({' '.join(names)}) -> {' '.join(names)}", [(math.prod(factors),)], dict(zip(names, factors)))
    flat, shape, mesh = (math.prod(factors),), tuple(factors), Mesh(tuple(mesh_shape))
    admitted = set(rule.signatures(mesh.shape))
    ins = [Layout(axes) for axes in product([Broadcast(), Split(0)], repeat=mesh.ndim)]
    outs = [Layout(axes) for axes in product([Broadcast(), *map(Split, range(len(shape)))], repeat=mesh.ndim)]
    for x, y in product(ins, outs):
        same, empty = True, False
        for place in mesh.coordinates():
            (held,) = x.shard(flat, mesh.shape, place).slices
            box = y.shard(shape, mesh.shape, place)
            indices = [
                sum(i * math.prod(shape[d + 1 :]) for d, i in enumerate(at))
                for at in product(*(range(s.start, s.stop) for s in box.slices))
            ]
            same &= indices == list(range(flat[0]))[held]
            empty |= not indices
        found = Signature((x,), (y,))
        if found in admitted:
            assert same, f"{found} on {mesh} is admitted, but ranks hold different elements"
        elif not empty:
            assert not same, f"{found} on {mesh} is not admitted, but ranks hold the same elements"


@given(st.lists(st.integers(0, 30), min_size=1, max_size=3), st.integers(1, 12))
def test_chunk_sizes(sizes, parts):
    expected = {chunk(size, parts, index)[1] for size in sizes for index in range(parts)}
    assert _chunk_sizes(tuple(sizes), parts) == tuple(sorted(expected, reverse=True))


def test_output_shapes():
    cases = [
        ("*b m k+, *b k+ n -> *b m n", [(2, 1, 3, 4), (5, 4, 6)], None, ((2, 5, 3, 6),)),
        ("..., ..., ... -> ...", [(4, 1), (5,), ()], None, ((4, 5),)),
        ("b (h d) -> b h d", [(2, 12)], {"h": 3}, ((2, 3, 4),)),
        ("b h d -> b (h d), (b h)  d", [(2, 3, 4)], None, ((2, 12), (6, 4))),
        ("i^ -> v", [(3,)], {"v": 7}, ((7,),)),
        ("a 1 -> a", [(3, 1)], None, ((3,),)),
        ("..., ... -> ...", [(0, 3), (1, 3)], None, ((0, 3),)),
        ("(a b) -> a b", [(0,)], {"a": 4}, ((4, 0),)),
    ]
    for text, shapes, sizes, expected in cases:
        rule = bound(text, shapes, sizes)
        assert rule.output_shapes() == expected, text
        assert rule.input_shapes() == tuple(shapes), text


def test_least_fill_leaves_out_uneven_splits_only():
    rule = bound("m n -> m n", [(5, 8)])
    assert {spelled(one) for one in rule.signatures((4,), least_fill=1.0)} == {"B -> B", "S(1) -> S(1)"}
    assert {spelled(one) for one in rule.signatures((4,), least_fill=0.6)} == {"B -> B", "S(0) -> S(0)", "S(1) -> S(1)"}


def test_local_sizes():
    rule = bound("*b m k+, k+ n -> *b m n", [(2, 3, 5, 8), (8, 6)])
    one = next(s for s in rule.signatures((2, 4)) if spelled(s) == "(S(2), S(3)), (B, S(0)) -> (S(2), P)")
    sizes = rule.local_sizes(one, (2, 4))
    assert (sizes["b"], sizes["m"], sizes["k"], sizes["n"]) == (6, 3, 2, 6)
    split = next(s for s in rule.signatures((2, 4)) if spelled(s) == "(S(0), S(1)), (B, B) -> (S(0), S(1))")
    assert rule.local_sizes(split, (2, 4))["b"] == 1


def test_shards_of_a_signature():
    rule = bound("m k+, k+ n -> m n", [(4, 5), (5, 3)])
    one = next(s for s in rule.signatures((2,)) if spelled(s) == "S(1), S(0) -> P")
    inputs, outputs = rule.shards(one, (2,), (1,))
    assert [box.shape for box in (*inputs, *outputs)] == [(4, 2), (2, 3), (4, 3)]
    assert [box.offset for box in inputs] == [(0, 3), (3, 0)]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("m n", "has no '->'"),
        ("m n -> m", "an output lacks n; mark what is summed with +"),
        ("m k, k+ n -> m", "an output lacks n"),
        ("m n! -> m n", "cannot read 'n!'"),
        ("m+> -> ", "carries two reductions"),
        ("*a *b -> *a *b", "one group of dimensions only"),
        ("(*a b) -> *a b", "cannot hold the group"),
        ("i i -> i", "an operand has i twice"),
        ("i -> i i", "an operand has i twice"),
    ],
)
def test_rules_that_cannot_be_read(text, says):
    with pytest.raises(RuleError) as error:
        parse_rule(text)
    assert says in str(error.value) and repr(text) in str(error.value)


def test_a_diagonal_is_legal_where_it_is_never_split():
    rule = bound("b i^ i^ -> b i^", [(2, 3, 3)])
    assert {spelled(one) for one in rule.signatures((2,))} == {"B -> B", "S(0) -> S(0)"}


@pytest.mark.parametrize(
    ("text", "shapes", "sizes", "says"),
    [
        ("m k+, k+ n -> m n", [(2, 3)], None, "takes 2 inputs"),
        ("m k+, k+ n -> m n", [(2, 3), (4, 5)], None, "input 1 of shape [4, 5] has 4 where dimension k"),
        ("m k+, k+ n -> m n", [(2, 3), (3,)], None, "input 1 of shape [3] has 1 dimensions, its rule"),
        ("*b m -> *b m", [()], None, "wants at least 1"),
        ("..., ... -> ...", [(2, 3), (4, 3)], None, "does not broadcast with the other inputs ([2, 3], [4, 3])"),
        ("(a b) -> a b", [(7,)], {"a": 2}, "cannot divide 7 into (a b)"),
        ("(a b) -> a b", [(7,)], None, "cannot divide 7 into (a b)"),
        ("(a b) -> a b", [(8,)], {"a": 2, "b": 3}, "has 8 where dimension (a b)"),
        ("m 1 -> m", [(3, 2)], None, "must have size 1 in dimension 1"),
        ("m -> m v", [(3,)], None, "does not say the size of output dimension 'v'"),
        ("m -> m *b", [(3,)], None, "no input says how many dimensions *b has"),
    ],
)
def test_shapes_that_do_not_fit(text, shapes, sizes, says):
    with pytest.raises(RuleError) as error:
        bound(text, shapes, sizes)
    assert says in str(error.value) and repr(text) in str(error.value)


def test_reductions_of_partial_inputs_are_exact_on_every_axis():
    passing = (Passing(frozenset({0, 1}), frozenset({0}), "sum", "sum"),)
    rule = bound("..., ... -> ...", [(4,), (4,)], None, passing)
    found = {spelled(one) for one in rule.signatures((2, 2))}
    assert "(P, S(0)), (P, S(0)) -> (P, S(0))" in found and "(P, B), (B, P) -> (P, P)" not in found
    assert all(
        isinstance(sbp, (Broadcast, Split, Partial)) for one in rule.signatures((2, 2)) for sbp in one.outputs[0]
    )
