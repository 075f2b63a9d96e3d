"""What a case may take is counted from where the case begins, and what a dead worker left is tried again."""

import pytest

from shadowrun.studies.isolation import pool
from shadowrun.studies.isolation.pool import Limits, Pool
from shadowrun.studies.isolation.worker_progress import Step
from shadowrun.studies.sweep.cases import Case, CaseFinding, CaseOutcome, Kind, Part, Task
from shadowrun.studies.sweep.coverage_file import CoverageFile
from shadowrun.studies.sweep.run_sweep import ALL, SweepRequest, SweepWork, _info, _remaining

GIB = 1 << 30
TASK = Task("exp", "float32", (Part.FORWARD, Part.BACKWARD))


class Worker:
    """A worker with a task in hand; the test says where it is, and what it holds."""

    has_exited = False
    lost = ""

    def __init__(self, now):
        self.task = TASK
        self.is_ready, self.memory, self.ended = True, GIB, False
        self.step = Step(since=now, base_bytes=GIB)

    def fileno(self):
        return 0

    def memory_bytes(self):
        return self.memory

    def kill_children_above(self, n_bytes):
        pass

    def forget_printed(self):
        pass

    def drain(self):
        return []

    def kill(self):
        pass

    def exit_reason(self):
        return "signal 11 (SIGSEGV)"

    def stderr_tail(self):
        return ""

    def end(self):
        self.ended = True


class Bench:
    """A pool with one worker, at a time that the test sets."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        self.results, self.finished, self.tasks = [], [], []
        monkeypatch.setattr(pool.time, "monotonic", lambda: self.now)
        self.work = SweepWork(
            [], None,
            lambda case, outcome: self.results.append((case, outcome)),
            lambda _, part, __: self.finished.append(part), self.tasks.append,
        )  # fmt: skip
        self.pool = Pool("", {}, 1, Limits(15.0, GIB), self.work)
        monkeypatch.setattr(self.pool._selector, "unregister", lambda _: None)

    def worker(self):
        worker = Worker(self.now)
        self.work.line(TASK)
        self.pool._workers.append(worker)
        return worker

    def case(self, worker, sample=0):
        worker.step = Step(["forward", sample, "f32[2]"], on_target=True, since=self.now, base_bytes=GIB)


@pytest.fixture
def bench(monkeypatch):
    return Bench(monkeypatch)


def test_the_clock_of_a_case_starts_when_the_case_does(bench):
    worker = bench.worker()
    bench.now += 40  # the database is imported, inputs are made
    bench.pool._enforce_limits(worker)
    assert not worker.ended
    bench.case(worker)
    bench.now += 14
    bench.pool._enforce_limits(worker)
    assert not worker.ended
    bench.now += 2
    bench.pool._enforce_limits(worker)
    assert worker.ended
    ((case, outcome),) = bench.results
    assert (case.sample, outcome.kind) == (0, Kind.TIMEOUT)
    bench.pool._selector.close()


def test_who_never_begins_a_case_is_ended_all_the_same(bench):
    worker = bench.worker()
    bench.now += 301
    bench.pool._enforce_limits(worker)
    assert worker.ended
    assert bench.results == []
    assert bench.pool._waiting[0].task.parts == TASK.parts


def test_memory_is_told_from_time(bench):
    worker = bench.worker()
    bench.case(worker)
    bench.now += 60
    worker.memory = 3 * GIB
    bench.pool._enforce_limits(worker)
    assert bench.results[-1][1].kind is Kind.OUT_OF_MEMORY
    worker = bench.worker()
    bench.case(worker, 1)
    bench.now += 60
    worker.memory = GIB + GIB // 2
    bench.pool._enforce_limits(worker)
    (finding,) = bench.results[-1][1].findings
    assert (finding.kind, finding.message) == (Kind.TIMEOUT, "it had taken 0.5 GiB by then")


def test_what_dead_workers_left_is_not_filed_as_done(bench):
    for sample in range(3):
        worker = bench.worker()
        bench.case(worker, sample)
        bench.pool._died(worker)
    assert [case.sample for case, _ in bench.results] == [0, 1, 2, -1]
    assert bench.finished == []
    assert bench.work.n_given_up == 1
    assert bench.pool._waiting[0].task.parts == (Part.BACKWARD,)


def test_the_next_start_tries_it_again(tmp_path, clean_sim):
    info = _info(SweepRequest("sim"))
    file = CoverageFile.begin(tmp_path / "a.shadowcov", info)
    crash, given_up = CaseOutcome((CaseFinding(Kind.CRASH),)), CaseOutcome((CaseFinding(Kind.UNVERIFIED),))
    file.add(Case("exp", "float32", Part.FORWARD, 0), crash)
    file.add(Case("exp", "float32", Part.FORWARD, -1), given_up)
    file.add(Case("exp", "float32", Part.BACKWARD, -1), given_up)  # its inputs could not be made
    file.finish("exp", "float32", Part.BACKWARD, ALL, 0)
    file.forget_given_up()
    (task,) = _remaining([TASK], file, ALL)
    assert task.parts == (Part.FORWARD,)
    assert (Part.FORWARD, 0) in task.done
    assert [(case.part, case.sample) for case, _ in file.results()] == [(Part.BACKWARD, -1), (Part.FORWARD, 0)]
    file.close()
    # A reader checks the whole file: the note of an abandoned part is no damage.
    CoverageFile.open(tmp_path / "a.shadowcov").close()
