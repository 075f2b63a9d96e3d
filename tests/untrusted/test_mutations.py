"""Damaged or edited files end in a result, or in one line that says so; in all commands that read them.

A few of each kind in each run of the tests; ``pytest -m slow tests/untrusted`` takes 520.
"""

from __future__ import annotations

import re
import shutil
import sqlite3
import time
from pathlib import Path

import pytest

import shadowrun
from shadowrun.cli.main import main
from shadowrun.errors import ShadowrunError
from shadowrun.studies.slowdown.calls import read_mix
from shadowrun.studies.sweep.cases import Case, CaseFinding, CaseOutcome, Kind, Part
from shadowrun.studies.sweep.coverage_file import CoverageFile, SweepInfo
from shadowrun.studies.sweep.recorded import read_calls
from tests.untrusted.mutations import of_bytes, of_values

FEW, MANY = 4, 520
SLUGS = {"data-file-corrupt", "data-file-not-ours", "data-file-newer", "data-file-missing", "coverage-file"}
"""Errors of a file; what is left of its first bytes decides which."""
OTHERS = {"unknown-finding", "combine-platforms", "combine-nothing", "combine-twice", "coverage-file-other"}
"""Errors that do not blame the file: it was read."""
OLD = Path(__file__).parents[1] / "store"


def of_sql(path: Path, sql: str) -> Path:
    connection = sqlite3.connect(path)
    connection.executescript(sql)
    connection.close()
    return path


@pytest.fixture(scope="module")
def files(sample, tmp_path_factory) -> dict[str, Path]:
    """A whole file of each type."""
    folder = tmp_path_factory.mktemp("whole")
    run, other = folder / "run.shadowrun", folder / "other.shadowrun"
    sample.build(run, compiled=True).close()
    sample.build(other, steps=2).close()
    shadowrun.combine([run, other], folder / "both.shadowrun")
    sweep = CoverageFile.begin(folder / "x.shadowcov", SweepInfo("npu", "cpu", versions={"torch": "2.13.0"}))
    for operator in ("exp", "sin", "addmm"):
        for part in (Part.FORWARD, Part.BACKWARD, Part.OUT):
            for number, kind in enumerate((Kind.PASS, Kind.MISMATCH, Kind.UNSUPPORTED, Kind.REFERENCE)):
                found = (
                    []
                    if kind is Kind.PASS
                    else [CaseFinding(kind, f"aten::{operator}", "", "implementation", "x", "y")]
                )
                sweep.add(Case(operator, "float32", part, number), CaseOutcome.of(found, "f32[2]"))
            sweep.finish(operator, "float32", part, -1, 0)
    sweep.add_time(1.0, 1.0, complete=True)
    sweep.close()
    return {
        "run": run,
        "combined": folder / "both.shadowrun",
        "schema-1": of_sql(folder / "v1.shadowrun", (OLD / "schema-1.sql").read_text()),
        "schema-4": of_sql(folder / "v4.shadowrun", (OLD / "schema-4.sql").read_text()),
        "schema-5": of_sql(folder / "v5.shadowrun", (OLD / "schema-5.sql").read_text()),
        "sweep": folder / "x.shadowcov",
        "other": other,
        "other sweep": shutil.copy(folder / "x.shadowcov", folder / "y.shadowcov"),
    }


@pytest.fixture(scope="module")
def sample():
    """The module that builds the made-up run."""
    import importlib.util

    spec = importlib.util.spec_from_file_location("sample", Path(__file__).parents[1] / "golden" / "sample.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def command(*argv: object):
    """A command line, as something that reads a file."""
    return lambda capsys, path: _run(capsys, [str(path) if a is ... else str(a) for a in argv])


def _run(capsys, argv: list[str]) -> str:
    """The slug of its error; empty where it had a result."""
    status = main(argv)
    said = capsys.readouterr().err
    assert "Traceback" not in said, said
    assert "internal error" not in said, said
    found = re.search(r"\[shadowrun explain (.*)\]$", said.strip())
    assert (status == 2) == (found is not None) or "no script could be written" in said, (status, said)
    return found[1] if status == 2 and found else ""


def function(call):
    """A call of ours, as something that reads a file."""

    def read(_, path: Path) -> str:
        try:
            call(path)
        except ShadowrunError as error:
            return error.slug
        return ""

    return read


def all_of_a_run(path: Path) -> None:
    run = shadowrun.load(path)
    list(run.records())
    run.steps(), run.drift(), run.to_rows(), run.first_divergence(), run.regions(), run.sources(), run.known()


def gone_on_with(path: Path) -> None:
    CoverageFile.begin(path, SweepInfo("npu", "cpu", versions={"torch": "2.13.0"})).close()


OF_A_RUN = {
    "report": command("report", ...),
    "report files": command("report", ..., "-o", "r.html", "-o", "r.md", "-o", "r.json"),
    "coverage": command("coverage", ...),
    "static": command("static", "mps", ..., "-f", "csv"),
    "repro": command("repro", ..., "--finding", "no such operator"),
    "combine": command("combine", ..., "other.shadowrun", "-o", "c.shadowrun", "--force"),
    "report combined": command("report", "c.shadowrun"),
    "slowdown": function(read_mix),
    "sweep": function(read_calls),
    "library": function(all_of_a_run),
    "salvage": command("report", ..., "--salvage"),
}
OF_A_SWEEP = {
    **{f"support {f}": command("support", ..., "-f", f, "-o", f"s.{f}") for f in ("txt", "md", "json", "csv", "html")},
    "support": command("support", ..., "y.shadowcov"),
    "diff": command("support", "--diff", "y.shadowcov", ...),
    "repro": command("repro", ...),
    "go on": function(gone_on_with),
}


@pytest.fixture
def tried(files, tmp_path, monkeypatch, capsys):
    """Runs all commands on one damaged file after the other; returns how often each had a result, and which errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("other", "other sweep"):
        shutil.copy(files[name], tmp_path)

    def run(which: str, mutate, n: int) -> dict[str, int]:
        counts: dict[str, int] = {}
        path = tmp_path / f"damaged{files[which].suffix}"
        readers = OF_A_SWEEP if which == "sweep" else OF_A_RUN
        slowest = 0.0
        for seed in range(n):
            shutil.copy(files[which], path)
            mutate(path, seed)
            for name, read in readers.items():
                (tmp_path / "c.shadowrun").unlink(missing_ok=True) if name.startswith("combine") else None
                began = time.perf_counter()
                try:
                    slug = read(capsys, path)
                except BaseException as error:
                    raise AssertionError(f"{which}, {mutate.__name__}, seed {seed}, {name}: {error!r}") from error
                slowest = max(slowest, time.perf_counter() - began)
                assert slug in SLUGS | OTHERS | {""}, (seed, name, slug)
                counts[slug] = counts.get(slug, 0) + 1
                assert not list(tmp_path.glob("*.part")), (seed, name)
        print(which, mutate.__name__, n, counts, f"slowest {slowest:.1f} s")
        return counts

    return run


CASES = [
    pytest.param(which, mutate, n, id=f"{which}-{mutate.__name__}-{n}", marks=[pytest.mark.slow] if n == MANY else [])
    for n in (FEW, MANY)
    for which in ("run", "combined", "schema-1", "schema-4", "schema-5", "sweep")
    for mutate in (of_bytes, of_values)
]


@pytest.mark.parametrize(("which", "mutate", "n"), CASES)
def test_a_result_or_one_line(tried, which, mutate, n):
    counts = tried(which, mutate, n)
    assert counts["data-file-corrupt"] > 0
    assert n == FEW or counts[""] > 0  # not all is refused: readers are tried too
