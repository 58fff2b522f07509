"""The SVG picture of a plan: what is drawn is what the physical plan does."""

import xml.etree.ElementTree as tree
from collections import Counter

import pytest

from sbp import Cluster, auto_parallel, build, optim
from sbp.cli.main import run as command
from sbp.planner.physical import Box, Compute
from sbp.report.colours import COLLECTIVES
from sbp.report.picture import PictureError, picture, save_picture

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def plan():
    model = build("gpt2", layers=2, heads=4, hidden=32, vocabulary=256, positions=32)
    cluster = Cluster.preset("cpu", nodes=1, devices_per_node=4)
    pins = {"h.*.mlp.act.gelu": "S(0), S(2)", "*.exp_avg*": "S(0), B"}
    return auto_parallel(
        model,
        cluster,
        batch=8,
        sequence=32,
        optimizer=optim.AdamW(lr=1e-3),
        precision="f32",
        mesh="dp=2,tp=2",
        pins=pins,
    )


def cards(text):
    """Operator's title -> its lines of text."""
    return {group.find(f"{SVG}title").text: [item.text or "" for item in group.iter(f"{SVG}text")]
            for group in tree.fromstring(text).iter(f"{SVG}g")}  # fmt: skip


@pytest.mark.parametrize("phases", [("forward",), ("backward",), ("forward", "backward")])
def test_a_box_per_operator_with_its_layout(plan, phases):
    physical, found = plan.physical, cards(picture(plan, phases))
    computed = [one for one in physical.operations if isinstance(one, Compute) and one.phase in phases]
    assert list(found) == [f"{one.node}: {one.op}" for one in computed]
    for one in computed:
        letters = [str(sbp).replace("(", "").replace(")", "") for sbp in physical.registers[one.outputs[0]].layout]
        assert found[f"{one.node}: {one.op}"][2 : 2 + len(letters)] == letters, one.node


def test_what_is_moved_is_on_the_lines(plan):
    """Every change of layout before an operator of the phase is drawn once per reader, in its collective's colour."""
    physical, text = plan.physical, picture(plan)
    made = {number: one for one in physical.operations for number in one.outputs}
    expected: Counter[str] = Counter()
    for one in physical.operations:
        if isinstance(one, Compute) and one.phase == "forward":
            for number in one.inputs:
                while isinstance(step := made.get(number), Box):
                    expected[f"{step.kind} {physical.mesh.names[step.mesh_axis]}"] += 1
                    (number,) = step.inputs
    root = tree.fromstring(text)
    said = " ".join(item.text or "" for item in list(root.iter(f"{SVG}text"))[6:])
    assert expected and {one: said.count(one) for one in expected} == expected
    thick = [path.get("stroke") for path in root.iter(f"{SVG}path") if path.get("stroke-width") == "3"]
    assert COLLECTIVES["all_reduce"] in thick


def test_boxes_do_not_overlap_and_lie_inside(plan):
    root = tree.fromstring(picture(plan, ("forward", "backward")))
    wide, high = int(root.get("width")), int(root.get("height"))
    boxes = [[int(group.find(f"{SVG}rect").get(key)) for key in ("x", "y", "width", "height")]
             for group in root.iter(f"{SVG}g")]  # fmt: skip
    for number, (x, y, width, height) in enumerate(boxes):
        assert x >= 0 and y >= 0 and x + width <= wide and y + height <= high
        assert not any(
            x < other[0] + other[2] and other[0] < x + width and y < other[1] + other[3] and other[1] < y + height
            for other in boxes[:number]
        )


def test_equal_plans_give_equal_bytes(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    save_picture(plan, tmp_path / "one.svg")
    assert command(["report", str(tmp_path / "plan.json"), "--svg", str(tmp_path / "two.svg")]) == 0
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


def test_what_cannot_be_drawn_is_said(plan, tmp_path, capsys):
    with pytest.raises(PictureError, match="no operators of phase 'sideways'; its phases are forward, backward"):
        picture(plan, ("sideways",))
    with pytest.raises(PictureError, match="cannot write the picture to .*No such file"):
        save_picture(plan, tmp_path / "none" / "x.svg")
    plan.save(tmp_path / "plan.json")
    assert command(["report", str(tmp_path / "plan.json"), "--svg", str(tmp_path / "none" / "x.svg")]) == 2
    assert "cannot write the picture" in capsys.readouterr().err
