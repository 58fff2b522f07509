"""SBP auto-parallel planning: describe a model once, plan its layouts, prove and run the plan."""

from pathlib import Path as _Path

# In a checkout the folders planner/, ops/, cuda/ and comm/ stand beside this one; they are parts of this package.
_root = _Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "planner").is_dir() and str(_root) not in __path__:
    __path__.append(str(_root))

__version__ = "0.1.0"

# The decorator takes the module's place as an attribute; `from sbp.operator import ...` finds the module as ever.
from sbp.operator import operator as operator  # noqa: E402
from sbp.ops import library as _library  # noqa: E402, F401  registers all operators
