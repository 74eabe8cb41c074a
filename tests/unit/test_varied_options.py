"""What a sweep varies: the values in a list, and the arguments that they become."""

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
    ],
)
def test_each_value_reaches_the_script_whole(text: str, theirs: list[str], expected: list[list[str]]) -> None:
    combinations = varied_options.combinations([varied_options.varied(text)])
    assert [[*varied_options.filled(theirs, settings, known={})] for settings in combinations] == expected
