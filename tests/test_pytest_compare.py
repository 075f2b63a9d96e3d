"""`pytest --shadowrun TARGET` and the marker, in test suites that pytester writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

import shadowrun

# Now: what pytester imports in this process, it forgets, and a second copy of `running` would know of no comparison.
import shadowrun.comparison.record
import shadowrun.pytest_compare
import shadowrun.report.run_report
from shadowrun import sim

pytest_plugins = "pytester"

PLUGIN = ("-p", "shadowrun.pytest_plugin", "-p", "no:cacheprovider")
SUITE = """
import pytest, torch, unittest

def lerp(n=2):
    return torch.lerp(torch.ones(n), torch.ones(n), 0.5).sum()

def test_matches():
    assert torch.ones(2).sum() == 2

def test_passes_alone():
    assert lerp() == 2

def test_fails_alone():
    assert lerp() == 3

@pytest.mark.xfail(strict=True)
def test_expected_to_fail():
    assert lerp() == 3

def test_skips():
    pytest.skip("not here")

@pytest.mark.shadowrun(allow=["lerp"])
def test_allowed():
    lerp()

@pytest.mark.shadowrun(skip="its kernels are wrong on purpose")
def test_not_compared():
    lerp()

@pytest.mark.parametrize("n", [3, 4])
def test_same_line(n):
    lerp(n)

def test_no_operator():
    pass

class TestOfUnittest(unittest.TestCase):
    def test_method(self):
        lerp()
"""


@pytest.fixture(autouse=True)
def session(monkeypatch):
    """A session of its own: these tests may run under xdist, and the simulated device has no flaw for others."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)
    with sim.flaws("missing-lerp", "matmul-in-bf16"):
        yield


@pytest.fixture
def suite(pytester):
    """Writes tests, and runs them in this process."""

    def run(text, *options):
        pytester.makepyfile(test_suite=text)
        return pytester.runpytest_inprocess(*PLUGIN, *options)

    return run


def properties(path):
    return {
        case.get("name"): [(p.get("name"), p.get("value")) for p in case.iter("property")]
        for case in ET.parse(path).iter("testcase")
    }


def test_findings_fail_the_tests_that_have_them(suite, pytester):
    result = suite(SUITE, "--shadowrun", "sim", "--junitxml", "j.xml", "-rA")
    result.assert_outcomes(passed=4, failed=5, xfailed=1, skipped=1)
    said = result.stdout.str()
    line = (
        "shadowrun: unsupported of aten::lerp.Scalar (no kernel for this operator) at test_suite.py:4 in lerp, 1 call"
    )
    assert said.count(f"\n{line}\n") == 5
    assert "assert tensor(2.) == 3" in said, "the test's own failure stays"
    result.stdout.fnmatch_lines([
        "shadowrun: sim against cpu; a test fails on unsupported, error, mismatch",
        "*- shadowrun -*",
        "*= shadowrun =*",
        "* operator calls in 8 of 10 tests compared, findings: 2",
        "unsupported of aten::lerp.Scalar (no kernel for this operator) at test_suite.py:4 in lerp*and 5 more[]]",
        "FAILED test_suite.py::test_passes_alone - Failed: shadowrun: unsupported of *",
    ])  # fmt: skip
    found = properties(pytester.path / "j.xml")
    ((name, n),) = found["test_matches"]
    assert name == "shadowrun_calls"
    assert int(n) > 0
    assert found["test_passes_alone"][1][0] == "shadowrun_finding"
    assert found["test_allowed"][1][1].endswith("allowed by the marker")
    assert found["test_not_compared"] == []
    run = shadowrun.load(pytester.path / ".shadowrun", known=False)
    assert [f.n_calls for f in run.findings()] == [7]
    assert len(run.steps()) == 10, "a compared test is a step"
    assert run.captured()


def test_nothing_fails_where_nothing_is_asked_for(suite, pytester):
    result = suite(SUITE, "--junitxml", "j.xml")
    result.assert_outcomes(passed=8, failed=1, xfailed=1, skipped=1)
    assert "shadowrun" not in result.stdout.str().replace("shadowrun.pytest_plugin", "").replace("shadowrun-", "")
    assert not any(properties(pytester.path / "j.xml").values())
    assert sorted(p.name for p in pytester.path.iterdir() if "shadow" in p.name) == []
    suite(SUITE, "--shadowrun", "sim", "--shadowrun-fail-on", "none").assert_outcomes(
        passed=8, failed=1, xfailed=1, skipped=1
    )


def test_a_suite_without_torch_imports_none(pytester):
    pytester.makepyfile(
        "import sys\ndef test_it():\n    assert not {'torch', 'shadowrun.pytest_compare'} & set(sys.modules)"
    )
    done = pytester.runpytest_subprocess(*PLUGIN, "--strict-markers")
    done.assert_outcomes(passed=1)


MARKED = """
import pytest, torch

@pytest.mark.shadowrun("sim")
def test_on_sim():
    torch.lerp(torch.ones(2), torch.ones(2), 0.5)

@pytest.mark.shadowrun("sim", ops="aten::add*")
def test_of_adds():
    torch.lerp(torch.ones(2), torch.ones(2), 0.5) + 1

@pytest.mark.shadowrun("cpu[threads=1]", fail_on="mismatch")
class TestThreads:
    @pytest.mark.shadowrun("sim")
    def test_the_closest_marker_decides(self):
        torch.lerp(torch.ones(2), torch.ones(2), 0.5)

    def test_one_thread(self, shadowrun_run):
        torch.ones(2) + 1
        assert shadowrun_run.info.target == "cpu[threads=1]"

def test_unmarked():
    torch.lerp(torch.ones(2), torch.ones(2), 0.5)

def test_fixture(shadowrun_run):
    pass

@pytest.mark.shadowrun("sim", opz="aten::add*")
def test_wrong_option():
    pass

@pytest.mark.shadowrun("npu:7")
def test_no_such_device():
    pass
"""


def test_a_marker_needs_no_option(suite, pytester):
    result = suite(MARKED, "--strict-markers")
    result.assert_outcomes(passed=4, failed=3, skipped=1)
    result.stdout.fnmatch_lines([
        "*marker shadowrun: compare() has no option 'opz'. Did you mean 'ops'?*",
        "*marker shadowrun: *npu:7*",
        "FAILED test_suite.py::test_on_sim - Failed: shadowrun: unsupported of aten::l*",
    ])  # fmt: skip
    assert not (pytester.path / ".shadowrun").exists()


NESTED = """
import pytest, torch, shadowrun

def test_compares_itself():
    torch.lerp(torch.ones(2), torch.ones(2), 0.5)
    with shadowrun.compare("cpu[threads=1]") as run:
        torch.lerp(torch.ones(2), torch.ones(2), 0.5)
    assert run.counts()["match"]
    assert not run.findings()

def test_records_itself(tmp_path):
    with shadowrun.record(tmp_path / "x.shadowrec"):
        torch.lerp(torch.ones(2), torch.ones(2), 0.5)

def test_goes_on():
    torch.lerp(torch.ones(2), torch.ones(2), 0.5)

def test_two_of_its_own():
    with shadowrun.compare("cpu"):
        with pytest.raises(shadowrun.NestingError):
            shadowrun.compare("cpu").start()
"""


def test_a_test_that_compares_goes_before_the_session(suite, pytester):
    result = suite(NESTED, "--shadowrun", "sim")
    result.assert_outcomes(passed=2, failed=2)
    run = shadowrun.load(pytester.path / ".shadowrun", known=False)
    assert [f.n_calls for f in run.findings()] == [2], "before the test's own comparison, and in the third test"


def test_the_ledger_and_a_baseline(suite, pytester):
    text = "import torch\ndef test_it():\n    torch.lerp(torch.ones(2), torch.ones(2), 0.5)\n"
    suite(text, "--shadowrun", "sim").assert_outcomes(failed=1)
    options = ("--shadowrun", "sim", "--shadowrun-baseline", ".shadowrun", "--shadowrun-fail-on", "new")
    suite(text, *options).assert_outcomes(passed=1)
    more = f"{text}def test_more():\n    x = torch.ones(3, 3) / 3\n    x @ x\n"
    result = suite(more, *options, "--shadowrun-data", "second")
    result.assert_outcomes(passed=1, failed=1)
    assert "FAILED test_suite.py::test_more - Failed: shadowrun: mismatch of aten::mm" in result.stdout.str()
    (pytester.path / "shadowrun.toml").write_text(
        '[[known]]\noperator = "*"\nplatform = "sim"\nreason = "ticket 5"\n', encoding="utf-8"
    )
    result = suite(more, "--shadowrun", "sim")
    result.assert_outcomes(passed=2)
    assert "known issue: ticket 5" in result.stdout.str()


def test_reports_and_settings_of_the_session(suite, pytester):
    pytester.makeini(
        "[pytest]\nshadowrun_target = sim\nshadowrun_fail_on = mismatch\nshadowrun_report = r.json github:-\n"
    )
    result = suite(SUITE)
    result.assert_outcomes(passed=8, failed=1, xfailed=1, skipped=1)
    report = json.loads((pytester.path / "r.json").read_text("utf-8"))
    assert report["gate"]["fail_on"] == ["mismatch"]
    assert report["passed"]
    assert "::warning file=test_suite.py,line=4,title=aten%3A%3Alerp.Scalar" in result.stdout.str()


@pytest.mark.parametrize(("options", "message"), [
    (("--shadowrun", "nqu"), "nqu"),
    (("--shadowrun", "sim", "--shadowrun-fail-on", "mistakes"), "'mistakes' is no kind of finding"),
    (("--shadowrun", "sim", "--shadowrun-fail-on", "new"), "--shadowrun-baseline"),
    (("--shadowrun", "sim", "--shadowrun-report", "x.pdf"), "x.pdf"),
    (("--shadowrun", "sim", "--shadowrun-baseline", "none"), "none"),
    (("--shadowrun", "sim", "--shadowrun-import", "no_such_module"), "no_such_module"),
])  # fmt: skip
def test_wrong_options_are_refused_before_any_test(suite, options, message):
    result = suite("def test_it():\n    pass\n", *options)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert message in result.stderr.str() + result.stdout.str()
    assert "Traceback" not in result.stderr.str()


def test_a_session_that_compares_nothing_fails(suite):
    result = suite("def test_it():\n    pass\n", "--shadowrun", "sim")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert "no call could be compared" in result.stdout.str()
    assert suite("def test_it():\n    pass\n", "--shadowrun", "sim", "--shadowrun-fail-on", "none").ret == 0


def test_xdist(pytester):
    """In processes of their own, as users have it: the workers' findings come to the controller."""
    pytester.makepyfile(test_suite=SUITE)
    (pytester.path / ".shadowrun.gw7").write_bytes(b"of an earlier session")
    options = ("-n", "2", "--shadowrun", "sim", "--shadowrun-flaws", "missing-lerp", "--junitxml", "j.xml",
               "--shadowrun-report", "r.xml")  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", *PLUGIN, *options]
    done = subprocess.run(
        command, cwd=pytester.path, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "5 failed, 4 passed, 1 skipped, 1 xfailed" in done.stdout
    assert "operator calls in 8 of 10 tests compared, findings: 2" in done.stdout
    assert properties(pytester.path / "j.xml")["test_passes_alone"][1][0] == "shadowrun_finding"
    run = shadowrun.load(pytester.path / ".shadowrun", known=False)
    assert len(run.sources()) == 2
    assert [f.n_calls for f in run.findings()] == [7]
    assert "<failure" in (pytester.path / "r.xml").read_text("utf-8")
    assert {p.name for p in Path(pytester.path).glob(".shadowrun.gw?")} <= {".shadowrun.gw0", ".shadowrun.gw1"}


FIXTURES = """
import pytest, torch
from torch.utils._python_dispatch import TorchDispatchMode

def lerp():
    return torch.lerp(torch.ones(2), torch.ones(2), 0.5)

@pytest.fixture
def made():
    return lerp()

@pytest.fixture(scope="module")
def wider():
    lerp()
    yield
    lerp()

@pytest.fixture
def fails():
    lerp()
    raise ValueError("not here")

@pytest.fixture
def ends():
    yield
    lerp()

class Counting(TorchDispatchMode):
    n = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        Counting.n += 1
        return func(*args, **(kwargs or {}))

@pytest.fixture
def counting():
    with Counting():
        lerp()
        yield
        lerp()

def test_uses(made):
    torch.ones(2) + 1

def test_none():
    torch.ones(2) + 1

def test_first_of_wider(wider):
    pass

def test_second_of_wider(wider):
    torch.ones(2) + 1

def test_with_a_mode(counting):
    torch.ones(2) + 1

def test_the_mode_saw_its_own():
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as stack
    assert not [mode for mode in stack() if isinstance(mode, Counting)]
    assert Counting.n == 8, Counting.n

def test_cannot_be_set_up(fails):
    pass

def test_ends(ends):
    torch.ones(2) + 1
"""


def test_fixtures_are_compared_for_their_tests(suite, pytester):
    result = suite(FIXTURES, "--shadowrun", "sim", "--junitxml", "j.xml", "-rA")
    result.assert_outcomes(passed=4, failed=3, errors=2)
    said = result.stdout.str()
    for test, of in (("FAILED", "uses"), ("FAILED", "first_of_wider"), ("FAILED", "with_a_mode"), ("ERROR", "ends")):
        assert f"{test} test_suite.py::test_{of} - Failed: shadowrun: " in said, of
    assert "ERROR test_suite.py::test_cannot_be_set_up - ValueError: not here" in said
    found = properties(pytester.path / "j.xml")
    assert [name for name, _ in found["test_ends"]] == ["shadowrun_calls", "shadowrun_finding"]
    assert found["test_cannot_be_set_up"][1][1].startswith("unsupported of aten::lerp")
    assert found["test_none"] == [("shadowrun_calls", "2")]
    run = shadowrun.load(pytester.path / ".shadowrun", known=False)
    # The second half of `wider` and of `counting`: of the last test, and not compared.
    assert [f.n_calls for f in run.findings()] == [6]
    assert len(run.steps()) == 8, "a test is a step, with its fixtures"
