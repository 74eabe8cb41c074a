"""Bring the notebook of stage 02 up to date: run it, and keep what every run without a GPU shows alike.

A cell with the tag `fresh` measures. Its outputs are the reader's own, and none are committed.
"""

import base64
import io
import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image

NOTEBOOK = Path(__file__).resolve().parents[1] / "02_multigpu_dp" / "multi_gpu.ipynb"
METADATA = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}


def executed(notebook: NotebookNode) -> NotebookNode:
    """Run all cells, in order, in the notebook's folder."""
    folder = {"metadata": {"path": NOTEBOOK.parent}}
    options = {"timeout": 300, "record_timing": False, "coalesce_streams": True}
    return NotebookClient(notebook, kernel_name="python3", resources=folder, **options).execute()


def is_fresh(cell: NotebookNode) -> bool:
    return "fresh" in cell.metadata.get("tags", [])


def cleaned(notebook: NotebookNode) -> NotebookNode:
    """Without what differs from run to run, and between machines."""
    notebook.metadata = NotebookNode(METADATA)
    for cell in notebook.cells:
        cell.metadata = NotebookNode({"tags": ["fresh"]} if is_fresh(cell) else {})
        if cell.cell_type == "code" and is_fresh(cell):
            cell.outputs = []
        for output in cell.get("outputs", []):
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = _without_text(output.data["image/png"])
    return notebook


def _without_text(png: str) -> str:
    """The same picture, without the version of what has drawn it."""
    file = io.BytesIO()
    Image.open(io.BytesIO(base64.b64decode(png))).save(file, "png")
    return base64.b64encode(file.getvalue()).decode()


if __name__ == "__main__":
    os.environ["CUDA_VISIBLE_DEVICES"] = "-1"
    nbformat.write(cleaned(executed(nbformat.read(NOTEBOOK, as_version=4))), NOTEBOOK)
