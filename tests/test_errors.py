"""The errors' documentation: every class shows an input that raises it, and the same one set right. Both are run."""

import ast
import doctest
import inspect
from pathlib import Path

import pytest

from sbp import errors

ROOT = Path(__file__).parent.parent

CLASSES = [
    item for item in vars(errors).values() if inspect.isclass(item) and issubclass(item, errors.SbpError)
    and item is not errors.SbpError
]  # fmt: skip


NO_FAILING_EXAMPLE = {
    "TimeLimitError": "what is too short depends on the machine",
    "FrontendError": "needs PyTorch",
}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_r154_every_error_has_a_failing_and_a_right_example(kind):
    """R154: a page per error that users meet, with an example that is run."""
    (test,) = doctest.DocTestFinder(recurse=False, exclude_empty=False).find(kind, kind.__name__, globs={})
    failing = [example for example in test.examples if example.exc_msg]
    if kind.__name__ not in NO_FAILING_EXAMPLE:
        assert failing and failing[0].exc_msg.startswith(f"sbp.errors.{kind.__name__}: ")
        assert test.examples[-1].exc_msg is None and test.examples[-1].lineno > failing[-1].lineno
    said = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(test, out=said.append)
    assert result.failed == 0, "".join(said)


def test_r154_errors_of_other_modules_say_when_they_are_raised():
    """Every error class of the package has a sentence of its own, wherever it is defined."""
    undocumented, names = [], set()
    for folder in ("sbp", "planner", "ops", "comm", "cuda"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                bases = [ast.unparse(base) for base in node.bases] if isinstance(node, ast.ClassDef) else []
                if any(base.endswith("Error") for base in bases):
                    names.add(node.name)
                    if len((ast.get_docstring(node) or "").split()) < 4:
                        undocumented.append(f"{path}: {node.name}")
    assert {kind.__name__ for kind in CLASSES} | {"CheckpointError", "CommunicationError"} <= names
    assert not undocumented
