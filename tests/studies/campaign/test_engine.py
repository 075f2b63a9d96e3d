"""Whole campaigns of fake variants: each recipe ends in one outcome, on any number of processes and after kills."""

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shadowrun.errors import DataFileError, PlatformError
from shadowrun.studies.campaign.campaign_folder import CHUNK, CampaignFolder, CampaignSettings
from shadowrun.studies.campaign.chunk_work import Chunk
from shadowrun.studies.campaign.combine_stores import combine
from shadowrun.studies.campaign.engine import Engine, Outcome, open_chunks
from shadowrun.studies.campaign.store import CampaignStore
from shadowrun.studies.shards import Shard
from tests.studies.campaign.fake_worker import ENTRY, KNOBS

pytestmark = pytest.mark.usefixtures("forked_processes")

SETTINGS = CampaignSettings(("cpu",), n=350, torch="2.13.0", timeout_s=60.0)


@pytest.fixture(autouse=True)
def knobs(monkeypatch):
    """What becomes of variants: set by a test, read by all workers."""

    def turn(**what):
        monkeypatch.setenv(KNOBS, json.dumps({k.replace("_", " "): v for k, v in what.items()}))

    return turn


def folder(path, **other):
    programs = path.with_name("programs")
    programs.write_bytes(b"fakes")
    return CampaignFolder.create(path, dataclasses.replace(SETTINGS, **other), programs)


def ran(where, executor=None, **options):
    outcome = Engine(where, entry=ENTRY, **options).run(executor)
    combine(where.combined, where.shards(), where.info())
    return outcome


def outcomes(where):
    """All that a campaign says but its times, by number."""
    with contextlib.closing(CampaignStore.open(where.combined)) as store:
        variants = list(store.variants())
        results = [r._replace(cpu_us=0) for r in store.results()]
    return variants, results


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A campaign of one process."""
    where = folder(tmp_path_factory.mktemp("whole") / "c")
    assert ran(where) is Outcome.COMPLETE
    return outcomes(where)


def test_each_variant_has_one_outcome(whole):
    variants, results = whole
    assert [v.number for v in variants] == list(range(350))
    duplicates = {v.number: v.duplicate_of for v in variants if v.duplicate_of >= 0}
    assert duplicates == {n: n - 5 for n in range(9, 350, 10)}
    assert [r.number for r in results] == [n for n in range(350) if n not in duplicates]
    found = [r for r in results if r.status == "finding"]
    assert [r.number for r in found] == [n for n in range(0, 350, 25) if n % 10 != 9]
    assert [f.op for f in found[1].findings] == ["aten::op1", "aten::neg"]
    recipes = {v.number: v.recipe for v in variants if v.recipe}
    assert sorted(recipes) == [r.number for r in found]  # of what passes, none is kept
    assert json.loads(recipes[25]) == ["000000000004", [["insert", 25], ["shape"]], 25]
    assert {v.mutators for v in variants} == {("insert", "shape")}


def test_the_same_on_more_processes_and_in_shards(tmp_path, whole):
    two = folder(tmp_path / "two")
    assert ran(two, jobs=2) is Outcome.COMPLETE
    assert outcomes(two) == whole
    parts = folder(tmp_path / "parts")
    for index in (2, 0, 1):
        assert ran(parts, shard=Shard(index, 3)) is Outcome.COMPLETE
    assert [p.name.partition(".")[0] for p in parts.shards()] == ["1-of-3", "2-of-3", "3-of-3"]
    assert outcomes(parts) == whole
    # A larger number extends a campaign, from its end on.
    less = folder(tmp_path / "less", n=120)
    assert ran(less) is Outcome.COMPLETE
    more = folder(tmp_path / "less")
    assert ran(more) is Outcome.COMPLETE
    assert outcomes(more) == whole
    with contextlib.closing(CampaignStore.open(more.combined)) as store:
        assert [s[2] for s in store.sessions()] == [120, 230]
    # All is there: another division finds nothing to run.
    assert ran(parts) is Outcome.COMPLETE
    assert outcomes(parts) == whole
    with contextlib.closing(CampaignStore.open(parts.combined)) as store:
        assert sum(s[2] for s in store.sessions()) == 350


HOSTILE = {
    "crash": [13, 113, 213, 263], "hang": [24], "crash_while_made": [31], "crash_on_the_reference": [37],
    "invalid": [41], "cannot_be_made": [43], "raises": [47], "crash_once": [18],
}  # fmt: skip


def test_hostile_variants_are_outcomes(tmp_path, knobs, whole):
    where = folder(tmp_path / "c", timeout_s=2.0)
    knobs(mark=str(tmp_path / "mark"), **HOSTILE)
    assert ran(where, jobs=2) is Outcome.COMPLETE
    variants, results = outcomes(where)
    assert [v.number for v in variants] == list(range(350))
    invalid = {v.number: v.invalid for v in variants if v.invalid}
    assert invalid == {
        31: "crash while it was made: signal 11 (SIGSEGV)",
        37: "crash on the reference: signal 11 (SIGSEGV)",
        41: "the reference raises",
        43: "no such thing",
    }
    by_number = {r.number: r for r in results}
    for number in HOSTILE["crash"]:
        (found,) = by_number[number].findings
        assert (found.op, found.kind, found.explanation) == ("aten::erfinv", "crash", "signal 11 (SIGSEGV)")
    (hang,) = by_number[24].findings
    assert (hang.kind, hang.explanation) == ("time-out", "no end within 2 s")
    (flaky,) = by_number[18].findings
    assert (flaky.kind, flaky.explanation) == ("crash", "signal 6 (SIGABRT); not again in a fresh process")
    assert (by_number[47].status, by_number[47].reason) == ("failed", "RuntimeError: a fault of ours")
    recipes = {v.number: v.recipe for v in variants}
    assert all(recipes[n] for n in (13, 24, 18, 37, 41, 47))
    guilty = {13, 113, 213, 263, 24, 31, 37, 41, 43, 47, 18}
    assert [r for r in results if r.number not in guilty] == [r for r in whole[1] if r.number not in guilty]
    with contextlib.closing(CampaignStore.open(where.combined)) as store:
        events = [(e.number, e.attempt) for e in store.events()]
    # After three confirmed crashes of one operator, the fourth costs one process.
    assert sum(n in HOSTILE["crash"] for n, _ in events) == 7
    assert [e for e in events if e[0] == 18] == [(18, 1)]


def test_more_hostile_variants_cost_one_each(tmp_path, knobs, whole):
    """A variant that forks, prints gigabytes, takes all memory, leaves, or is killed from outside."""
    where = folder(tmp_path / "c", memory_bytes=300 << 20)
    knobs(kill_itself=[13], leave=[24], fork=[36], print=[47], eat=[58])
    assert ran(where, jobs=2) is Outcome.COMPLETE
    variants, results = outcomes(where)
    assert [v.number for v in variants] == list(range(350))
    found = {r.number: [(f.kind, f.explanation) for f in r.findings if f.op == "aten::erfinv"] for r in results}
    assert found[24] == [("crash", "exit status 7")]
    assert found[36] == [("crash", "exit status 9")]
    assert found[58] == [("out of memory", "more than 0.293 GiB")]
    assert found[13] == [("crash", "signal 9 (SIGKILL)")]  # twice, the second time in a fresh process
    assert found[47] == []
    guilty = {13, 24, 36, 58}
    assert [r for r in results if r.number not in guilty] == [r for r in whole[1] if r.number not in guilty]


def test_a_lost_device_is_reset_and_the_variant_tried_again(tmp_path, knobs, whole):
    where = folder(tmp_path / "c")
    mark, broken = tmp_path / "mark", tmp_path / "broken"
    knobs(lose_the_device=[13], mark=str(mark), broken=str(broken))
    code = f"from pathlib import Path; Path({str(broken)!r}).unlink(); Path({str(mark)!r}).touch()"
    assert ran(where, reset_command=[sys.executable, "-c", code]) is Outcome.COMPLETE
    variants, results = outcomes(where)
    assert variants[:13] == whole[0][:13]
    (flaky,) = next(r for r in results if r.number == 13).findings
    assert flaky.explanation == "device lost: no answer; not again in a fresh process"
    assert [r for r in results if r.number != 13] == [r for r in whole[1] if r.number != 13]


def test_a_reset_that_fails_keeps_what_was_run(tmp_path, knobs, whole):
    where = folder(tmp_path / "c")
    broken = tmp_path / "broken"
    knobs(lose_the_device=[150], mark=str(tmp_path / "mark"), broken=str(broken))
    with pytest.raises(PlatformError, match="exit status 4") as caught:
        Engine(where, entry=ENTRY, reset_command=[sys.executable, "-c", "exit(4)"]).run()
    assert caught.value.slug == "reset-failed"
    assert n_settled(where) >= 100
    broken.unlink()
    knobs()
    assert ran(where) is Outcome.COMPLETE
    assert outcomes(where) == whole


def test_several_targets_and_the_rest_of_a_variant(tmp_path, knobs):
    knobs(crash=[13])
    where = folder(tmp_path / "c", targets=("cpu", "cpu[threads=1]"), n=60)
    assert ran(where) is Outcome.COMPLETE
    _, results = outcomes(where)
    assert [(r.target, r.status) for r in results if r.number == 13] == [(0, "finding"), (1, "finding")]
    assert [(r.number, r.target) for r in results if r.status == "finding"] == [
        (0, 0), (1, 1), (13, 0), (13, 1), (25, 0), (26, 1), (50, 0), (51, 1),
    ]  # fmt: skip
    assert list(open_chunks({3: 1, 4: 2}, 6, Shard(), 2)) == [Chunk(0, 3), Chunk(3, 4, 1), Chunk(5, 6)]


COMMAND = """
import sys
from pathlib import Path
from shadowrun.studies.campaign.engine import Engine
from shadowrun.studies.campaign.campaign_folder import CampaignFolder
print(Engine(CampaignFolder.open(Path(sys.argv[1])), jobs=2, entry=sys.argv[2]).run().name)
"""


def test_killed_it_goes_on_and_says_the_same(new_processes, tmp_path, knobs, whole):
    """SIGKILL of a worker, then of all of it; nothing is lost but what was in hand, and nothing is there twice."""
    knobs(hang=[60, 160])  # or a busy machine would run all of it before it looks
    where = folder(tmp_path / "c")
    command = [sys.executable, "-c", COMMAND, str(where.path), ENTRY]
    main = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    wait_for(where, 30, main)
    workers = children(main.pid)
    os.kill(workers[0], signal.SIGKILL)
    wait_for(where, 90, main)
    os.kill(main.pid, signal.SIGKILL)
    main.wait()
    first = n_settled(where)
    assert 90 <= first < 320
    deadline = time.monotonic() + 20
    while any(Path(f"/proc/{pid}").exists() for pid in workers):
        assert time.monotonic() < deadline, "a worker lives on"
        time.sleep(0.05)
    knobs()
    assert ran(where, jobs=2) is Outcome.COMPLETE
    assert outcomes(where) == whole
    with contextlib.closing(CampaignStore.open(where.combined)) as store:
        ((event,), sessions) = store.events(), store.sessions()
    assert event.explanation == "signal 9 (SIGKILL)"
    assert sessions[1][2] == 350 - first


def test_ctrl_c_stops_it_and_it_goes_on(new_processes, tmp_path, knobs, whole, interrupts):
    knobs(hang=[60, 160])
    where = folder(tmp_path / "c")
    main = subprocess.Popen([sys.executable, "-c", COMMAND, str(where.path), ENTRY], stdout=subprocess.PIPE, text=True)
    wait_for(where, 30, main)
    workers = children(main.pid)
    main.send_signal(signal.SIGINT)
    assert main.communicate(timeout=60)[0] == "STOPPED\n"
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)
    first = n_settled(where)
    assert 30 <= first < 350
    knobs()
    assert ran(where, jobs=2) is Outcome.COMPLETE
    assert outcomes(where) == whole
    with contextlib.closing(CampaignStore.open(where.combined)) as store:
        assert [s[2] for s in store.sessions()] == [first, 350 - first]


def test_ctrl_c_amid_a_transaction(tmp_path, monkeypatch, knobs, whole, interrupts):
    knobs(hang=[200])
    where, seen = folder(tmp_path / "c"), []
    add = CampaignStore.add_result

    def interrupted(self, row, recipe=None):
        seen.append(row.number)
        if row.number == 40:
            signal.raise_signal(signal.SIGINT)
        return add(self, row, recipe)

    monkeypatch.setattr(CampaignStore, "add_result", interrupted)
    assert Engine(where, entry=ENTRY).run() is Outcome.STOPPED
    monkeypatch.setattr(CampaignStore, "add_result", add)
    knobs()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    first = n_settled(where)
    assert 40 < first < 350
    assert len(seen) == len(set(seen))  # each row was written once
    assert ran(where) is Outcome.COMPLETE
    assert outcomes(where) == whole
    with contextlib.closing(CampaignStore.open(where.combined)) as store:
        assert [s[2] for s in store.sessions()] == [first, 350 - first]


def wait_for(where, n, main):
    deadline = time.monotonic() + 60
    while n_settled(where) < n:
        assert main.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def n_settled(where):
    with contextlib.suppress(DataFileError), contextlib.closing(CampaignStore.open(where.shard(Shard()))) as store:
        return sum(1 for _ in store.settled_targets())
    return 0


def children(pid):
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_two_processes_on_one_shard(tmp_path):
    where = folder(tmp_path / "c")
    store = CampaignStore.begin(where.shard(Shard()), where.info())
    with pytest.raises(DataFileError, match="another process") as caught:
        Engine(where, entry=ENTRY).run()
    assert caught.value.slug == "campaign-store"
    store.close()


def test_time_is_over_and_no_number_of_variants(tmp_path, knobs):
    knobs(seconds=0.002)
    where = folder(tmp_path / "c", n=0)
    seen = []
    assert ran(where, minutes=0.06, on_progress=seen.append) is Outcome.TIME
    variants, _ = outcomes(where)
    assert [v.number for v in variants] == list(range(len(variants)))
    assert seen[-1].n is None
    assert seen[-1].n_done == seen[-1].n_now > 0


def test_a_full_disk_ends_it_and_it_goes_on_later(tmp_path, monkeypatch, whole):
    where = folder(tmp_path / "c")
    begin = CampaignStore.begin.__func__

    def small(cls, path, info):
        store = begin(cls, path, info)
        ((n_pages,),) = store._connection.execute("pragma page_count")
        store._connection.execute(f"pragma max_page_count = {n_pages + 3}")
        return store

    monkeypatch.setattr(CampaignStore, "begin", classmethod(small))
    with pytest.raises(DataFileError, match="cannot be written any more"):
        Engine(where, entry=ENTRY).run()
    monkeypatch.undo()
    assert 0 < n_settled(where) < 350
    assert ran(where) is Outcome.COMPLETE
    assert outcomes(where) == whole


class Unreliable:
    """Threads that lose the first try of each chunk, and see no folder."""

    def __init__(self, job_changes):
        self.threads, self.lost, self.changes = concurrent.futures.ThreadPoolExecutor(2), set(), job_changes

    def submit(self, function, job, *args):
        def run():
            if args[:2] not in self.lost:
                self.lost.add(args[:2])
                raise ConnectionResetError("the machine is gone")
            return function(job | {"settings": job["settings"] | self.changes}, *args)

        return self.threads.submit(run)


def test_an_executor_whose_machines_go_away_and_do_not_see_the_folder(tmp_path, whole):
    where = folder(tmp_path / "c")
    executor = Unreliable({"programs": "/nowhere/programs"})
    assert ran(where, executor, jobs=2) is Outcome.COMPLETE
    assert outcomes(where) == whole
    assert len(executor.lost) == 350 // CHUNK + 1


def test_an_executor_that_never_answers(tmp_path):
    class Broken:
        def submit(self, function, *args):
            future = concurrent.futures.Future()
            future.set_exception(ConnectionResetError())
            return future

    where = folder(tmp_path / "c")
    assert ran(where, Broken()) is Outcome.INCOMPLETE
    assert outcomes(where) == ([], [])


def test_programs_that_were_changed(tmp_path):
    where = folder(tmp_path / "c")
    where.programs.write_bytes(b"others")
    with pytest.raises(DataFileError, match="was changed") as caught:
        Engine(where, entry=ENTRY).run()
    assert caught.value.slug == "campaign-other"
