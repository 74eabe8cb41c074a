"""The page to share: what is in its file, and what a browser makes of it."""

import base64
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
import pandas as pd
import pytest
from conftest import REPOSITORY
from filelock import FileLock
from playwright.sync_api import Browser, Error, Page, sync_playwright
from test_hostile_records import MATHS, TAG, made

from trainkit.advice import report as advice
from trainkit.compare import page
from trainkit.compare.report import report, report_each

SAMPLES = REPOSITORY / "results" / "sample"
RUNS = SAMPLES / "cpu-2-cores" / "runs.csv"
HOSTILE = f'"{TAG}" onload=alert(1) {{{{ 1 + 1 }}}} {MATHS}'
PHONE, PAPER = 390, 1047  # CSS pixels: a phone's width, and that of A4 between its margins
# The tables of runs; others say what to ask for.
TABLES = "[...document.querySelectorAll('.sortable')].filter(table => table.querySelector('details'))"


# --- a browser without a screen: the system's own, or Debian's, unpacked beside the packages of Python ---

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


# --- the page ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the committed runs, and of two whose names would like to be markup."""
    folder = tmp_path_factory.mktemp("page")
    for device in ("CPU: a", "CPU: b"):
        name = f"hostile-{device[-1]}"
        made(folder / "runs", name, stage=HOSTILE, device_name=device, node_list=HOSTILE, torch_version=TAG)
    report([RUNS, folder / "runs"], folder / "out", advice=advice.blocks)
    return folder / "out" / "report.html"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    try:
        with running_browser() as running:
            yield running
    except OSError as error:
        pytest.skip(str(error))


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Page]:
    """A tab, whose pages complain of nothing, and fetch nothing but files."""
    tab, complaints, asked_for = chromium.new_page(), [], []
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("request", lambda request: asked_for.append(request.url))
    yield tab
    tab.close()
    assert not complaints
    assert all(address.startswith(("file:", "data:")) for address in asked_for)


def test_a_file_of_its_own(written: Path) -> None:
    """All figures, cells and runs are in it, nothing is fetched, and no name is markup."""
    text = written.read_text()
    figures = sorted(written.parent.glob("*.png"))
    assert figures and text.count("<img ") == len(figures)
    for figure in figures:
        assert base64.b64encode(figure.read_bytes()).decode() in text
    assert "http" not in text.replace("http-equiv", "") and TAG not in text
    assert text.count("<script>") == 1 and "{{ 1 + 1 }}" in text
    lines = re.findall(r"^\| (.*) \|$", written.with_name("comparison.md").read_text(), re.MULTILINE)
    cells = {cell for line in lines for cell in line.split(" | ") if cell.replace(".", "").isalnum()}
    assert len(cells) > 30 and all(f">{cell}<" in text for cell in cells)
    for run_id in set(pd.read_csv(RUNS).run_id):
        assert f"<td>{run_id}</td>" in text and f"<td>{RUNS}</td>" in text


def test_a_page_of_anything(tmp_path: Path, browser: Page) -> None:
    """Every kind of block shows its text, and a row without runs opens to nothing."""
    texts = ["a heading", "a paragraph", "a note", "another", "make compare ARGS='--epochs 3'", "1.5", "-"]
    blocks = [page.Heading(texts[0]), page.Text(texts[1]), page.Notes(texts[2:4]), page.Command(texts[4])]
    blocks.append(page.Table(pd.DataFrame({"speed": texts[5:]})))
    page.write(tmp_path / "page.html", "A title", blocks)
    browser.goto((tmp_path / "page.html").as_uri())
    shown = browser.evaluate("document.body.innerText")
    assert all(text in shown for text in ["A title", *texts])
    assert browser.evaluate("document.querySelectorAll('details').length") == 0
    assert browser.title() == "A title"


def test_each_folder_has_a_page(tmp_path: Path, browser: Page) -> None:
    report_each([SAMPLES / "cpu-xeon-2-cores" / "lessons.csv", RUNS], tmp_path)
    browser.goto((tmp_path / "each.html").as_uri())
    rows = browser.evaluate("document.querySelectorAll('.sortable > tbody').length")
    assert rows == len(pd.read_csv(tmp_path / "each.csv"))


def test_a_browser_shows_it(written: Path, browser: Page) -> None:
    """Tables and figures are there, and names are texts; a row opens to its runs."""
    browser.goto(written.as_uri())
    table = pd.read_csv(written.with_name("comparison.csv"))
    assert browser.evaluate(f"{TABLES}.length") == table.device_name.nunique()
    assert browser.evaluate(f"{TABLES}.flatMap(table => [...table.tBodies]).length") == len(table)
    assert "Ask for 2 CPU workers on 1 node" in browser.evaluate("document.body.innerText")
    widths = browser.evaluate("[...document.images].map(image => image.naturalWidth)")
    assert len(widths) == len(list(written.parent.glob("*.png"))) and min(widths) > 500
    assert HOSTILE in browser.evaluate("document.querySelector('p').innerText")
    runs = browser.locator("details").first
    assert "runs.csv" not in runs.inner_text()
    browser.click("summary")
    assert "runs.csv" in runs.inner_text()


def test_a_click_sorts(written: Path, browser: Page) -> None:
    """By numbers where there are some, upwards and then downwards; the runs go with their row."""
    browser.goto(written.as_uri())
    table = browser.locator(".sortable:has(details)").first
    headers = [text.strip() for text in table.locator("thead th").all_inner_texts()]
    number = 1 + headers.index("wall s")
    cells = table.locator(f":scope > tbody > tr:first-child > td:nth-child({number})")
    before, together = cells.all_inner_texts(), table.locator(":scope > tbody").all_text_contents()
    for i in range(2):
        table.locator(f"th:nth-child({number}) button").click()
        assert cells.all_inner_texts() == sorted(before, key=float, reverse=bool(i))
    assert sorted(table.locator(":scope > tbody").all_text_contents()) == sorted(together)


@pytest.mark.parametrize(("width", "print_as"), [(PHONE, False), (PAPER, True)], ids=["phone", "paper"])
def test_it_fits(written: Path, browser: Page, width: int, print_as: bool) -> None:
    """On a phone a table scrolls within its box, never the page; on paper all of it is there."""
    browser.set_viewport_size({"width": width, "height": 800})
    browser.emulate_media(media="print" if print_as else "screen")
    browser.goto(written.as_uri())
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    boxes = browser.evaluate(
        "[...document.querySelectorAll('.box')].map(box => [box.scrollWidth, box.clientWidth])"
    )
    assert any(all_of_it > shown for all_of_it, shown in boxes) == (width == PHONE)
    if print_as:
        assert browser.pdf(prefer_css_page_size=True).startswith(b"%PDF")
