"""The export benchmark in short: Hugging Face classes, imported, planned, trained in PyTorch under the plan."""

import importlib.util
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed (pip install 'sbp[torch]')")
pytest.importorskip("transformers", reason="transformers is not installed (pip install transformers)")

FILE = Path(__file__).resolve().parent.parent / "benchmarks" / "torch_export.py"


@pytest.fixture(scope="module")
def benchmark():
    specification = importlib.util.spec_from_file_location("torch_export_benchmark", FILE)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_losses_and_collectives(benchmark, capsys):
    only = ("Llama, found, mesh(dp=2, tp=2)", "GPT-2, ZeRO-3 x tensor", "GPT-2, ZeRO-1")
    results = benchmark.run(4, 4, only)
    assert [any(result["name"].startswith(name) for result in results) for name in only] == [True] * 3
    for result in results:
        assert len(result["losses"]) == 4 and benchmark.difference(result) < 2e-6
        assert sum(number for number, _ in result["seen"].values()) > 20
        for kind, (number, size) in result["seen"].items():
            said = result["said"].get(kind, {"called": 0, "called_bytes": 0})
            assert (number, size) == (said["called"], said["called_bytes"]), (result["name"], kind)
    benchmark.show(results)
    assert capsys.readouterr().out.count(": ok") == 3
