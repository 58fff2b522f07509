"""Solvers for the layout problem; `solve` is the default one."""

from sbp.planner.solver.infeasible import Shortage, minimal_conflict, shortage
from sbp.planner.solver.min_marginals import MinMarginals, min_marginals
from sbp.planner.solver.pipeline import STAGES, solve
from sbp.planner.solver.result import Assignment, Limits, Solver, Status

__all__ = [
    "STAGES",
    "Assignment",
    "Limits",
    "MinMarginals",
    "Shortage",
    "Solver",
    "Status",
    "min_marginals",
    "minimal_conflict",
    "shortage",
    "solve",
]
