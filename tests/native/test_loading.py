"""Whether the C extension is used: what switches it off, how that is reported, and the same results without."""

import importlib
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from shadowrun import native
from shadowrun.platforms.fingerprint import versions

ROOT = Path(__file__).parents[2]
RUN = """
import dataclasses, sys, torch
import shadowrun
from shadowrun import native
from shadowrun import sim
from tests.models import digits, tokens

torch.set_num_threads(1)
sim.enable("sim")
records, errors = [], []
for make in (digits, tokens):
    for target, flaws in (("cpu[mkldnn=off]", ()), ("sim", sim.PRESETS["low-precision"])):
        torch.manual_seed(0)
        with sim.flaws(*flaws):
            model, optimizer, loss = make("sim" if target == "sim" else "cpu")
            with shadowrun.compare(target, ref="cpu", drift=target == "sim") as run:
                for _ in range(2):
                    optimizer.zero_grad()
                    loss().backward()
                    optimizer.step()
                    run.step()
        for r in run.records():
            rest = tuple(dataclasses.replace(diff, rmse=0) for diff in r.diffs)
            records.append((r.call, r.verdict, rest, r.missing_kernel, r.drift_abs, r.drift_rel))
            errors += [diff.rmse for diff in r.diffs]
print(native.state(), *errors, sep="\\n", file=sys.stderr)
print(*records, sep="\\n")
"""
RMSE = r"(?<=rmse=)[^,]+"


def run(value):
    """The state, the root mean square errors, and all else of the records."""
    env = {name: text for name, text in os.environ.items() if name != "SHADOWRUN_NATIVE"}
    env |= {"SHADOWRUN_NATIVE": value} if value else {}
    command = [sys.executable, "-W", "ignore", "-c", RUN]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    lines = done.stderr.splitlines()
    start = next(i for i, line in enumerate(lines) if re.match(r"on$|off \(", line))
    return lines[start], [float(line) for line in lines[start + 1 :]], done.stdout.splitlines()


@pytest.mark.skipif(native.core is None, reason="there is no compiled part to compare with")
def test_a_comparison_finds_the_same_with_and_without():
    """All but the last digits of root mean square errors: C adds float64 squares, Python a chunk's in float32."""
    state, errors, rows = run("")
    without, errors_without, rows_without = run("0")
    assert (state, without) == ("on", "off (SHADOWRUN_NATIVE=0)")
    assert len(rows) > 1000
    assert sum("MISMATCH" in row for row in rows) > 50
    assert rows == rows_without
    assert len(errors) > 50
    assert errors == pytest.approx(errors_without, rel=1e-5)


@pytest.fixture
def load(monkeypatch):
    """What `native` decides of a build, whatever there is and whatever these tests were started with."""
    monkeypatch.delenv("SHADOWRUN_NATIVE", raising=False)

    def decide(found):
        def import_module(name):
            assert name == "shadowrun.native._core"
            if isinstance(found, Exception):
                raise found
            return found

        monkeypatch.setattr(importlib, "import_module", import_module)
        core, why_not = native._load()
        assert core is (None if why_not else found)
        return why_not

    return decide


BUILT = types.SimpleNamespace(VERSION=native._VERSION)


@pytest.mark.parametrize("value", [None, "", "1"])
def test_used_where_it_is_built(load, monkeypatch, value):
    if value is not None:
        monkeypatch.setenv("SHADOWRUN_NATIVE", value)
    assert load(BUILT) == ""


def test_off_by_a_variable(load, monkeypatch):
    monkeypatch.setenv("SHADOWRUN_NATIVE", "0")
    assert load(BUILT) == "SHADOWRUN_NATIVE=0"


def test_not_built(load):
    assert load(ModuleNotFoundError("No module named 'shadowrun.native._core'")) == "not built"


def test_built_for_another_version_of_the_package(load):
    assert "another version of shadowrun (0, not" in load(types.SimpleNamespace(VERSION=0))


def test_a_build_that_does_not_load_is_told_without_its_folder(load):
    error = ImportError("/home/somebody/_core.cpython-311-x86_64-linux-gnu.so: undefined symbol: PyFoo")
    assert load(error) == "does not load: _core.cpython-311-x86_64-linux-gnu.so: undefined symbol: PyFoo"
    assert load(SystemError("bad slot")) == "does not load: bad slot"


@pytest.mark.parametrize("enabled", [True, False])
def test_not_loaded_where_python_runs_without_its_lock(load, monkeypatch, enabled):
    """Python would switch its lock on for the whole program, with a warning."""
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: enabled, raising=False)
    assert load(BUILT) == ("" if enabled else "this Python runs without its global lock")


def test_versions_tell_whether_it_is_in_use(monkeypatch):
    for why_not, state in (("", "on"), ("not built", "off (not built)")):
        monkeypatch.setattr(native, "why_not", why_not)
        assert versions()["native"] == state
