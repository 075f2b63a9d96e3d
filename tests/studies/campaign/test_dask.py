"""A real Dask cluster on this machine: its workers are killed, and each recipe ends in one outcome all the same."""

import contextlib
import os
import signal
import threading
import time

import pytest

from shadowrun.errors import UsageError
from shadowrun.studies.campaign.engine import Outcome
from shadowrun.studies.campaign.executors import executor_named
from tests.studies.campaign.test_engine import folder, knobs, outcomes, ran, whole

distributed = pytest.importorskip("distributed")
# Dask and tornado leave sockets of killed processes to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore")

__all__ = ["knobs", "whole"]


@contextlib.contextmanager
def cluster(n):
    with distributed.LocalCluster(
        n_workers=n, threads_per_worker=1, dashboard_address=None, silence_logs=50
    ) as started:
        yield started


def kill_some(started, killed, stop, n, every_s):
    """SIGKILL of one process of the cluster after another, while the campaign runs."""
    while len(killed) < n and not stop.wait(every_s):
        pids = [w.pid for w in started.workers.values() if w.pid and w.pid not in killed]
        if pids:
            os.kill(pids[len(killed) % len(pids)], signal.SIGKILL)
            killed.append(pids[len(killed) % len(pids)])


def through_dask(where, n_workers, n_kills, every_s):
    killed, stop = [], threading.Event()
    with cluster(n_workers) as started:
        name = "dask://" + started.scheduler_address.removeprefix("tcp://")
        killer = threading.Thread(target=kill_some, args=(started, killed, stop, n_kills, every_s))
        with executor_named(name, n_workers) as executor:
            killer.start()
            try:
                outcome = ran(where, executor, jobs=2 * n_workers)
            finally:
                stop.set()
                killer.join()
    return outcome, killed


def test_a_cluster_that_loses_a_process(tmp_path, knobs, whole):
    knobs(seconds=0.005)
    where = folder(tmp_path / "c")
    outcome, killed = through_dask(where, 2, 1, 1.0)
    assert outcome is Outcome.COMPLETE
    assert len(killed) == 1
    assert outcomes(where) == whole


@pytest.mark.slow
def test_a_cluster_that_loses_process_after_process(tmp_path, knobs):
    n = 3000
    alone = folder(tmp_path / "alone", n=n)
    assert ran(alone) is Outcome.COMPLETE
    knobs(seconds=0.02)
    where = folder(tmp_path / "c", n=n)
    began = time.monotonic()
    outcome, killed = through_dask(where, 4, 6, 3.0)
    assert outcome is Outcome.COMPLETE, time.monotonic() - began
    assert len(killed) == 6
    assert outcomes(where) == outcomes(alone)
    assert [v.number for v in outcomes(where)[0]] == list(range(n))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nowhere", "use dask://"),
        ("no_such_module:f", "ModuleNotFoundError"),
        ("os:getcwd", "has no method submit"),
        ("os:no_such_function", "AttributeError"),
    ],
)
def test_executors_that_are_none(name, words):
    with pytest.raises(UsageError, match=words) as caught, executor_named(name, 1):
        pass
    assert caught.value.slug == "campaign-executor"
