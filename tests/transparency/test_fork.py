"""Forked children of a compared program: other programs, which neither hang nor touch the data of their parent.

Each test is a program of its own with a time limit: what is wrong here shows as a hang.
"""

import os
import sqlite3
import subprocess
import sys

import pytest

import shadowrun

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="a system without fork")

PROGRAM = """
import faulthandler, os, sys, threading, traceback
import torch, shadowrun
from shadowrun import Status

folder, target = sys.argv[1:3]
FILE = folder + "/run.shadowrun"
done = threading.Event()

def work():
    x = torch.rand(200, 200)
    return (x @ x).relu_().sum() + torch.ones(3000, 300).sum(0)[0]

def busy():
    while not done.is_set():
        work()

def in_child(body, *args):
    pid = os.fork()
    if not pid:
        faulthandler.dump_traceback_later(20, exit=True)
        status = 1
        try:
            body(*args)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)
    return pid

def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""

CHILDREN = """
def computes(run):
    work()
    torch.rand(8).erfinv()
    assert shadowrun.current() is None

def leaves(run):
    run.step(), run.stop(), work()
    assert not list(run.records(op="aten::*")) and not run.info.complete
    assert "forked" in run.info.notes[0]

def compares(run):
    with shadowrun.compare(target, file=f"{folder}/own.shadowrun") as own:
        work(), torch.rand(8).erfinv()
    assert own.counts()[Status.MATCH] >= 5, own.counts()
    assert len(list(shadowrun.load(folder + "/own.shadowrun").records(op="aten::erfinv"))) == 1

def compares_in_the_file_of_its_parent(run):
    with shadowrun.compare(target, file=FILE) as own:
        torch.rand(8).erfinv()
    assert [n for n in own.info.notes if f"run.pid{os.getpid()}.shadowrun" in n], own.info.notes
    assert len(list(shadowrun.load(f"{folder}/run.pid{os.getpid()}.shadowrun").records())) == 2

def starts_the_comparison_again(run):
    with run:
        torch.rand(8).erfinv()
    assert len(list(run.records())) == 2, run.counts()

def trains(run):
    model = torch.nn.Linear(300, 300)
    model(torch.rand(300, 300)).sum().backward()
    assert model.weight.grad.isfinite().all()

KINDS = (computes, leaves, compares, compares_in_the_file_of_its_parent, starts_the_comparison_again, trains)
with shadowrun.compare(target, file=FILE) as run:
    work()
    threads = [threading.Thread(target=busy) for _ in range(2)]
    [t.start() for t in threads]
    for kind in KINDS * 2:
        status = ended(in_child(kind, run))
        print(kind.__name__, status, flush=True)
    done.set()
    [t.join() for t in threads]
    work()
assert ended(in_child(starts_the_comparison_again, run)) == 0  # stopped meanwhile
assert not os.path.exists(FILE + "-lock")
print(sum(run.counts().values()), flush=True)
"""


def run(program, *args, folder, limit_s=600):
    path = folder / "program.py"
    path.write_text(PROGRAM + program)
    done = subprocess.run(
        [sys.executable, str(path), str(folder), *args],
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.mark.parametrize("target", ["cpu[threads=2]", "cpu[threads=1,mkldnn=off]"])
def test_children_of_a_busy_program(target, tmp_path):
    done = run(CHILDREN, target, folder=tmp_path)
    *children, total = done.stdout.splitlines()
    assert len(children) == 12
    assert [line for line in children if not line.endswith(" 0")] == [], done.stderr[-3000:]
    path = tmp_path / "run.shadowrun"
    assert sqlite3.connect(path).execute("pragma integrity_check").fetchone() == ("ok",)
    parent = shadowrun.load(path)
    assert sum(parent.counts().values()) == int(total), "all that the parent recorded is in its file"
    seqs = [r.call.seq for r in parent.records()]
    assert seqs == list(range(len(seqs)))
    assert parent.info.complete
    assert parent.info.notes == ()
    assert not list(parent.records(op="aten::erfinv")), "nothing that a child did"
    assert not parent.findings()


OPENMP = """
torch.set_num_threads(1)
def uses_threads():
    torch.set_num_threads(2)
    work()

if sys.argv[3] == "compared":
    with shadowrun.compare("cpu[threads=2]"):
        work()
else:
    work()
print(ended(in_child(uses_threads)), torch.get_num_threads())
"""


@pytest.mark.parametrize("how", ["plain", "compared"])
def test_threads_of_a_replay_do_not_hang_a_child(how, tmp_path):
    """The program itself never ran on two threads, so its child may: GNU OpenMP would wait for the replays' threads."""
    assert run(OPENMP, "cpu", how, folder=tmp_path).stdout.split() == ["0", "1"]


PROCESSES = """
import multiprocessing

def task(k):
    with shadowrun.compare(target, file=FILE) as run:
        torch.rand(8).erfinv()
    return k, len(list(run.records())), float(work().isfinite())

@shadowrun.compare(target, file=folder + "/decorated.shadowrun")
def decorated(k):
    return torch.full((3,), float(k)).erfinv().isfinite().sum().item()

def call(k):
    decorated(k / 10)
    return len(list(decorated.run.records(op="aten::erfinv")))

context = multiprocessing.get_context("fork")
with shadowrun.compare(target, file=FILE) as run:
    work()
    with context.Pool(2) as pool:
        print(pool.map(task, range(4)))
with context.Pool(2) as pool:
    print(pool.map(call, [1, 1], chunksize=1))
print(decorated(0.5), len(list(decorated.run.records(op="aten::erfinv"))))
"""


def test_pools_of_processes(tmp_path):
    done = run(PROCESSES, "cpu[threads=2]", folder=tmp_path)
    made, called, own = done.stdout.splitlines()
    assert made == str([(k, 2, 1.0) for k in range(4)])
    assert set(called) <= set("[12, ]"), "each child has what it called itself"
    assert own == "3 1"
    parent = shadowrun.load(tmp_path / "run.shadowrun")
    assert parent.info.complete
    assert not list(parent.records(op="aten::erfinv"))
    assert list(tmp_path.glob("run.pid*.shadowrun"))
    assert len(list(shadowrun.load(tmp_path / "decorated.shadowrun").records(op="aten::erfinv"))) in (1, 2)


WORKER = """
def leaves(run):
    run.stop()
    work()
    with shadowrun.compare(target) as own:
        torch.rand(8).erfinv()
    assert own.counts()[Status.MATCH] == 2, own.counts()

with shadowrun.compare(target) as run:
    torch.rand(8).exp()
    print(ended(in_child(leaves, run)))
    torch.rand(8).exp()
print(run.counts()[Status.MATCH])
"""


def test_the_worker_of_a_platform_stays_with_the_parent(tmp_path):
    assert run(WORKER, "cpu[isa=default]", folder=tmp_path).stdout.split() == ["0", "4"]


def test_a_child_under_the_command_line_prints_no_report(tmp_path):
    script = tmp_path / "forks.py"
    script.write_text(
        "import os, sys, torch\n"
        "pid = os.fork()\n"
        "if pid == 0: torch.ones(3).erfinv(); sys.exit(3)\n"
        "print('child', os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)\n"
        "torch.ones(3).exp()\n"
    )
    report = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "shadowrun", "run", "--target", "cpu[threads=1]", "-o", str(report), str(script)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("child 3\n"), "nothing was printed before: the report is the parent's"
    assert "erfinv" not in report.read_text()
