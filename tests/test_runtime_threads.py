"""Threads of matrix products: fewer inside, as before outside, also after an error."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from hand_plans import mlp, replicated_plan

from sbp.mesh import Mesh
from sbp.runtime import threads

needs_openblas = pytest.mark.skipif(threads._openblas() is None, reason="this NumPy does not come with OpenBLAS")


@needs_openblas
def test_count_is_restored():
    get, set_ = threads._openblas()
    before = get()
    set_(2)
    try:
        with pytest.raises(ValueError, match="inside"), threads.matrix_threads(1):
            assert get() == 1
            raise ValueError("inside")
        assert get() == 2
    finally:
        set_(before)


@needs_openblas
@pytest.mark.parametrize("width, expected", [(4, 1), (1100, 2)])
def test_small_plans_take_one_thread(width, expected):
    get, set_ = threads._openblas()
    before = get()
    set_(2)
    try:
        with threads.fitting(replicated_plan(mlp(2, (width, 1000, 2)), Mesh((2,)))):
            assert get() == expected
        assert get() == 2
    finally:
        set_(before)


def test_without_openblas_nothing_changes(monkeypatch):
    monkeypatch.setattr(threads, "_openblas", lambda: None)
    entered = []
    with threads.matrix_threads(1):
        entered.append(True)
    assert entered == [True]
