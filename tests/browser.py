"""A browser without a screen: the system's own, or Debian's, unpacked beside the packages of Python."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib
from filelock import FileLock
from playwright.sync_api import Browser, Error, sync_playwright

PROGRAMS = ("chromium-headless-shell", "chromium", "google-chrome", "google-chrome-stable")
UNPACKED = Path(sys.prefix) / "browser"  # goes with the environment
FONTS = f"""<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{matplotlib.get_data_path()}/fonts/ttf</dir><cachedir>{{}}</cachedir></fontconfig>
"""


@contextmanager
def running_browser() -> Iterator[Browser]:
    """A browser for a test.

    Raises:
        OSError: if there is none, none can be had, or it does not start here.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, sync_playwright() as playwright:
        fonts = Path(folder, "fonts.conf")
        fonts.write_text(FONTS.format(folder))
        environment = os.environ | {"HOME": folder, "FONTCONFIG_FILE": str(fonts)}
        program = _program(environment)
        try:
            # No sandbox: it shows pages of our own, and containers forbid to make one.
            browser = playwright.chromium.launch(
                executable_path=program, env=environment, chromium_sandbox=False
            )
        except Error as error:
            raise OSError(f"{program} does not start: {error}") from error
        yield browser
        browser.close()


def _program(environment: dict[str, str]) -> str:
    """The browser's path; the environment learns where its libraries are."""
    installed = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if installed:
        return installed
    with FileLock(f"{UNPACKED}.lock"):
        if not UNPACKED.exists():
            _unpack()
    libraries = sorted({str(file.parent) for file in UNPACKED.glob("**/lib*.so*")})
    environment["LD_LIBRARY_PATH"] = ":".join(libraries)
    return str(next(UNPACKED.glob("usr/lib/chromium*/*headless*shell")))


def _unpack() -> None:
    """Download Debian's browser with all that the system lacks of it; needs no root, and installs nothing."""
    with tempfile.TemporaryDirectory(dir=UNPACKED.parent) as temporary:
        here = Path(temporary)
        for folder in ("lists/partial", "cache/archives/partial"):
            (here / folder).mkdir(parents=True)
        options = [f"Dir::State::Lists={here}/lists", f"Dir::Cache={here}/cache"]
        options += ["Debug::NoLocking=1", "APT::Sandbox::User=root", "Acquire::Languages=none"]
        apt = ["apt-get", *(word for option in options for word in ("-o", option))]
        _run([*apt, "update"], here)
        plan = _run([*apt, "--simulate", "--no-install-recommends", "install", PROGRAMS[0]], here)
        _run([*apt, "download", *re.findall(r"^Inst (\S+) \(", plan, re.MULTILINE)], here)
        for package in here.glob("*.deb"):
            _run(["dpkg", "-x", str(package), str(here / "root")], here)
        (here / "root").rename(UNPACKED)


def _run(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        ["timeout", "120", *command],  # a network may be there and not answer
        cwd=folder, env=os.environ | {"LC_ALL": "C"}, capture_output=True, text=True,
    )  # fmt: skip
    if done.returncode != 0:
        raise OSError(f"no browser: {command[0]} says {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
