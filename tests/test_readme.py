"""The README's commands and programs run as they stand there, or in a smaller size that a comment beside them gives."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from torch_launch import torchrun

from sbp.cli.main import COMMANDS, run

README = Path(__file__).resolve().parent.parent / "README.md"


@dataclass(frozen=True)
class Block:
    """A fenced block with the comments above it."""

    line: int
    language: str
    text: str
    instead: tuple[str, ...]
    not_run: str
    file: str
    processes: int

    @property
    def commands(self):
        """Command lines as lists of words, without the comments behind them."""
        joined = self.text.replace("\\\n", " ")
        return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]


def blocks():
    found, comments, lines = [], [], README.read_text(encoding="utf-8").splitlines()
    inside = None
    for number, line in enumerate(lines, 1):
        if inside is not None:
            if line == "```":
                instead = tuple(c.partition(": ")[2] for c in comments if c.startswith("run instead: "))
                not_run = next((c.partition(": ")[2] for c in comments if c.startswith("not run: ")), "")
                file = next((c.partition(": ")[2] for c in comments if c.startswith("file: ")), "")
                processes = next((int(c.partition(": ")[2]) for c in comments if c.startswith("processes: ")), 1)
                found.append(Block(inside[0], inside[1], "\n".join(inside[2]), instead, not_run, file, processes))
                inside, comments = None, []
            else:
                inside[2].append(line)
        elif line.startswith("```"):
            inside = (number, line[3:], [])
        elif match := re.fullmatch(r"<!-- (.*) -->", line):
            comments.append(match[1])
        elif line.strip():
            assert not comments, f"line {number}: a comment for a block must stand right above it"
    return found


BLOCKS = blocks()
SHELL = [block for block in BLOCKS if block.language == "sh"]
PYTHON = [block for block in BLOCKS if block.language == "python"]


def test_all_blocks_are_found():
    assert len(SHELL) >= 8 and len(PYTHON) >= 4
    assert {block.language for block in BLOCKS} == {"sh", "python", "json", ""}
    assert [block.file for block in BLOCKS if block.language == "json"] == ["pipeline.json", "problem.json"]


def test_every_shell_command_is_sbp_or_says_why_it_is_not_run():
    for block in SHELL:
        for words in block.commands:
            assert block.not_run or (words[0] == "sbp" and words[1] in COMMANDS), f"line {block.line}: {words}"


def test_replacements_use_the_same_commands_and_options():
    for block in SHELL:
        if not block.instead:
            continue
        smaller = [shlex.split(text) for text in block.instead]
        assert [words[:2] for words in smaller] == [words[:2] for words in block.commands], f"line {block.line}"
        for words, small in zip(block.commands, smaller):
            options = {word for word in words if word.startswith("--")}
            assert options <= set(small) | {"--nodes"}, f"line {block.line}: {small} leaves out options"


def test_every_command_is_mentioned():
    text = README.read_text(encoding="utf-8")
    assert [name for name in COMMANDS if f"sbp {name}" not in text] == []


def test_commands_in_order(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    done = 0
    for block in BLOCKS:
        if block.file:
            (tmp_path / block.file).write_text(block.text, encoding="utf-8")
    for block in SHELL:
        if block.not_run:
            continue
        commands = [shlex.split(text) for text in block.instead] or block.commands
        for words in commands:
            if "--html" in words and not _installed("plotly"):
                continue
            if ("--torch" in words or "torch-plan.json" in words) and not _installed("torch"):
                continue
            code = run(words[1:])
            output = capsys.readouterr()
            assert code == 0, f"line {block.line}: {shlex.join(words)}\n{output.err}"
            assert output.out, f"line {block.line}: {shlex.join(words)} printed nothing"
            done += 1
    assert done >= 18
    assert json.loads((tmp_path / "solution.json").read_text()) == [0, 1]


def _installed(name):
    return importlib.util.find_spec(name) is not None


# What the text around a program says of it, or would be a poor example without.
BESIDES = {
    "plan.boxing[0]": "from sbp.report.summary import is_split\n"
    "assert is_split(plan.physical) and len(plan.boxing) >= 3\n"
    "assert any(step.kind in ('all_gather', 'reduce_scatter', 'all_reduce') for step in plan.boxing)\n",
    "print(log)": "assert str(y) == 'f32[16,64] (S(1)) on mesh(tp=4)'\n"
    "assert str(log).startswith('matmul, input x: f32[16,128] (S(0)) -> (B)')\n",
}


def test_the_first_program_is_one_that_splits():
    assert "plan.boxing[0]" in PYTHON[0].text and "plan.verify()" in PYTHON[0].text
    assert all(any(words in block.text for block in PYTHON) for words in BESIDES)


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: f"line{block.line}")
def test_programs(block, tmp_path):
    if "import torch" in block.text:
        pytest.importorskip("torch", reason="PyTorch is not installed (pip install 'sbp[torch]')")
    if block.processes > 1:
        pytest.skip("runs in several processes, in the test below")
    besides = "".join(more for words, more in BESIDES.items() if words in block.text)
    (tmp_path / "program.py").write_text(f"{block.text}\n{besides}", encoding="utf-8")
    result = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("block", [b for b in PYTHON if b.processes > 1], ids=lambda block: block.file)
def test_programs_of_several_processes(block, tmp_path, monkeypatch):
    pytest.importorskip("torch", reason="PyTorch is not installed (pip install 'sbp[torch]')")
    monkeypatch.chdir(tmp_path)
    for other in BLOCKS:
        if other.file:
            (tmp_path / other.file).write_text(other.text, encoding="utf-8")
    for words in (words for other in SHELL if not other.not_run for words in other.commands if "--torch" in words):
        assert run(words[1:]) == 0
    lines = torchrun(block.processes, tmp_path / block.file).splitlines()
    losses = [float(line.split()[1]) for line in lines if re.fullmatch(r"\d+ [\d.]+", line)]
    assert len(losses) == 10 and all(5 < loss < 7 for loss in losses)
    assert "mesh(x=2, y=2) in PyTorch" in lines[0]
    assert sum(int(number) for number in re.findall(r"(\d+) called", "\n".join(lines))) > 20
