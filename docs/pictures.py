"""Write the pictures of README and tutorial, and the tutorial's output: ``nox -s pictures`` runs this.

Chromium and its driver take the pictures (`tests/browser_kit.py`) of reports that the tutorial's commands write;
Pillow makes them small.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests import browser_kit  # noqa: E402 - the tests are no installed package

TUTORIAL = ROOT / "docs/tutorial.md"
PICTURES = ROOT / "docs/pictures"
COLOURS = 160
MAX_BYTES = 130_000
_OUTPUT = re.compile(r"(<!-- output of: (.+?) -->\n```text\n).*?(\n```)", re.DOTALL)
_PROGRAM = re.compile(r"<!-- file: (\S+) -->\n```python\n(.*?)```", re.DOTALL)


class Picture(NamedTuple):
    """A part of a report.

    Attributes:
        name: Of the file.
        report: File that a command of the tutorial writes.
        find: Expression in JavaScript for the element that is at the top; empty for the top of the page.
        size: In CSS pixels.
    """

    name: str
    report: str
    find: str
    size: tuple[int, int]


SHOWN = (
    Picture("report", "demo.html", "", (1200, 760)),
    Picture("finding", "report.html", "document.getElementById('finding-2')", (1200, 490)),
    Picture("graph", "drift.html", "document.querySelector('figure')", (1200, 480)),
)


def run(command: str, folder: Path) -> str:
    """Run a command of the tutorial, as its reader would, and give what it prints."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "NO_COLOR": "1", "COLUMNS": "100"}
    done = subprocess.run(  # noqa: S602 - commands of a file of this repository
        command, shell=True, cwd=folder, env=env, capture_output=True, text=True, check=False
    )
    if done.returncode not in (0, 1):  # 1: there are findings
        raise RuntimeError(f"{command}: {done.stderr}")
    return (done.stdout + done.stderr).rstrip()


def rewrite(text: str, folder: Path) -> str:
    """The tutorial with the output that its commands have now; ``[:20]`` after one shows its first lines."""

    def output(found: re.Match[str]) -> str:
        command, _, limit = found[2].partition(" [:")
        lines = run(command, folder).splitlines()
        n = int(limit.rstrip("]")) if limit else len(lines)
        shown = "\n".join([*lines[:n], *(["[…]"] if n < len(lines) else [])])
        return f"{found[1]}{shown}{found[3]}"

    for name, program in _PROGRAM.findall(text):
        (folder / name).write_text(program, encoding="utf-8")
    return _OUTPUT.sub(output, text)


def take(browser: browser_kit.Browser, picture: Picture, folder: Path) -> None:
    """One picture, in few colours."""
    width, height = picture.size
    file = PICTURES / f"{picture.name}.png"
    browser.resize(width, height)
    if not (folder / picture.report).is_file():
        raise RuntimeError(f"No command of {TUTORIAL.name} writes {picture.report}.")
    browser.open(folder / picture.report)
    if picture.find:
        browser.run(f"({picture.find}).scrollIntoView(true); window.scrollBy(0, -12)")
    browser.screenshot(file, whole=False)
    image = Image.open(file).convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    image.save(file, optimize=True)
    if file.stat().st_size > MAX_BYTES:
        raise RuntimeError(f"{file.name} has {file.stat().st_size:,} bytes, more than {MAX_BYTES:,}")


def main() -> None:
    """Run all commands, then take all pictures."""
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name, browser_kit.started() as browser:
        folder = Path(name)
        TUTORIAL.write_text(rewrite(TUTORIAL.read_text(encoding="utf-8"), folder), encoding="utf-8")
        for picture in SHOWN:
            take(browser, picture, folder)
            print(f"{picture.name}.png {(PICTURES / f'{picture.name}.png').stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
