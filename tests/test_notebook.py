"""experiments/colab.ipynb: as it is kept, and run without hands on the tiny random model."""

import json
import os
import pathlib

import pytest

from jrl.config import load

ROOT = pathlib.Path(__file__).parent.parent
NOTEBOOK = ROOT / "experiments" / "colab.ipynb"


def cells(kind="code"):
    return [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == kind]


def parameters():
    (cell,) = [cell for cell in cells() if "parameters" in cell["metadata"].get("tags", ())]
    values: dict = {}
    exec("".join(cell["source"]), values)
    return values


def test_it_is_kept_without_outputs():
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells())


def test_its_code_parses_and_its_settings_are_those_of_the_demo():
    for cell in cells():
        compile("".join(cell["source"]), cell["id"], "exec")
    settings = parameters()
    config = load(str(ROOT / settings["CONFIG"]), {"run_dir": settings["RUN_DIR"]})
    assert settings["CONFIG"] == "configs/demo.py" and settings["STEPS"] == config.steps and settings["OVERRIDES"] == []


@pytest.mark.slow
def test_it_runs_from_top_to_bottom(tmp_path):
    client, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (cell,) = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", ())]
    cell.source += f"""
SOURCE, INSTALL, CONFIG, STEPS, RUN_DIR = {str(ROOT)!r}, False, "configs/tiny.py", 2, {str(tmp_path / "run")!r}
OVERRIDES = ["--config.data.train_size=16", "--config.data.eval_size=4", "--config.eval.every_steps=1"]
"""
    # One device, as where it will be run; tests/conftest.py asks for eight.
    environment = {**os.environ, "XLA_FLAGS": "", "PYTHONPATH": str(ROOT)}
    client.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute(env=environment)
    outputs = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    text = {name: "".join(o.get("text", "") for o in shown) for name, shown in outputs.items()}
    assert "2/2" in text["train"]
    assert any("image/png" in o.get("data", {}) for o in outputs["curves"]), "no curves"
    assert any("accuracy_after" in str(o.get("data", {})) for o in outputs["curves"]), "no summary"
    assert text["samples"].count("reward ") == 12 and "--- step 2" in text["samples"]
    assert any("<iframe" in o.get("data", {}).get("text/html", "") for o in outputs["report"])
    question, reply = text["chat"].split("\n", 1)
    assert question.endswith("> What is 3 + 4?") and len(reply) > 1, "no reply"  # a random model may well say line ends only
