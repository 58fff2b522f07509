"""Random programs on random meshes under random legal layouts, forward and backward, against the unsharded run.

`make fuzz` runs 2,000 of them (SBP_FUZZ says how many). What failed once is kept in FOUND.
"""

import os

import pytest
from random_programs import operators, random_mesh, random_plan, random_program, wrong_values

from sbp.cuda.numpy_backend import NumpyBackend
from sbp.mesh import Mesh
from sbp.operator import REGISTRY, _bind
from sbp.planner.physical import Box
from sbp.runtime.verify import verify

COUNT = int(os.environ.get("SBP_FUZZ", "100"))
FOUND = {  # seed -> what was wrong
    594: "the test: an angle of zeros, which jumps with their signs",
    1307: "the test: a gradient that is zero but for rounding, and the only one there is to compare it with",
}


@pytest.mark.parametrize("seed", [*range(COUNT), *(seed for seed in FOUND if seed >= COUNT)])
def test_sharded_equals_unsharded(seed):
    program = random_program(seed)
    mesh = random_mesh(program)
    wrong = wrong_values(program, mesh, seed)
    assert not wrong, "\n".join(map(str, wrong))


def test_programs_reach_what_they_should():
    """Sizes, backward passes, updates, meshes of every rank; in the first hundred nearly every operator."""
    programs = [random_program(seed) for seed in range(100)]
    assert min(len(program.operators) for program in programs) >= 5
    assert sum(any(node.phase == "backward" for node in program.graph.nodes) for program in programs) > 90
    assert sum(bool(program.graph.updates) for program in programs) > 40
    used = {name for program in programs for name in program.operators}
    assert len(used) > 0.8 * len(operators())
    assert {random_mesh(program).ndim for program in programs} == {1, 2, 3}
    kinds = {
        operation.kind
        for seed in range(8)
        for operation in random_plan(programs[seed], random_mesh(programs[seed]), seed).operations
        if isinstance(operation, Box)
    }
    assert kinds == {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "slice", "fill", "pad"}


def test_equal_seeds_give_equal_programs():
    first, second = random_program(11), random_program(11)
    assert first.graph.to_json() == second.graph.to_json()
    assert all((first.feeds[name] == second.feeds[name]).all() for name in first.feeds)


class OffByAPart(NumpyBackend):
    """Its kernel of one operator is wrong by a part in a million."""

    def __init__(self, wrong):
        self.wrong = wrong

    def kernel(self, name, default):
        def scaled(xp, *inputs, **attributes):
            return default(xp, *inputs, **attributes) * (1 + 1e-6)

        return scaled if name == self.wrong else default


def test_a_wrong_kernel_is_noticed():
    program = random_program(2)
    plan = random_plan(program, Mesh((3,)), 2)
    assert verify(program.graph, plan, feeds=program.feeds)
    assert not verify(program.graph, plan, feeds=program.feeds, backend=OffByAPart("sum"))


def test_a_wrong_rule_is_noticed(monkeypatch):
    """If sums passed a sigmoid, some programs would compute something else; tests/test_parts.py has other marks."""
    sigmoid = REGISTRY["sigmoid"]
    monkeypatch.setattr(sigmoid, "_passing", ("all", *sigmoid._passing[1:]))
    _bind.cache_clear()
    try:
        programs = (random_program(seed) for seed in range(200))
        verdicts = (
            verify(program.graph, random_plan(program, random_mesh(program), program.seed), feeds=program.feeds).passed
            for program in programs
            if "sigmoid" in program.operators
        )
        assert not all(verdicts)
    finally:
        _bind.cache_clear()
