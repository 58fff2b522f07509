"""Imports point down the floors: the language knows no operator, no operator knows a planner, and so on up."""

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {"sbp": "sbp", "ops": "sbp.ops", "planner": "sbp.planner", "comm": "sbp.comm", "cuda": "sbp.cuda"}

LANGUAGE = frozenset(
    {"layout", "mesh", "rule", "graph", "dtype", "errors", "fields", "operator", "wording"}
    | {"shards", "trial", "right_signatures", "borders", "check_rules"}
)
"""The files of `sbp/` that are the language and its proof; the others beside them are the front."""

FLOORS = {"language": 1, "ops": 2, "front": 3, "planner": 3, "comm": 4, "cuda": 4, "runtime": 5, "cli": 6, "report": 6}

MAY_IMPORT = {
    "language": {"language"},
    "ops": {"language", "ops"},
    "front": {"language", "ops", "front"},
    "planner": {"language", "ops", "front", "planner"},
    "comm": {"language", "comm"},
    "cuda": {"language", "cuda"},
    "runtime": set(FLOORS) - {"cli", "report"},
    "cli": set(FLOORS),
    "report": set(FLOORS) - {"cli"},
}

SHORTCUTS = {
    "sbp.layout": {"_repr_html_"},
    "sbp.graph": {"_repr_html_"},
    "sbp.planner.plan": {"__str__", "_repr_html_", "show", "verify", "run", "to_torch"},
    "sbp.planner.baselines": {"__str__"},
    "sbp.runtime.torch_report": {"__str__"},
}
"""Methods by which data is shown or run from where it is: they import what is above when they are called."""

EXTERNAL = {
    "language": {"numpy", "networkx", "cupy"},  # CuPy only where an array is its own
    "ops": {"numpy"},
    "comm": {"numpy", "mpi4py", "cupy", "cupyx", "torch"},
    "cuda": {"numpy", "cupy", "cupyx", "torch"},
}
"""What the lower floors may take from outside of the standard library."""


@dataclass(frozen=True)
class Import:
    """One imported module: by whom, on which line, inside which function ("" for none), for types only?"""

    by: str
    line: int
    target: str
    function: str
    typing_only: bool


def _modules():
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            parts = [*package.split("."), *path.relative_to(ROOT / folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = _modules()


def _imports(name, path):
    found = []

    def targets(node):
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        assert node.level == 0, f"{path}:{node.lineno}: imports are absolute here"
        full = [f"{node.module}.{alias.name}" for alias in node.names]
        return [item if item in MODULES else node.module for item in full]

    def visit(node, function, typing_only):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.extend(Import(name, node.lineno, target, function, typing_only) for target in targets(node))
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for item in node.body:
                visit(item, function or node.name, typing_only)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for item in node.body:
                visit(item, function, True)
            for item in node.orelse:
                visit(item, function, typing_only)
        else:
            for item in ast.iter_child_nodes(node):
                visit(item, function, typing_only)

    visit(ast.parse(path.read_text()), "", False)
    return found


def part_of(module):
    """Which row of the table a module of `sbp` is in."""
    parts = module.split(".")
    if len(parts) == 1 or module == "sbp.operator":
        return "front" if len(parts) == 1 else "language"
    return "language" if parts[1] in LANGUAGE else parts[1] if parts[1] in FLOORS else "front"


IMPORTS = [item for name, path in MODULES.items() for item in _imports(name, path)]


def test_the_walk_sees_the_whole_package():
    assert {part_of(name) for name in MODULES} == set(FLOORS)
    assert all(f"sbp.{name}" in MODULES for name in LANGUAGE)
    assert len(IMPORTS) > 500
    nested = {"sbp.frontend.aten.views": "front", "sbp.planner.replay.step": "planner"}
    beside = {"sbp.comm.torch_distributed": "comm", "sbp.cuda.torch_kernels": "cuda"}
    assert all(name in MODULES and part_of(name) == part for name, part in (nested | beside).items())


@pytest.mark.parametrize("part", FLOORS)
def test_imports_point_down(part):
    wrong = []
    for item in IMPORTS:
        if part_of(item.by) != part or item.target.partition(".")[0] != "sbp":
            continue
        if item.target == "sbp" or part_of(item.target) in MAY_IMPORT[part]:
            continue
        if item.typing_only or item.function in SHORTCUTS.get(item.by, ()):
            continue
        wrong.append(f"{item.by}:{item.line} imports {item.target} ({part_of(item.target)})")
    assert not wrong, f"{part} may import {sorted(MAY_IMPORT[part])}:\n" + "\n".join(wrong)


def test_the_table_points_down():
    """Two parts on one floor may know each other one way at most; nothing knows a higher floor."""
    for part, allowed in MAY_IMPORT.items():
        for other in allowed - {part}:
            assert FLOORS[other] <= FLOORS[part]
            assert part not in MAY_IMPORT[other], f"{part} and {other} know each other"


@pytest.mark.parametrize("part", EXTERNAL)
def test_lower_floors_need_little_from_outside(part):
    standard = sys.stdlib_module_names | {"__future__"}
    wrong = [
        f"{item.by}:{item.line} imports {item.target}"
        for item in IMPORTS
        if part_of(item.by) == part and item.target.partition(".")[0] not in standard | EXTERNAL[part] | {"sbp"}
    ]
    assert not wrong, "\n".join(wrong)


def test_no_imports_in_a_circle_at_import_time():
    """Modules that import each other while they are loaded depend on the order in which they are loaded."""
    edges = {name: set() for name in MODULES}
    for item in IMPORTS:
        if not item.function and not item.typing_only and item.target in MODULES and item.target != "sbp":
            edges[item.by].add(item.target)
    done, path = set(), []

    def visit(name):
        if name in path:
            raise AssertionError(" -> ".join([*path[path.index(name) :], name]))
        if name in done:
            return
        path.append(name)
        for other in sorted(edges[name]):
            visit(other)
        path.pop()
        done.add(name)

    for name in sorted(edges):
        visit(name)


def test_the_folders_beside_sbp_are_no_packages_of_their_own():
    """`comm` and `cuda` are other people's names: with an `__init__.py` they would shadow theirs in a checkout."""
    for folder in ("ops", "planner", "comm", "cuda"):
        assert not (ROOT / folder / "__init__.py").exists()
