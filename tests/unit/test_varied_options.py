"""What a sweep varies: the values in a list, and the arguments that they become."""

import argparse
from pathlib import Path

import pytest

from manygpus.jobs.sweeps import varied_options


@pytest.mark.parametrize(
    ("text", "theirs", "expected"),
    [
        # Brackets and quotes protect commas, as in Hydra.
        ("x=[0.9,0.95],(1,2)", ["o.betas={x}"], [["o.betas=[0.9,0.95]"], ["o.betas=(1,2)"]]),
        ("x={'a': [1, ']']},{}", ["{x}"], [["{'a': [1, ']']}"], ["{}"]]),
        ('x="64,128",32', [], [["--x", "64,128"], ["--x", "32"]]),
        ("x=don't,can't", [], [["--x", "don't"], ["--x", "can't"]]),
        ("x=:),1", [], [["--x", ":)"], ["--x", "1"]]),
        # A flag, and an empty value within a word.
        ("x=--use-ema,", ["a", "{x}", "b"], [["a", "--use-ema", "b"], ["a", "b"]]),
        ("x=4,", ["--n={x}"], [["--n=4"], ["--n="]]),
        # argparse takes a word -1e-3 for an option.
        ("x=-1e-3,1", [], [["--x=-1e-3"], ["--x", "1"]]),
        ("use-x", ["a"], [["a", "--use-x"], ["a"]]),
        ("use-x", ["m.x={use-x}"], [["m.x=true"], ["m.x=false"]]),
        # Together, and each in its place.
        ("x,y=[1,'a,b'],(2,[3,4])", ["{y}"], [["a,b", "--x", "1"], ["[3,4]", "--x", "2"]]),
    ],
)
def test_each_value_reaches_the_script_whole(text: str, theirs: list[str], expected: list[list[str]]) -> None:
    combinations = varied_options.combinations([varied_options.varied(text)])
    assert [[*varied_options.filled(theirs, settings, known={})] for settings in combinations] == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # As it is written: YAML itself would make 0.1, 8, False and 45045 of these.
        (
            "x: [0.10, 010, off, 12:30:45, 1e-3]",
            [["--x", value] for value in ("0.10", "010", "off", "12:30:45", "1e-3")],
        ),
        ("x: 1\nuse-y:", [["--x", "1", "--use-y"], ["--x", "1"]]),
        (
            "- {x: [1, 2], y: a}\n- {x: 3, z: '[4, 5]'}",
            [["--x", "1", "--y", "a"], ["--x", "2", "--y", "a"], ["--x", "3", "--z", "[4, 5]"]],
        ),
    ],
)
def test_a_yaml_file_has_grids(text: str, expected: list[list[str]], tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text(text)
    combinations = varied_options.combinations([varied_options.varied(str(file))])
    assert [[*varied_options.filled([], settings, known={})] for settings in combinations] == expected


@pytest.mark.parametrize(
    "text", ["", "x", "x: [1, 2", "x: [[1, 2]]", "x: {values: [1]}", "x: []", "gpus: [1]"]
)
def test_what_is_no_grid_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "grid.yaml"
    file.write_text(text)
    with pytest.raises(argparse.ArgumentTypeError):
        varied_options.varied(str(file))
