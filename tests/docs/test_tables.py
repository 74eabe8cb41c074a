"""The exercise on five tables shows what the committed runs say."""

import runpy

from conftest import REPOSITORY


def test_the_five_tables_are_those_of_the_runs() -> None:
    folder = REPOSITORY / "03_multigpu_ddp" / "exercises" / "09_tables"
    made = runpy.run_path(str(folder / "check.py"))["made"]()
    assert (folder / "starter" / "epochs.csv").read_text() == made.pop("epochs.csv")
    shown = (folder / "starter" / "tables.md").read_text().split("\n## ")[1:]
    assert [table[0] for table in shown] == sorted(made)
    for table in shown:
        assert table.strip().endswith(made[table[0]].strip()), table[0]
