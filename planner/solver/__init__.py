"""Solvers for the layout problem; `solve` is the default one."""

from sbp.planner.solver.pipeline import solve
from sbp.planner.solver.result import Assignment, Limits, Solver, Status

__all__ = ["Assignment", "Limits", "Solver", "Status", "solve"]
