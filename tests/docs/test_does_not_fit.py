"""The page on models that do not fit, and how DDP packs its gradients: what they say is measured here."""

import json
import re
import subprocess
import sys

import pytest
from conftest import ENVIRONMENT, REPOSITORY
from forking import Forking

PAGE = REPOSITORY / "03_multigpu_ddp" / "beyond" / "DOES_NOT_FIT.md"
WEIGHTS = 4 * 1_199_882  # bytes


@pytest.mark.full
def test_the_program_prints_what_the_page_says() -> None:
    program, printed = re.search(
        r"```python\n(.*?)```\n\n```\n(.*?)```", PAGE.read_text(), re.DOTALL
    ).groups()
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, env=ENVIRONMENT, capture_output=True, text=True
    )
    assert done.stdout == printed, done.stderr


def test_every_test_that_the_page_names_is_there() -> None:
    named = re.findall(r"\[(test_\w+)\]\((\S+?)\)", PAGE.read_text())
    assert len(named) >= 5
    for name, file in named:
        assert f"\ndef {name}(" in (PAGE.parent / file).read_text(), name


def test_ddp_holds_all_on_every_rank_and_sharding_a_part(forking: Forking) -> None:
    done = forking.run(REPOSITORY / "tests" / "held_by_ranks.py", env=ENVIRONMENT)
    of_ddp, of_sharding = json.loads(done.stdout or done.stderr)
    assert of_ddp == 2 * [[WEIGHTS, "4724264, 75264"]]
    if not of_sharding:
        pytest.skip("PyTorch before 2.6 has no fully_shard")
    assert of_sharding == 2 * [[WEIGHTS / 2, WEIGHTS / 2, WEIGHTS]]
