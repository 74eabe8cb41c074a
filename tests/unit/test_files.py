"""Files that a training writes, and locks of other users."""

import os
from pathlib import Path

import pytest

from manygpus.errors import UserError
from manygpus.files import locked


def test_a_lock_of_another_user(tmp_path: Path) -> None:
    (tmp_path / ".lock").touch(mode=0o444)
    me = os.geteuid()
    os.seteuid(me or 65534)
    try:
        with pytest.raises(UserError, match="belongs to another user: give a folder of your own"):
            locked(tmp_path / ".lock", "held")
    finally:
        os.seteuid(me)
