"""Install packages into the environment of the Python that runs this: with uv if it can be had, else pip.

    .venv/bin/python tools/install.py '.[course]'

uv takes less than half of pip's time. But it does not read pip's configuration, by which many sites say where
packages come from, and which versions fit their machines. So uv gets these settings, and pip installs where
uv may not do the same by them, and where uv fails. It needs no packages.
"""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

# A setting of pip that chooses packages -> the variable of uv, and what separates several values there.
# Sources: pip.pypa.io/en/stable/topics/configuration, docs.astral.sh/uv/reference/environment
VARIABLES = {
    "index-url": ("UV_INDEX_URL", " "),
    "extra-index-url": ("UV_EXTRA_INDEX_URL", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "constraint": ("UV_CONSTRAINT", " "),
    "cert": ("SSL_CERT_FILE", " "),
}
# Settings of pip that choose no packages.
OTHERS = {"user", "timeout", "default-timeout", "retries", "cache-dir", "no-cache-dir", "quiet", "verbose"}
OTHERS |= {"progress-bar", "no-color", "no-input", "disable-pip-version-check", "no-warn-script-location"}
OTHERS |= {"require-virtualenv", "root-user-action", "break-system-packages", "config-file"}
# Where pip finds settings for an installation; the later ones count more.
SECTIONS = ("global", "install", ":env:")


def main() -> int:
    """Install what the command line names, editable; return the exit code."""
    extras = sys.argv[1:]
    quiet = [] if sys.stdout.isatty() else ["--quiet"]
    variables = uv_variables(_printed_by("-m", "pip", "config", "list"))
    uv = find_uv() if variables is not None else None
    if uv:
        # As pip does: in a class that shares an environment, only its owner could keep what a start compiles.
        command = [uv, "pip", "install", *quiet, "--python", sys.executable, "--compile-bytecode"]
        if subprocess.run([*command, "--editable", *extras], env=os.environ | variables).returncode == 0:
            return 0
        print("uv could not install them; trying pip ...", flush=True)
    return subprocess.run([*_pip_install(*quiet), "--editable", *extras]).returncode


def uv_variables(pip_settings: str) -> dict[str, str] | None:
    """Return uv's variables for the settings of pip, as `pip config list` prints them.

    None if one of them is not known here, so that uv might install other packages than pip.
    """
    by_section: dict[str, dict[str, str]] = {}
    for line in pip_settings.splitlines():
        name, _, value = line.partition("=")
        section, _, name = name.rpartition(".")
        by_section.setdefault(section, {})[name] = ast.literal_eval(value)
    settings = {}
    for section in SECTIONS:
        settings |= by_section.get(section, {})
    if not settings.keys() <= VARIABLES.keys() | OTHERS:
        return None
    # By itself uv takes a package from the first index that has it, and pip the best version of all.
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    for name, (variable, separator) in VARIABLES.items():
        if name in settings:
            variables[variable] = separator.join(settings[name].split())
    return variables


def find_uv() -> str | None:
    """Return the path of a uv that works: the user's own, else one that pip puts into this environment."""
    in_this_environment = str(Path(sys.executable).with_name("uv"))
    on_path = shutil.which("uv")
    if on_path and _works(on_path):
        return on_path
    if not _works(in_this_environment):
        subprocess.run(_pip_install("--quiet", "uv"), capture_output=True)
    return in_this_environment if _works(in_this_environment) else None


def _works(uv: str) -> bool:
    """Return whether this uv runs: one of pyenv may be a name without a program behind it."""
    try:
        return subprocess.run([uv, "--version"], capture_output=True).returncode == 0
    except OSError:
        return False


def _pip_install(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *arguments]


def _printed_by(*arguments: str) -> str:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
