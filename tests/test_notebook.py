"""The quick-start notebook runs from the first cell to the last, and shows what it says it shows."""

from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).resolve().parent.parent / "notebooks" / "quickstart.ipynb"

nbformat = pytest.importorskip("nbformat", reason="needs the extra notebook")
nbclient = pytest.importorskip("nbclient", reason="needs the extra notebook")
pytest.importorskip("ipykernel", reason="needs the extra notebook")
pytest.importorskip("plotly", reason="needs the extra viz")


@pytest.fixture(scope="module")
def notebook(tmp_path_factory):
    loaded = nbformat.read(NOTEBOOK, as_version=4)
    folder = str(tmp_path_factory.mktemp("notebook"))
    nbclient.NotebookClient(
        loaded, timeout=300, kernel_name="python3", resources={"metadata": {"path": folder}}
    ).execute()
    return loaded


def outputs(notebook, kind):
    return [
        output["data"][kind]
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if kind in output.get("data", {})
    ]


def text_of(notebook):
    return "".join(
        output.get("text", "") for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    )


def test_it_is_stored_without_outputs():
    stored = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(stored)
    assert all(not cell.outputs and cell.execution_count is None for cell in stored.cells if cell.cell_type == "code")


def test_plans_and_graphs_show_as_html(notebook):
    pages = outputs(notebook, "text/html")
    assert any("Memory per device" in page for page in pages)
    assert any("parameters of" in page for page in pages)


def test_figures_are_drawn(notebook):
    assert len(outputs(notebook, "application/vnd.plotly.v1+json")) >= 4


def test_the_plan_is_proven_and_trained(notebook):
    text = text_of(notebook)
    assert "values equal the unsharded run" in text
    assert "step 10" in text
