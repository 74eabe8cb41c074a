"""A browser without a screen: the system's own, or Debian's, unpacked beside the packages of Python."""

import json
import os
import re
import select
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import matplotlib
from filelock import FileLock

PROGRAMS = ("chromium-headless-shell", "chromium", "google-chrome", "google-chrome-stable")
UNPACKED = Path(sys.prefix) / "browser"  # goes with the environment
# What a test needs of it, and no sandbox: it shows pages of our own, and containers forbid to make one.
OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--remote-debugging-pipe",
)
FONTS = f"""<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{matplotlib.get_data_path()}/fonts/ttf</dir><cachedir>{{}}</cachedir></fontconfig>
"""


class Browser:
    """One tab, driven by the protocol of Chrome's developer tools; `events` are those it has told of."""

    def __init__(self, process: subprocess.Popen) -> None:
        self._process, self._unread, self._number = process, b"", 0
        self._session: dict[str, str] = {}
        self.events: list[dict] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": session["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, path: Path, width: int = 1200, print_as: bool = False) -> None:
        """Show a file in a window so many CSS pixels wide, from its beginning to its `load` event."""
        size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Emulation.setEmulatedMedia", media="print" if print_as else "screen")
        self.events.clear()
        self.call("Page.navigate", url=path.as_uri())
        self._until(lambda message: message.get("method") == "Page.loadEventFired")

    def evaluate(self, expression: str) -> object:
        """What the expression of JavaScript is in the page."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def click(self, selector: str) -> None:
        """Press the mouse in the middle of the first element that the selector of CSS names."""
        middle = (
            "(() => { const element = document.querySelector(%s); element.scrollIntoView({block: 'center'});"
            "const box = element.getBoundingClientRect();"
            "return {x: box.x + box.width / 2, y: box.y + box.height / 2} })()"
        )
        where = self.evaluate(middle % json.dumps(selector)) | {"button": "left", "clickCount": 1}
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, **where)

    def complaints(self) -> list[dict]:
        """Errors, warnings and whatever the page has written to the console since it was opened."""
        kinds = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
        return [event for event in self.events if event["method"] in kinds]

    def asked_for(self) -> list[str]:
        """The addresses of all that the page has loaded since it was opened."""
        sent = [event for event in self.events if event["method"] == "Network.requestWillBeSent"]
        return [event["params"]["request"]["url"] for event in sent]

    def call(self, method: str, **parameters: object) -> dict:
        """Call a method of the protocol, and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters} | self._session
        self._process.stdin.write(json.dumps(message).encode() + b"\0")
        self._process.stdin.flush()
        answer = self._until(lambda message: message.get("id") == self._number)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def _until(self, wanted: Callable[[dict], bool]) -> dict:
        """The first message that is wanted; the events before it are kept."""
        while True:
            while b"\0" not in self._unread:
                answered, _, _ = select.select([self._process.stdout], [], [], 60)
                read = answered and os.read(self._process.stdout.fileno(), 2**20)
                if not read:
                    raise ConnectionError("the browser has ended, or does not answer")
                self._unread += read
            text, _, self._unread = self._unread.partition(b"\0")
            message = json.loads(text)
            if "method" in message:
                self.events.append(message)
            if wanted(message):
                return message


@contextmanager
def running_browser() -> Iterator[Browser]:
    """A browser for a test.

    Raises:
        OSError: if there is none, none can be had, or it does not start here.
    """
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        fonts = Path(folder, "fonts.conf")
        fonts.write_text(FONTS.format(folder))
        environment = os.environ | {"HOME": folder, "FONTCONFIG_FILE": str(fonts)}
        command = [*_program(environment), *OPTIONS, f"--user-data-dir={folder}/profile"]
        # The protocol is on 3 and 4.
        process = subprocess.Popen(
            ["bash", "-c", 'exec "$@" 3<&0 4>&1 0</dev/null 1>/dev/null 2>&1', "bash", *command],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        try:
            yield Browser(process)
        finally:
            process.kill()
            process.communicate()


def _program(environment: dict[str, str]) -> list[str]:
    """The browser's command; the environment learns where its libraries are."""
    installed = next(filter(None, map(shutil.which, PROGRAMS)), None)
    if installed:
        return [installed]
    with FileLock(f"{UNPACKED}.lock"):
        if not UNPACKED.exists():
            _unpack()
    libraries = sorted({str(file.parent) for file in UNPACKED.glob("**/lib*.so*")})
    environment["LD_LIBRARY_PATH"] = ":".join(libraries)
    return [str(next(UNPACKED.glob("usr/lib/chromium*/*headless*shell")))]


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
