"""SBP auto-parallel planning: describe a model once, plan its layouts, prove and run the plan."""

from pathlib import Path as _Path
from typing import TYPE_CHECKING as _TYPE_CHECKING

# In a checkout the folders planner/, ops/, cuda/ and comm/ stand beside this one; they are parts of this package.
_root = _Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "planner").is_dir() and str(_root) not in __path__:
    __path__.append(str(_root))

__version__ = "0.1.0"

# The decorator takes the module's place as an attribute; `from sbp.operator import ...` finds the module as ever.
from sbp.operator import operator as operator  # noqa: E402
from sbp.ops import library as _library  # noqa: E402, F401  registers all operators

if _TYPE_CHECKING:
    from sbp import models as models
    from sbp import nn as nn
    from sbp import optim as optim
    from sbp.errors import SbpError as SbpError
    from sbp.graph import Graph as Graph
    from sbp.layout import Broadcast as Broadcast
    from sbp.layout import Layout as Layout
    from sbp.layout import Partial as Partial
    from sbp.layout import Split as Split
    from sbp.layout_text import show_layout as show_layout
    from sbp.mesh import Mesh as Mesh
    from sbp.models import build as build
    from sbp.planner.auto_parallel import auto_parallel as auto_parallel
    from sbp.planner.baselines import compare as compare
    from sbp.planner.cluster import Cluster as Cluster
    from sbp.planner.plan import Plan as Plan
    from sbp.runtime.creation import arange as arange
    from sbp.runtime.creation import full as full
    from sbp.runtime.creation import ones as ones
    from sbp.runtime.creation import rand as rand
    from sbp.runtime.creation import randint as randint
    from sbp.runtime.creation import randn as randn
    from sbp.runtime.creation import zeros as zeros
    from sbp.runtime.eager import explain_boxing as explain_boxing
    from sbp.runtime.eager import ranks as ranks
    from sbp.runtime.global_tensor import GlobalTensor as GlobalTensor
    from sbp.runtime.global_tensor import from_local as from_local
    from sbp.runtime.global_tensor import from_numpy as from_numpy
    from sbp.runtime.tensor_files import load as load
    from sbp.runtime.tensor_files import save as save

# The public face; a module is imported when its name is first asked for, so that `import sbp` stays quick.
_PUBLIC = {
    "SbpError": "sbp.errors",
    "Graph": "sbp.graph",
    "Broadcast": "sbp.layout",
    "Layout": "sbp.layout",
    "Partial": "sbp.layout",
    "Split": "sbp.layout",
    "show_layout": "sbp.layout_text",
    "Mesh": "sbp.mesh",
    "build": "sbp.models",
    "auto_parallel": "sbp.planner.auto_parallel",
    "compare": "sbp.planner.baselines",
    "Cluster": "sbp.planner.cluster",
    "Plan": "sbp.planner.plan",
    "arange": "sbp.runtime.creation",
    "full": "sbp.runtime.creation",
    "ones": "sbp.runtime.creation",
    "rand": "sbp.runtime.creation",
    "randint": "sbp.runtime.creation",
    "randn": "sbp.runtime.creation",
    "zeros": "sbp.runtime.creation",
    "explain_boxing": "sbp.runtime.eager",
    "ranks": "sbp.runtime.eager",
    "GlobalTensor": "sbp.runtime.global_tensor",
    "from_local": "sbp.runtime.global_tensor",
    "from_numpy": "sbp.runtime.global_tensor",
    "load": "sbp.runtime.tensor_files",
    "save": "sbp.runtime.tensor_files",
}
_MODULES = ("models", "nn", "optim")

__all__ = [
    "Broadcast",
    "Cluster",
    "GlobalTensor",
    "Graph",
    "Layout",
    "Mesh",
    "Partial",
    "Plan",
    "SbpError",
    "Split",
    "arange",
    "auto_parallel",
    "build",
    "compare",
    "explain_boxing",
    "from_local",
    "from_numpy",
    "full",
    "load",
    "models",
    "nn",
    "ones",
    "operator",
    "optim",
    "rand",
    "randint",
    "randn",
    "ranks",
    "save",
    "show_layout",
    "zeros",
]


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name in _MODULES:
        return import_module(f"sbp.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'sbp' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
