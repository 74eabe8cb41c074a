"""How `make` installs packages: with uv by pip's settings, else with pip (tools/install.py)."""

import pytest
from install import uv_variables


@pytest.mark.parametrize(
    ("settings", "variables"),
    [
        ("", {}),
        ("install.user='true'\n:env:.timeout='60'\n", {}),
        (
            ":env:.find-links='/wheels'\nglobal.find-links='/old'\nglobal.constraint='/site/a.txt\\n/site/b.txt'\n",
            {"UV_FIND_LINKS": "/wheels", "UV_CONSTRAINT": "/site/a.txt /site/b.txt"},
        ),
        ("global.index-url='https://me:x=y@site/simple'\n", {"UV_INDEX_URL": "https://me:x=y@site/simple"}),
        ("download.only-binary=':all:'\n", {}),  # not for an installation
        (":env:.no-index='1'\n", None),
        ("global.index-url='https://site'\ninstall.only-binary=':all:'\n", None),
    ],
)
def test_uv_takes_the_packages_that_pip_would(settings: str, variables: dict[str, str] | None) -> None:
    """By the words of `pip config list`. Where one of its settings is not known to uv, pip installs."""
    if variables is not None:
        variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"} | variables
    assert uv_variables(settings) == variables
