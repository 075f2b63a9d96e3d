"""A call of a file that ends its process is a result: another child makes the calls that are left."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shadowrun

pytestmark = [
    pytest.mark.usefixtures("forked_processes"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes"),
]


def command(*words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "shadowrun", *words]
    return subprocess.run(argv, check=False, capture_output=True, text=True, timeout=300)


@pytest.fixture
def recording(tmp_path, monkeypatch):
    """Divisions among other calls; in the file, two of them are of the smallest integer by -1."""
    monkeypatch.chdir(tmp_path)
    ints = [torch.full((9,), n, dtype=torch.int32) for n in (7, 3, 5)]
    with shadowrun.record("x.shadowrec", capture=1 << 20):
        ints[0] + ints[1]
        for by in ints[1:]:
            torch.div(ints[0], by, rounding_mode="trunc")
        ints[0] - ints[1]
    connection = sqlite3.connect("x.shadowrec")

    def replace(old: torch.Tensor, new: int, where: str) -> None:
        before = old.numpy().tobytes()
        after = torch.full_like(old, new).numpy().tobytes()
        names = [hashlib.sha256(b).hexdigest() for b in (before, after)]
        (form,) = connection.execute("select dtype, shape from content where digest = ?", names[:1]).fetchall()
        connection.execute("insert or ignore into content values (?, ?, ?, ?)", (names[1], *form, after))
        connection.execute(f"update captured set arguments = replace(arguments, ?, ?) where {where}", names)

    for old, new in ((ints[0], -(2**31)), (ints[1], -1), (ints[2], -1)):
        replace(old, new, "arguments like '%rounding_mode%'")
    connection.commit()
    connection.close()
    return Path("x.shadowrec")


def test_a_replay_goes_on_after_a_call_that_ends_its_process(recording):
    ended = command("replay", str(recording), "--target", "cpu", "-f", "json", "--fail-on", "error")
    assert ended.returncode == 1, ended
    assert "2 calls raise here" in ended.stderr
    assert "it ended its process by SIGFPE" in ended.stdout
    assert "aten::add" in ended.stdout
    assert "aten::sub" in ended.stdout


def test_other_calls_alone_raise_nothing(recording):
    ended = command("replay", str(recording), "--target", "cpu", "--ops", "aten::add*,aten::sub*", "--fail-on", "error")
    assert ended.returncode == 0, ended


CHILD = """
import os, signal, sys
from shadowrun.cli import child_process
from shadowrun.limits import current_call
child_process._MAX_CHILDREN = 3
n_made = 0
if (ended := child_process.in_child()) is not None:
    sys.exit(ended)
for call in range({n}):
    if call not in current_call.ended:
        current_call.begin(call, "aten::x")
        {ends}
current_call.begin(-1, "")
print(current_call.ended)
"""


KILLS = "os.kill(os.getpid(), signal.%s)"
# As OpenMP does where it cannot start as many threads as a graph asks for.
EXITS = "__import__('ctypes').CDLL(None).exit(1)"


@pytest.mark.parametrize(
    ("n", "ends", "said"),
    [
        (2, KILLS % "SIGSEGV", "{0: 'it ended its process by SIGSEGV', 1: 'it ended its process by SIGSEGV'}"),
        (4, KILLS % "SIGSEGV", "calls-ended-process"),  # a start for each call of a file would have no end
        (1, KILLS % "SIGKILL", "calls-ended-process"),  # memory: another child would take it, too
        (1, EXITS, "{0: 'it ended its process by exit status 1'}"),
        (4, EXITS, "calls-ended-process"),
    ],
)
def test_calls_are_left_out_one_by_one(n, ends, said):
    argv = [sys.executable, "-c", CHILD.format(n=n, ends=ends)]
    ended = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=100)
    if said == "calls-ended-process":
        assert "a call of aten::x of it" in ended.stderr
        assert ended.returncode
    else:
        assert (ended.returncode, ended.stdout.strip()) == (0, said), ended


SLOWDOWN = """
import os, signal, sys
from shadowrun.studies.slowdown import timing
measured = timing.measure
def measure(call, *args, **kwargs):
    if call.op == "aten::mul.Tensor":
        os.kill(os.getpid(), signal.SIGSEGV)
    return measured(call, *args, **kwargs)
timing.measure = measure
from shadowrun.cli.main import main
sys.exit(main())
"""


def test_slowdown_goes_on_after_a_call_that_ends_its_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    x = torch.ones(9)
    with shadowrun.compare("cpu[threads=1]", file="x.shadowrun"):
        x + x, x * x, x - x
    argv = [sys.executable, "-c", SLOWDOWN, "slowdown", "x.shadowrun", "--rounds", "3", "-f", "csv", "--target", "cpu"]
    ended = subprocess.run(argv, check=False, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended
    (row,) = [line for line in ended.stdout.splitlines() if "aten::mul" in line]
    assert "it ended its process by SIGSEGV" in row
    assert "aten::add" in ended.stdout
    assert "aten::sub" in ended.stdout
