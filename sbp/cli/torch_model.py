"""`--torch FILE.py:FUNCTION`: a PyTorch model that a function of the user's builds."""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from sbp.errors import FrontendError, SbpError
from sbp.frontend.model import TorchModel, is_torch_module

_RETURNS = (
    "(module, example_inputs), (module, example_inputs, loss), (module, example_inputs, loss, targets), or a mapping "
    "with these keys and further ones of sbp.frontend.torch.import_module: on_unknown, dynamic_batch, name"
)
_FURTHER = ("on_unknown", "dynamic_batch", "name")


def torch_model(place: str) -> TorchModel:
    """What the function at `FILE.py:FUNCTION` builds.

    Raises
    ------
    FrontendError
        There is no such file or function, it fails, or it returns something else.
    """
    file, colon, name = place.rpartition(":")
    if not colon or not name.isidentifier() or not file:
        raise FrontendError(f"--torch {place!r} is not FILE.py:FUNCTION; write for example mymodel.py:build_model.")
    path = Path(file)
    if not path.is_file():
        raise FrontendError(f"--torch: there is no file {path}.")
    with redirect_stdout(sys.stderr):  # what the file prints is no part of what the command gives
        return _built(path, name)


def _built(path: Path, name: str) -> TorchModel:
    function = getattr(_loaded(path), name, None)
    if not callable(function):
        raise FrontendError(f"--torch: {path} has no function {name}; it returns {_RETURNS}.")
    try:
        made = function()
    except SbpError:
        raise
    except (Exception, SystemExit) as error:
        raise FrontendError(f"--torch: {name} failed{_where(error, path)}: {type(error).__name__}: {error}") from error
    return _model(made, f"{path}:{name}")


def _loaded(path: Path) -> Any:
    """The file as a module, its folder on the path, as `python FILE.py` would have it."""
    specification = importlib.util.spec_from_file_location(f"sbp_user_{path.stem}", path)
    if specification is None or specification.loader is None:
        raise FrontendError(f"--torch: {path} is no Python file; its name ends in .py.")
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    sys.path.insert(0, str(path.resolve().parent))
    try:
        specification.loader.exec_module(module)
    except SyntaxError as error:
        raise FrontendError(f"--torch: {error.filename}:{error.lineno}: {error.msg}.") from None
    except ImportError as error:
        raise FrontendError(f"--torch: {path} cannot be loaded{_where(error, path)}: {error}.") from error
    except (Exception, SystemExit) as error:
        raise FrontendError(f"--torch: {path} failed{_where(error, path)}: {type(error).__name__}: {error}") from error
    finally:
        sys.path.pop(0)
    return module


def _where(error: BaseException, path: Path) -> str:
    """The last line of the user's file on the way to an error."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if Path(frame.filename).resolve() == path.resolve()]
    return f" at {path}:{lines[-1]}" if lines else ""


def _model(made: Any, place: str) -> TorchModel:
    if isinstance(made, TorchModel):
        return made
    if isinstance(made, Mapping):
        given = dict(made)
        module, inputs = given.pop("module", None), given.pop("example_inputs", None)
        loss, targets = given.pop("loss", None), given.pop("targets", ())
        unknown = [str(key) for key in given if key not in _FURTHER]
        if unknown:
            raise FrontendError(
                f"--torch: {place} returned a mapping with {', '.join(unknown)}, which is not among the keys "
                f"(training, optimizer, precision and batch are options of the command); it returns {_RETURNS}."
            )
    elif isinstance(made, tuple) and 2 <= len(made) <= 4:
        module, inputs, loss, targets = (*made, *(None, ())[len(made) - 2 :])[:4]
        given = {}
    else:
        raise FrontendError(f"--torch: {place} returned a {type(made).__name__}; it returns {_RETURNS}.")
    if not is_torch_module(module):
        raise FrontendError(
            f"--torch: {place} returned a {type(module).__name__} for the module; it returns {_RETURNS}."
        )
    if inputs is None:
        raise FrontendError(f"--torch: {place} returned no example inputs; it returns {_RETURNS}.")
    return TorchModel(module, inputs, loss, targets, given)
