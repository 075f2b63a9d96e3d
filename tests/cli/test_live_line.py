"""The live line of `shadowrun run`: at a terminal only, never in the program's output, at most four times a second."""

import os
import pty
import re
import select
import subprocess
import sys
import textwrap
import time

import pytest

import shadowrun
from shadowrun.cli import progress
from tests import forked

pytestmark = pytest.mark.usefixtures("forked_processes")

PROGRAM = """
    import os, sys, time, torch
    x = torch.ones(4)
    for i in range(60):
        for _ in range(70):
            x = x + 1
        print("loss", i, flush=True)
        if i % 20 == 0:
            os.write(2, b"\\rhalf a line")
        time.sleep(0.02)
    os.fork() or os._exit(0)
    os.wait()
"""
OURS = re.compile(
    r"(?:\n\x1b7\x1b\[1;\d+r\x1b8\x1b\[1A)?\x1b7(?:\x1b\[r)?\x1b\[\d+;1H(?:\x1b\[0;2m)?\x1b\[2K([^\x1b]*)\x1b8"
)


@pytest.fixture
def run(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(PROGRAM), encoding="utf-8")

    def at_terminal(*options, **variables):
        """What `shadowrun run` writes to a terminal, and how long it takes."""
        ours, theirs = pty.openpty()
        environment = {name: value for name, value in os.environ.items() if name != "CI"}
        environment |= {"TERM": "xterm-256color", **variables}
        command = ["run", "--target", "cpu[threads=1]", "--no-settings", *options]
        began = time.monotonic()
        # As of a shell: the terminal is that of the process, which is in the foreground.
        process = subprocess.Popen(
            [sys.executable, "-c", _AS_SHELL, *command, "train.py"],
            stdin=theirs, stdout=theirs, stderr=theirs, env=environment, cwd=tmp_path, start_new_session=True,
        )  # fmt: skip
        os.close(theirs)
        found = b""
        while select.select([ours], [], [], 120)[0]:
            try:
                found += os.read(ours, 65536)
            except OSError:  # Linux: no process has the terminal any more
                break
        os.close(ours)
        assert process.wait() == 0, found.decode()
        return found.decode().replace("\r\n", "\n"), time.monotonic() - began

    return at_terminal


_AS_SHELL = """
import fcntl, os, struct, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 100, 0, 0))
from shadowrun.cli.main import main
sys.exit(main())
"""


def before_report(text):
    return text[: text.index("against cpu\n")]


def test_the_line_is_apart_from_the_programs_output_and_leaves_nothing(run):
    text, took_s = run("--steps", "0-3")
    plain, _ = run("--no-progress")
    shown = OURS.findall(text)
    assert 3 < len(shown) <= 4 * took_s + 2
    assert re.fullmatch(r"shadowrun [\d,]+ calls · 0 findings · .[\d.]+ · step 0 of 3", shown[-2])
    assert shown[-1] == ""  # the last line is given back, and all lines scroll again
    assert "\x1b[r" in text[text.rindex("half a line") :]
    # What is left is what the program wrote, byte for byte, though a child was forked.
    assert before_report(OURS.sub("", text)) == before_report(plain)
    assert "\x1b7" not in plain


def test_it_can_be_asked_for_and_switched_off(run, tmp_path):
    assert "\x1b7" not in run(SHADOWRUN_NO_PROGRESS="1")[0]
    assert "\x1b7" in run("--progress", CI="true")[0]
    piped = forked.shadowrun("run", "--target", "cpu[threads=1]", "--progress", "train.py", folder=tmp_path)
    assert piped.returncode == 0
    assert "\x1b" not in piped.stdout + piped.stderr


@pytest.mark.parametrize(
    ("asked", "term", "ci", "shown"),
    [
        (None, "xterm", "", True),
        (None, "xterm", "true", False),
        (True, "xterm", "true", True),
        (None, "dumb", "", False),
        (True, "dumb", "", False),
        (False, "xterm", "", False),
    ],
)
def test_where_it_is_shown(monkeypatch, asked, term, ci, shown):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("CI", ci)
    assert progress.wants_live_line(asked) == shown
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    assert not progress.wants_live_line(asked)


def test_what_it_says():
    run = shadowrun.compare("cpu[threads=1]", settings=False)
    run.follow(lambda: None)
    assert re.fullmatch("0 calls · 0 findings · .1 · step 0", progress.progress_text(run))
