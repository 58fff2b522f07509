"""FLOP and bytes of operators: never more on a shard than on the whole, and these for these."""

import pytest

from sbp.layout import Layout
from sbp.operator import REGISTRY, parse_type
from sbp.rule import Signature


def work(name, types, attributes, inputs=None, outputs=None, mesh=(1,)):
    op = REGISTRY[name]
    kinds = [parse_type(text) for text in types]
    rule = op.bind(kinds, attributes)
    made = op.infer(kinds, attributes)
    signature = Signature(
        tuple(Layout.parse(text) for text in inputs or ["B"] * len(kinds)),
        tuple(Layout.parse(text) for text in outputs or ["B"] * len(made)),
    )
    assert rule.admits(signature, mesh)
    return op.work(rule, kinds, made, attributes, signature, mesh)


EXPECTED = [
    ("add", ["f32[4,6]", "f32[6]"], {}, (24, 4 * (24 + 6 + 24))),
    ("sum", ["f32[4,6]"], {"axis": 0}, (24, 4 * (24 + 6))),
    ("reshape", ["f32[4,6]"], {"shape": (24,)}, (0, 0)),
    ("slice", ["bf16[4,6]"], {"starts": (0, 0), "stops": (1, 6)}, (0, 2 * 2 * 6)),
    ("embedding", ["bf16[1000,8]", "i64[2,3]"], {}, (0, 2 * 2 * 6 * 8)),
    ("adamw_update", ["f32[8]", "bf16[8]", "f32[8]", "f32[8]", "i64[]"], {}, (14 * 8, 8 * (6 * 4 + 2) + 8)),
]


@pytest.mark.parametrize("name, types, attributes, expected", EXPECTED, ids=[row[0] for row in EXPECTED])
def test_of_whole_tensors(name, types, attributes, expected):
    assert work(name, types, attributes) == expected


def test_of_shards():
    assert work("sum", ["f32[5,6]"], {"axis": 0}, ["S(0)"], ["P"], (2,)) == (18, 4 * (18 + 6))
    assert work("embedding", ["f32[1000,8]", "i64[6]"], {}, ["B", "S(0)"], ["S(0)"], (2,)) == (0, 4 * 2 * 3 * 8)


@pytest.mark.parametrize("name", REGISTRY)
def test_a_shard_is_no_more_work_than_the_whole(name):
    op = REGISTRY[name]
    for case in op.cases:
        rule, made = op.bind(case.types, case.attributes), op.infer(case.types, case.attributes)
        whole, *others = rule.signatures((2,))
        flops, moved = op.work(rule, case.types, made, case.attributes, whole, (2,))
        assert flops >= 0 and moved >= 0
        for signature in others:
            part = op.work(rule, case.types, made, case.attributes, signature, (2,))
            assert part[0] <= flops and part[1] <= moved
