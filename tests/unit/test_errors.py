"""How a program begins and ends: `entrypoint`."""

import signal
from contextlib import nullcontext

import pytest

from manygpus.errors import Stopped, UserError, entrypoint
from manygpus.signals import STOP_SIGNALS


@pytest.fixture(autouse=True)
def _no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)


def test_a_main_that_went_well_comes_back_to_a_notebook_or_a_test() -> None:
    calls = []
    handlers = [signal.getsignal(number) for number in STOP_SIGNALS]
    entrypoint(calls.append)("called")
    assert calls == ["called"]
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == handlers


@pytest.mark.parametrize("error", [UserError("too many"), Stopped("saved")])
def test_a_mistake_ends_the_process_and_a_stop_does_not(error: Exception) -> None:
    @entrypoint
    def main() -> None:
        raise error

    expected = pytest.raises(SystemExit, match="too many") if type(error) is UserError else nullcontext()
    with expected:
        main()


def test_a_number_is_the_exit_code() -> None:
    entrypoint(lambda: 0)()
    with pytest.raises(SystemExit) as ended:
        entrypoint(lambda: 3)()
    assert ended.value.code == 3
