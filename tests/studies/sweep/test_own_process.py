"""Cases on a platform in a separate process: the process serves all cases, and its death is a result."""

import os
import signal

import pytest
import torch

import shadowrun
from shadowrun.platforms.worker.client import WorkerDied
from shadowrun.studies.sweep import opinfo
from shadowrun.studies.sweep.case_programs import program
from shadowrun.studies.sweep.cases import Kind, Part
from tests.studies.sweep.test_run_case import Bench, X

pytestmark = pytest.mark.usefixtures("forked_processes", "clean_sim")

OWN = "cpu[env:SHADOWRUN_TEST=1]"
"""A platform in a separate process."""


def struck(worker, number, limit_s=60.0):
    """A function whose comparison meets a process that has got a signal."""

    def call(x):
        if shadowrun.current() is not None:
            worker.limit_s = limit_s
            os.kill(worker.pid, number)
        return torch.exp(x)

    return call


def test_the_process_of_a_platform_lives_through_all_cases():
    bench = Bench(OWN)
    pid = bench.runner._target.remote.pid
    assert bench.call(torch.exp, X) == []
    assert bench.entry("cosh", Part.BACKWARD) == []
    assert bench.call(torch.cosh, X, part=Part.TAIL) is not None
    assert bench.runner._target.remote.pid == pid != 0


STRUCK = [
    (signal.SIGSEGV, 60.0, Kind.CRASH),
    (signal.SIGKILL, 60.0, Kind.OUT_OF_MEMORY),
    (signal.SIGSTOP, 0.5, Kind.TIMEOUT),
]


@pytest.mark.parametrize(("number", "limit_s", "kind"), STRUCK)
def test_what_becomes_of_a_targets_process_is_the_cases_result(number, limit_s, kind):
    bench = Bench(OWN)
    worker = bench.runner._target.remote
    (found,) = bench.call(struck(worker, number, limit_s), X)
    assert (found.kind, found.op) == (kind, "aten::exp")
    worker.limit_s = 60.0
    assert bench.call(torch.exp, X) == []


def test_what_becomes_of_the_references_process_is_not_counted():
    bench = Bench("sim", OWN)
    assert [f.kind for f in bench.call(struck(bench.runner._ref.remote, signal.SIGSEGV), X)] == [Kind.HARNESS]
    assert bench.call(torch.exp, X) == []


def test_an_operator_that_cost_three_processes_is_not_tried():
    bench = Bench(OWN)
    bench.runner._target.remote._deaths["aten::exp"] = 3
    assert [f.kind for f in bench.call(torch.exp, X)] == [Kind.UNVERIFIED]


def test_flaws_against_a_reference_with_its_own_process(clean_sim):
    clean_sim.enable(flaws=["softmax-error"])
    bench = Bench("sim", "cpu[isa=default]")
    assert [f.kind for f in bench.entry("softmax", Part.FORWARD)] == [Kind.MISMATCH]
    assert bench.entry("exp", Part.FORWARD) == []  # as a whole too: it was rounded differently


@pytest.mark.parametrize("platforms", [(OWN, "cpu"), ("cpu", OWN)])
def test_invalid_input_there(platforms, monkeypatch):
    bench = Bench(*platforms)
    samples = opinfo.invalid("gather", 0, None)
    for number, sample in enumerate(samples):
        case = program(opinfo.database()["gather"], Part.INVALID, number, sample)
        assert bench.run(Part.INVALID, case) == []
    case = program(opinfo.database()["gather"], Part.INVALID, 0, samples[0])

    def found(outcome):
        def run(*_):
            if isinstance(outcome, Exception):
                raise outcome

        refusals = next(r for r in bench.runner._error_catchers if r._platform.remote is not None)
        monkeypatch.setattr(refusals._executor, "run_mirrored", run)
        return [f.kind for f in bench.run(Part.INVALID, case)]

    accepts, died = found(None), found(WorkerDied("worker died: signal 11 (SIGSEGV)"))
    if platforms[0] == OWN:
        assert (accepts, died) == ([Kind.MISSING_ERROR], [Kind.CRASH])
    else:
        assert (accepts, died) == ([Kind.HARNESS], [Kind.HARNESS])
    assert found(TypeError("other")) == [Kind.WRONG_ERROR]

    def refuses(_):
        raise ValueError("no")

    assert [f.kind for f in bench.call(refuses, X, part=Part.INVALID)] == [Kind.UNVERIFIED]
