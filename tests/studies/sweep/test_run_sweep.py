"""Whole sweeps in worker processes: what is found, what is isolated, and what a second start makes of a first."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import shadowrun
from shadowrun.errors import PlatformError
from shadowrun.sim import CATALOGUE, FATAL
from shadowrun.studies.isolation import process
from shadowrun.studies.isolation.pool import Limits
from shadowrun.studies.sweep import recorded_calls, worker
from shadowrun.studies.sweep.cases import FAILURES, Kind, Part, Support, Task
from shadowrun.studies.sweep.coverage_file import CoverageFile
from shadowrun.studies.sweep.inputs import leaves
from shadowrun.studies.sweep.reports.support import SupportTable
from shadowrun.studies.sweep.run_sweep import Plan, SweepRequest, plan, sweep

LIMITS = Limits(300.0, 4 << 30)
"""So much that no machine is too slow for a case that ends."""


def swept(path, limits=LIMITS, jobs=2, **wish):
    """Sweep into a file; gives the table, and whether all was run."""
    wanted = SweepRequest("sim", **wish)
    complete = sweep(
        wanted, plan(wanted), path, jobs=jobs, limits=limits, on_result=lambda *_: None, on_task=lambda _: None
    )
    return table_of(path), complete


def table_of(path):
    file = CoverageFile.open(path)
    table = SupportTable.from_results(file.results())
    file.close()
    return table


def blamed(table):
    """Kinds of failures and what is blamed, by operator."""
    return {
        operator.name: {(f.finding.kind, f.finding.kernel or f.finding.op) for f in operator.failing}
        for operator in table.operators
        if operator.failing
    }


FLAWS = (
    *("missing-cumsum", "softmax-error", "argmax-int32", "topk-device-error", "vector-norm-falls-back"),
    "erfinv-crashes",
)
OPS = (
    *("cumsum", "softmax", "argmax", "topk", "linalg.vector_norm", "erfinv"),
    *("sin", "jiterator_unary", "bernoulli"),
)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """A sweep of operators with flaws, without, that no CPU can run, and that are random."""
    path = tmp_path_factory.mktemp("mixed") / "x.shadowcov"
    table, complete = swept(path, jobs=1, ops=OPS, parts=(Part.FORWARD,), samples=1, flaws=FLAWS)
    assert complete
    return path, table


def test_each_flaw_is_found_at_its_operator_and_nothing_else_is_blamed(mixed):
    _, table = mixed
    assert blamed(table) == {
        "cumsum": {(Kind.UNSUPPORTED, "aten::cumsum.out")},
        "softmax": {(Kind.MISMATCH, "aten::_softmax")},
        "argmax": {(Kind.FORM, "aten::argmax")},
        "topk": {(Kind.ERROR, "aten::topk")},
        "linalg.vector_norm": {(Kind.WARNED_FALLBACK, "aten::linalg_vector_norm")},
        "erfinv": {(Kind.CRASH, "")},
    }


def test_a_crash_is_a_result(mixed):
    _, table = mixed
    (crash,) = next(o for o in table.operators if o.name == "erfinv").failing
    assert crash.inputs == "f32[20, 20]"
    assert "SIGSEGV" in crash.finding.explanation


def test_classes_of_operators(mixed):
    _, table = mixed
    support = {operator.name: operator.support for operator in table.operators}
    assert support["sin"] is Support.FULL
    assert support["cumsum"] is Support.NONE
    assert support["topk"] is Support.NONE
    assert support["jiterator_unary"] is Support.UNTESTED
    assert support["bernoulli"] is Support.UNTESTED


def test_harness_errors_are_not_counted(mixed):
    _, table = mixed
    (operator,) = (o for o in table.operators if o.name == "jiterator_unary")
    assert operator.counts[Kind.HARNESS] > 0
    assert operator.failing == ()


def test_the_file_says_what_the_sweep_was(mixed):
    path, _ = mixed
    file = CoverageFile.open(path)
    assert file.info.target == f"sim ({', '.join(FLAWS)})"
    assert file.info.ref == "cpu"
    assert file.info.complete
    assert file.info.versions["torch"] == torch.__version__
    assert file.info.cpu_s > 0
    failing = [outcome for _, outcome in file.results() if outcome.kind in FAILURES]
    assert failing
    assert all(outcome.inputs for outcome in failing)


def test_a_second_start_runs_nothing_again(mixed):
    path, table = mixed
    before = path.stat().st_mtime_ns, CoverageFile.open(path).info.cpu_s
    wanted = SweepRequest("sim", ops=OPS, parts=(Part.FORWARD,), samples=1, flaws=FLAWS)
    started = []
    assert sweep(wanted, plan(wanted), path, jobs=2, limits=LIMITS, on_result=started.append, on_task=lambda _: None)
    assert started == []
    assert table_of(path) == table
    assert CoverageFile.open(path).info.cpu_s - before[1] < 60  # of this process only: no worker was started


@pytest.mark.slow
def test_a_case_that_takes_all_memory_is_a_result(tmp_path):
    limits = Limits(300.0, 300 << 20)
    table, complete = swept(
        tmp_path / "x", limits, jobs=1, ops=("i0", "sin"), parts=(Part.FORWARD,), samples=1, flaws=("i0-hogs-memory",)
    )
    assert complete
    hog, sin = table.operators
    assert sin.support is Support.FULL
    assert [f.finding.kind for f in hog.failing] == [Kind.OUT_OF_MEMORY]


@pytest.mark.slow
def test_hangs_are_results_and_do_not_go_on_for_ever(tmp_path):
    """Each sample of the operator hangs: after three the rest of the part is left out, and said to be."""
    limits = Limits(20.0, 4 << 30)
    table, complete = swept(
        tmp_path / "x", limits, jobs=1, ops=("digamma", "sin"), parts=(Part.FORWARD, Part.STRIDED), samples=9,
        flaws=("digamma-hangs",),
    )  # fmt: skip
    assert complete
    digamma, sin = table.operators
    assert sin.support is Support.FULL
    assert digamma.support is Support.NONE
    assert digamma.counts[Kind.TIMEOUT] <= 6
    assert {f.finding.kind for f in digamma.failing} == {Kind.TIMEOUT}
    assert digamma.counts.get(Kind.UNVERIFIED, 0) <= 2


@pytest.mark.slow
def test_killed_it_goes_on_and_ends_with_the_same_table(tmp_path):
    """The sweep is killed with SIGKILL half way; its workers end too; the next start makes the table of a whole one."""
    argv = [
        *("sweep", "--flaws", "missing-cumsum,softmax-error,erfinv-crashes", "--samples", "3", "--jobs", "1"),
        *("--ops", "cumsum,softmax*,sin,cos,tan,erfinv,log_softmax*,add,mul,sub", "--parts", "forward,inplace,out"),
    ]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    command = [sys.executable, "-m", "shadowrun", *argv, "--file"]
    subprocess.run([*command, str(whole)], cwd=tmp_path, check=False, stdout=subprocess.DEVNULL, timeout=600)
    driver = subprocess.Popen([*command, str(killed)], cwd=tmp_path, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while n_results(killed) == 0:
        assert driver.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    workers = children(driver.pid)
    os.kill(driver.pid, signal.SIGKILL)
    driver.wait()
    part = n_results(killed)
    deadline = time.monotonic() + 120
    while any(map(is_running, workers)):
        assert time.monotonic() < deadline, "its workers live on"
        time.sleep(0.1)
    assert part < n_results(whole), "it was killed too late to show anything"
    assert not CoverageFile.open(killed).info.complete
    subprocess.run([*command, str(killed)], cwd=tmp_path, check=False, stdout=subprocess.DEVNULL, timeout=600)
    assert table_of(killed) == table_of(whole)
    assert CoverageFile.open(killed).info.complete
    assert blamed(table_of(killed))["erfinv"] == {(Kind.CRASH, "")}


def n_results(path):
    with contextlib.suppress(Exception):
        file = CoverageFile.open(path)
        try:
            return sum(1 for _ in file.results())
        finally:
            file.close()
    return 0


def children(pid):
    try:
        return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_only_what_a_run_called(tmp_path):
    """`--from`: the operators of a recorded run, with its shapes; the flaw of one of them is found."""
    run = tmp_path / "run.shadowrun"
    with shadowrun.compare("cpu[threads=1]", file=run):
        x = torch.randn(4, 6)
        torch.nn.functional.gelu(x @ x.t())
        torch.nn.functional.embedding(torch.tensor([0, 1]), x).add_(1)
    table, complete = swept(tmp_path / "x", jobs=1, source=run, flaws=("gelu-by-tanh",))
    assert complete
    names = {operator.name for operator in table.operators}
    assert {"aten::mm", "aten::gelu", "aten::embedding", "aten::add_.Tensor"} <= names
    assert blamed(table) == {"aten::gelu": {(Kind.MISMATCH, "aten::gelu")}}
    (gelu,) = (o for o in table.operators if o.failing)
    assert gelu.failing[0].inputs.endswith("f32[4, 4]")


def calls_swept(path, texts, limits=LIMITS):
    """Sweep calls of one operator; gives kind and explanation of each case by its number."""
    calls = {("aten::logical_not", "bool"): texts}
    planned = Plan((Task(*next(iter(calls)), (Part.FORWARD,)),), calls)
    wanted = SweepRequest("sim", flaws=())
    assert sweep(wanted, planned, path, jobs=1, limits=limits, on_result=lambda *_: None, on_task=lambda _: None)
    file = CoverageFile.open(path)
    found = {case.sample: (o.kind, *(f.explanation for f in o.findings)) for case, o in file.results()}
    file.close()
    return found


def test_a_call_whose_inputs_take_all_memory_costs_no_other_call(tmp_path):
    """Inputs of all calls were made before the first ran: three processes ended, and the operator had no result."""
    texts = ["b8[2]", "b8[400000000]", "b8[3]", "b8[nothing]"]
    found = calls_swept(tmp_path / "x", texts, Limits(300.0, 600 << 20))
    ended = (Kind.HARNESS, "on the reference: out of memory, more than 0.586 GiB")
    assert found == {0: (Kind.PASS,), 1: ended, 2: (Kind.PASS,), 3: (Kind.HARNESS, "not readable")}
    assert calls_swept(tmp_path / "x", texts) == found


def test_inputs_of_one_call_exist_at_a_time(monkeypatch, clean_sim):
    made, at_once = [], []
    sample = recorded_calls.sample

    def noted(*args):
        at_once.append(sum(t() is not None for t in made))
        new = sample(*args)
        made.extend(map(weakref.ref, leaves(new.args)))
        return new

    monkeypatch.setattr(recorded_calls, "sample", noted)
    channel = SimpleNamespace(step=Mock(), send=Mock())
    settings = {"target": "sim", "ref": "cpu", "flaws": None, "database": False, "seed": 0, "samples": None}
    run = worker.start(settings | {"threads": torch.get_num_threads(), "call_limit_s": 60.0}, channel)
    task = {"operator": "aten::logical_not", "dtype": "bool", "parts": ["forward"], "done": [["forward", 1]]}
    run(task | {"calls": ["b8[2]", "b8[3]", "b8[4]", "b8[5]"]})
    cases = [line["case"][:2] for ((line,), _) in channel.send.call_args_list if "case" in line]
    assert cases == [["forward", 0], ["forward", 2], ["forward", 3]]
    assert at_once == [0, 0, 0]


def test_flaws_that_end_the_process_are_in_no_list():
    assert not FATAL.keys() & CATALOGUE.keys()
    assert json.dumps(sorted(FATAL))


def test_a_system_that_gives_no_processes(tmp_path, monkeypatch):
    """Windows: its child processes inherit no pipes."""
    monkeypatch.setattr(process, "_HAS_PIPES", False)
    with pytest.raises(PlatformError, match="only Linux and macOS") as caught:
        swept(tmp_path / "x.shadowcov", ops=("sin",))
    assert caught.value.slug == "no-worker"
    assert list(tmp_path.iterdir()) == []
