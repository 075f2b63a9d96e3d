"""The pool with real processes: each hostile case is the outcome of itself, and the others have theirs."""

import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shadowrun.errors import PlatformError
from shadowrun.studies.isolation.pool import FailureKind, Limits, Pool, RemainingTask
from shadowrun.studies.isolation.worker_progress import StepReader, StepWriter, new_page, processor_seconds

LIMITS = Limits(60.0, 1 << 30)
ENTRY = "tests.studies.isolation.hostile:start"


@dataclasses.dataclass(frozen=True)
class Cases:
    cases: tuple
    start: int = 0


class Work:
    """Tasks of hostile cases; a lost case is not tried again unless asked."""

    def __init__(self, *tasks, retry=False):
        self.tasks, self.retry = [Cases(t) for t in tasks], retry
        self.done, self.by_task, self.failures, self.n_ended = [], [], [], 0

    def next(self):
        return self.tasks.pop(0) if self.tasks else None

    def line(self, task):
        return dataclasses.asdict(task)

    def receive(self, task, line):
        self.done.append(tuple(line))
        self.by_task.append((*line, task))

    def ended(self, task):
        self.n_ended += 1

    def lost(self, task, failure):
        self.failures.append(failure)
        again = self.retry and len(self.failures) == 1
        return RemainingTask(Cases(task.cases, failure.step.case + (not again)), fresh=again)

    def pause(self):
        return False


def ran(work, settings=None, limits=LIMITS, n=1, **more):
    pool = Pool(ENTRY, settings or {}, n, limits, work, **more)
    with contextlib.closing(pool):
        pool.run()
    return pool


def is_running(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def test_deaths_are_told_from_each_other_and_cost_one_case():
    work = Work(("fine", "segfaults", "leaves", "fine"))
    ran(work)
    assert [n for n, _ in work.done] == [0, 3]
    assert [(failure.kind, failure.step.case) for failure in work.failures] == [
        (FailureKind.CRASH, 1),
        (FailureKind.CRASH, 2),
    ]
    assert [failure.explanation for failure in work.failures] == ["signal 11 (SIGSEGV)", "exit status 7"]
    assert [(failure.step.op, failure.step.on_target) for failure in work.failures] == [
        ("aten::segfaults", True), ("aten::leaves", True),
    ]  # fmt: skip
    assert work.n_ended == 1


def test_limits_and_what_a_case_started():
    work = Work(("spawns", "fine", "eats", "fine"))
    ran(work, limits=Limits(3.0, 200 << 20))
    (_, child), *others = work.done
    assert [n for n, _ in others] == [1, 3]
    assert [failure.kind for failure in work.failures] == [FailureKind.TIMEOUT, FailureKind.OUT_OF_MEMORY]
    deadline = time.monotonic() + 20
    while is_running(child):
        assert time.monotonic() < deadline, "a process that a case started lives on"
        time.sleep(0.05)


def test_a_fork_that_keeps_the_pipes_open_and_much_text():
    work = Work(("forks", "prints", "fine"))
    ran(work)
    assert [n for n, _ in work.done] == [1, 2]
    # Seen by its end, and not by the limit of time.
    assert [(failure.kind, failure.explanation) for failure in work.failures] == [(FailureKind.CRASH, "exit status 9")]


def test_the_guilty_case_gets_a_fresh_process_and_others_go_on(tmp_path):
    work = Work(("fine", "once", "fine"), ("fine",) * 3, retry=True)
    pool = ran(work, {"mark": str(tmp_path / "mark")}, n=2)
    assert sorted(n for n, _ in work.done) == [0, 0, 1, 1, 2, 2]
    assert pool.n_lost == 1
    ((again, task),) = [(pid, task) for n, pid, task in work.by_task if task.cases[n] == "once"]
    first = next(n for n, (_, pid, _) in enumerate(work.by_task) if pid == again)
    assert work.by_task[first] == (1, again, task), "the process had run another case before"
    assert work.n_ended == 2


def test_a_lost_device_is_reset_before_the_next_process(tmp_path):
    mark = tmp_path / "broken"
    settings = {"broken_while": str(mark)}
    work = Work(("fine", "breaks", "loses"))
    command = [sys.executable, "-c", f"import os; os.remove({str(mark)!r})"]
    ran(work, settings, reset_command=command)
    assert [(failure.kind, failure.explanation) for failure in work.failures] == [(FailureKind.DEVICE, "no answer")]
    assert [n for n, _ in work.done] == [0, 2]


def test_a_reset_after_each_process_that_ended(tmp_path):
    log = tmp_path / "log"
    work = Work(("fine", "forks", "fine"))
    command = [sys.executable, "-c", f"open({str(log)!r}, 'a').write('reset ')"]
    ran(work, reset_command=command, resets_always=True)
    assert [failure.kind for failure in work.failures] == [FailureKind.CRASH]
    assert log.read_text(encoding="utf-8") == "reset "


def test_a_reset_that_fails_ends_the_run(tmp_path):
    work = Work(("breaks", "fine"))
    with pytest.raises(PlatformError, match="exit status 4") as caught:
        ran(work, {"broken_while": str(tmp_path / "b")}, reset_command=[sys.executable, "-c", "exit(4)"])
    assert caught.value.slug == "reset-failed"


def test_a_process_that_ends_after_its_message_has_run_its_case():
    work = Work(("sends_and_ends",))
    ran(work, {"number": "0"})
    assert [n for n, _ in work.done] == [0]
    assert work.failures[0].step.case == 0  # what was sent is the work's business, and it has got it before


def test_what_a_page_says():
    descriptor = new_page()
    writer, reader = StepWriter(descriptor), StepReader(os.dup(descriptor))
    assert reader.read().case is None
    writer.begin([7, 1])
    assert (reader.read().case, reader.read().on_target) == ([7, 1], False)
    writer.in_op("aten::mm")
    assert (reader.read().on_target, reader.read().op) == (False, "aten::mm")
    writer.on_target()
    writer.in_op("aten::a")
    step = reader.read()
    assert (step.case, step.on_target, step.op) == ([7, 1], True, "aten::a")
    assert step.base_bytes > 1 << 20
    writer.end()
    assert reader.read().case is None
    writer._page[0] = writer._page[0] + 1  # killed while it writes the next
    assert reader.read().case is None
    with pytest.raises(ValueError, match="bytes; "):
        writer.begin("x" * 4096)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system does not report it")
def test_processor_time_of_a_process_that_runs():
    code = "while __import__('time').process_time() < 0.3: pass\nprint(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        assert processor_seconds(child.pid) >= 0.28  # in ticks of 10 ms
        child.communicate(b"\n")
    assert processor_seconds(child.pid) == 0
