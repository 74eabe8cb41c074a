"""The table of the record's columns, and what follows from it."""

import math
import os
import pickle
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from conftest import REPOSITORY, ran, succeeded

from manygpus.config import options
from manygpus.config.options import option, parse_options
from manygpus.errors import UserError
from manygpus.record import records
from manygpus.record.columns import COLUMNS
from manygpus.record.records import RecordWriter

MADE_UP = """
import sys
from dataclasses import dataclass
from pathlib import Path

from manygpus.record import columns

columns.COLUMNS["momentum"] = columns.Column(
    columns.number(least=0),
    columns.Role.TRAINING,
    words="momentum",
    label="momentum {}",
    default=0.0,
)

from test_comparison import write_run
from manygpus.reports import comparison
from manygpus.config.options import Options, option, parse_options

folder = Path(sys.argv[1])
@dataclass(frozen=True)
class OptionsWithMomentum(Options):
    momentum: float = option(
        0.0, type=float, metavar="X", help="of the optimizer", shapes_training=True, column="momentum"
    )


for value in ("0", "0.9"):
    opts = parse_options("", OptionsWithMomentum, arguments=["--momentum", value])
    write_run(folder, f"momentum-{value}", [10, 1000, 1000], **opts.columns())
rows, _ = comparison.load([folder])
print(sorted(comparison.summarize(rows).variant))
"""


@dataclass(frozen=True)
class OptionsOfScript(options.Options):
    hidden: int = option(128, type=int, metavar="N", help="neurons", shapes_training=True)
    tied: bool = option(False, help="one matrix for both", shapes_training=True)
    print_every: int = option(10, type=int, metavar="N", help="steps between two lines")
    compiled: bool = option(False, help="compile the network")
    not_used = {"width"}


@pytest.mark.parametrize("column", ["momentum", "torch_version", "train_loss"])
def test_an_option_can_be_recorded_in_a_setting_only(column: str) -> None:
    """Not where the record would drop it, nor where runs may differ that are pooled as repeats."""
    with pytest.raises(ValueError, match=rf"column '{column}' is not a setting of a run: .*/columns\.py"):
        option(
            0.0,
            type=float,
            metavar="X",
            help="made up",
            column=column,
        )


def test_every_option_that_shapes_the_training_is_a_setting_of_the_record() -> None:
    """And the table has its default as in the declaration."""
    for declared in fields(options.Options):
        column = COLUMNS.get(declared.metadata["column"])
        # Run records the learning rate after its scaling rule, and the images that an epoch really had.
        recorded_by_run = declared.name in ("lr", "train_size")
        assert not declared.metadata["shapes_training"] or column or recorded_by_run, declared.name
        if column:
            is_unknown = column.default is None or column.default != column.default
            assert is_unknown or column.default == declared.default


@pytest.mark.parametrize("name", [name for name, column in COLUMNS.items() if column.default is not None])
def test_a_default_can_be_read_back(name: str, tmp_path: Path) -> None:
    """As a training that does not know its own value writes it."""
    (columns, *_) = records.read(REPOSITORY / "results" / "sample" / "cpu-2-cores" / "runs.csv")
    writer = RecordWriter(tmp_path, {column: columns[column] for column in columns if column != name})
    writer.add({"epoch": 1})
    (row,) = records.read(writer.path)
    default = COLUMNS[name].default
    assert row[name] == default or (math.isnan(row[name]) and math.isnan(default))


def test_what_shapes_a_training_without_a_column_is_in_its_settings() -> None:
    """Options of the script's own; those that shape none, and have another value, are its arguments."""
    arguments = ["--recipe", "sgd", "--tied", "--compiled", "--print-every", "5"]
    opts = parse_options("", OptionsOfScript, arguments=arguments)
    assert opts.settings() == "hidden=128 tied"
    assert opts.other_arguments() == "--print-every=5 --compiled"


def test_options_reach_the_processes_that_a_script_spawns() -> None:
    """As an argument of torch.multiprocessing.spawn, which pickles it."""
    opts = parse_options("", OptionsOfScript, arguments=["--tied", "--batch-size", "8"])
    copy = pickle.loads(pickle.dumps(opts))
    assert copy == opts and copy.tied and copy.settings() == opts.settings()


def test_an_option_that_the_script_does_not_use_is_none_of_its_command_line() -> None:
    opts = parse_options("", OptionsOfScript, arguments=[])
    assert opts.width == options.Options.width
    with pytest.raises(UserError, match="--width"):
        parse_options("", OptionsOfScript, arguments=["--width", "4"])


def test_an_option_of_a_declaration_and_a_line_of_the_table(tmp_path: Path) -> None:
    """It is recorded and no repeat, and stands in the label."""
    folders = (REPOSITORY, REPOSITORY / "tests", REPOSITORY / "tests" / "unit")
    env = {"PYTHONPATH": os.pathsep.join(map(str, folders))}
    done = succeeded(ran(sys.executable, "-c", MADE_UP, tmp_path, env=env))
    assert done.stdout == "['', 'momentum 0.9']\n"
