"""The notebook of stage 02: it runs without a GPU, and shows what is committed."""

import copy
import re

import lessons
import nbformat
import pytest
from conftest import REPOSITORY
from nbformat import NotebookNode


@pytest.fixture(scope="module")
def committed() -> NotebookNode:
    return nbformat.read(lessons.NOTEBOOK, as_version=4)


def shown(cell: NotebookNode) -> list[str]:
    """The texts that a cell shows, and that there is a picture: every matplotlib draws it otherwise."""
    texts = []
    for output in cell.outputs:
        texts += [output.text] if "text" in output else sorted(output.data)
    return texts


@pytest.mark.full
def test_every_cell_runs_and_shows_what_is_committed(
    committed: NotebookNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    now = lessons.executed(copy.deepcopy(committed))
    for before, after in zip(committed.cells, now.cells, strict=True):
        if before.cell_type == "code":
            assert shown(after) or before.source.startswith("def "), before.source
            if not lessons.is_fresh(before):
                assert shown(after) == shown(before), "run `make lessons`"


def test_nothing_in_it_is_of_one_run_or_one_machine(committed: NotebookNode) -> None:
    text = lessons.NOTEBOOK.read_text()
    clean = nbformat.writes(lessons.cleaned(copy.deepcopy(committed)))
    assert text.rstrip() == clean.rstrip(), "run `make lessons`"
    nbformat.validate(committed)
    cells = [cell for cell in committed.cells if cell.cell_type == "code"]
    outputs = "\n".join(text for cell in cells for text in shown(cell))
    assert str(REPOSITORY) not in text
    assert not re.search(r"/home/|/tmp/|/root/|\d{4}-\d\d-\d\d|\d\d:\d\d:\d\d|site-packages", outputs)
