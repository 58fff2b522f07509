"""`sbp plan --torch` and `sbp compare --torch`: models that a function in a file builds, and what goes wrong there."""

import json
import sys

import pytest

pytest.importorskip("torch", reason="imports PyTorch modules")

from sbp.cli.main import run

FILE = '''
import torch
from torch import nn


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))


def build():
    with torch.device("meta"):
        return MLP(), torch.empty(32, 64), nn.functional.mse_loss, torch.empty(32, 64)


def mapping():
    return {"module": MLP(), "example_inputs": {"x": torch.zeros(32, 64)}, "loss": lambda out: out.sum(),
            "on_unknown": "replicate"}


def alone():
    return MLP()


def number():
    return 3, torch.zeros(3)


def empty():
    return MLP(), None


def failing():
    return 1 / 0


def surplus():
    return {"module": MLP(), "example_inputs": torch.zeros(32, 64), "training": False, "colour": 1}


def leaving():
    raise SystemExit(3)


def saying():
    print("building")
    return build()


def unknown():
    return MLP(), torch.zeros(32, 64), lambda out: torch.special.i1(out).sum()
'''
CLUSTER = ["--cluster", "cpu", "--nodes", "1"]


@pytest.fixture
def place(tmp_path):
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "broken.py").write_text("def build(:\n")
    (tmp_path / "lacking.py").write_text("import torch\nimport no_such_package\n")
    return tmp_path


def test_plan_and_compare(place, capsys):
    for name, more in (("build", ["--batch", "64"]), ("mapping", []), ("build", ["--inference"])):
        out = place / "plan.json"
        code = run(["plan", "--torch", f"{place}/mine.py:{name}", *CLUSTER, "--mesh", "4", "--json", "-q",
                    "--out", str(out), *more])  # fmt: skip
        captured = capsys.readouterr()
        assert code == 0, captured.err
        assert json.loads(captured.out)["graph"] == "MLP"
    assert run(["verify", str(out)]) == 0
    assert run(["compare", "--torch", f"{place}/mine.py:build", *CLUSTER]) == 0
    assert "data parallel" in capsys.readouterr().out
    assert not any("sbp_user" in path for path in sys.path)


def test_what_the_file_prints_is_not_in_the_json(place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    assert run(["plan", "--torch", "mine.py:saying", *CLUSTER, "--mesh", "4", "--json", "-q"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["graph"] == "MLP" and "building" in captured.err
    assert run(["plan", "--torch", "mine.py:failing", *CLUSTER]) == 2
    assert "failed at mine.py:" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name, more, says",
    [
        ("mine.py", [], "is not FILE.py:FUNCTION"),
        ("absent.py:build", [], "there is no file"),
        ("mine.py:nothing", [], "has no function nothing"),
        ("mine.py:alone", [], "returned a MLP; it returns (module, example_inputs)"),
        ("mine.py:number", [], "returned a int for the module"),
        ("mine.py:empty", [], "returned no example inputs"),
        ("mine.py:failing", [], "failing failed at"),
        ("mine.py:surplus", [], "a mapping with training, colour, which is not among the keys"),
        ("mine.py:leaving", [], "leaving failed at"),
        ("mine.py:unknown", [], "1 operator has no translation:\n  aten.special_i1.default in loss"),
        ("mine.py:build", ["gpt2"], "--torch stands instead of MODEL"),
        ("mine.py:build", ["--size", "layers=2"], "--size changes a preset's sizes"),
        ("mine.py:build", ["--seq", "8"], "leave sequence out"),
        ("broken.py:build", [], "broken.py:1: invalid syntax"),
        ("lacking.py:build", [], "lacking.py:2: No module named 'no_such_package'"),
    ],
)
def test_errors(place, capsys, name, more, says):
    assert run(["plan", "--torch", f"{place}/{name}", *CLUSTER, *more]) == 2
    error = capsys.readouterr().err
    assert says in error and "Traceback" not in error
