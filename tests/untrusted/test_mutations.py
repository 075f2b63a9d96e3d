"""Damaged or edited files end in a result, or in one line that says so; in all commands that read them.

A few of each kind in each run of the tests; ``pytest -m slow tests/untrusted`` takes 520, in pieces of minutes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import re
import shutil
import sqlite3
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

import shadowrun
from shadowrun.cli.main import main
from shadowrun.errors import ShadowrunError
from shadowrun.store.plain_json import NotStorable
from shadowrun.studies.campaign.campaign_folder import CampaignFolder, CampaignSettings
from shadowrun.studies.campaign.store import CampaignStore
from shadowrun.studies.campaign.tables import ResultRow, VariantRow
from shadowrun.studies.shards import Shard
from shadowrun.studies.slowdown.calls import read_mix
from shadowrun.studies.sweep.cases import Case, CaseFinding, CaseOutcome, Kind, Part
from shadowrun.studies.sweep.coverage_file import CoverageFile, SweepInfo
from shadowrun.studies.sweep.recorded_calls import read_calls
from shadowrun.studies.zoo.graph import Runner, from_json, to_json
from shadowrun.studies.zoo.input_values import make_inputs
from shadowrun.studies.zoo.program import program_of, read_zoo, write_zoo
from shadowrun.studies.zoo.sources.graph_folders import collect_folders
from tests.studies.zoo.test_foreign_graphs import META, MODEL, WEIGHTS
from tests.untrusted.mutations import of_bytes, of_json, of_source, of_values, other_value
from tests.untrusted.test_campaign_folders import MM

FEW, MANY, PIECE = 4, 520, 130
SLUGS = {"data-file-corrupt", "data-file-not-ours", "data-file-newer", "data-file-missing", "coverage-file"}
"""Errors of a file; what is left of its first bytes decides which."""
SLUGS |= {
    "captured-inputs",
    "zoo-file",
    "zoo-program",
    "zoo-missing",
    "campaign-folder",
    "campaign-store",
    "data-file-older",
}
OTHERS = {
    *("unknown-finding", "combine-platforms", "combine-nothing", "combine-twice", "coverage-file-other"),
    *("no-programs", "campaign-other", "unknown-variant", "data-file-ranks", "zoo-unknown-program"),
}
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
                sweep.add(Case(operator, "float32", part, number), CaseOutcome.from_findings(found, "f32[2]"))
            sweep.finish(operator, "float32", part, -1, 0)
    sweep.add_time(1.0, 1.0, complete=True)
    sweep.close()
    with shadowrun.record(folder / "x.shadowrec", capture=1 << 20) as recording:
        for _ in range(2):
            recording.step()
            torch.nn.Linear(4, 3)(torch.randn(2, 4).requires_grad_()).sum().backward()
    write_zoo(folder / "x.shadowzoo", [program_of("p", "modules", from_json(MM))], [])
    campaign = CampaignFolder.create(
        folder / "c", CampaignSettings(targets=("cpu[threads=1]",), n=4), folder / "x.shadowzoo"
    )
    store = CampaignStore.begin(campaign.shard(Shard()), campaign.info())
    recipe = json.dumps([from_json(MM).identity()[:12], [["insert", "1"]], 1])
    with store.written():
        for number in range(3):
            store.add_variant(VariantRow(number, "program", 7))
            store.add_result(ResultRow(number, 0, "finding"), recipe)
    store.close()
    return {
        "recording": folder / "x.shadowrec",
        "zoo": folder / "x.shadowzoo",
        "campaign": campaign.shard(Shard()),
        "campaign folder": campaign.path,
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


OF_A_RECORDING = {
    "diff": command("diff", ..., "other.shadowrec"),
    "diff itself": command("diff", ..., ..., "-f", "json"),
    "classes": command("classes", ..., "other.shadowrec"),
    "replay": command("replay", ..., "--target", "cpu"),
}


def all_of_a_zoo(path: Path) -> None:
    for program in read_zoo(path).programs.values():
        with contextlib.suppress(RuntimeError, ValueError, TypeError, IndexError):  # Refused is one
            Runner(program.graph)(make_inputs(program.graph.inputs))


OF_A_ZOO = {
    "list": command("zoo", "list", "--zoo", ...),
    "show": command("zoo", "show", "p", "--script", "--zoo", ...),
    "run": function(all_of_a_zoo),
}
OF_A_CAMPAIGN = {
    "status": command("campaign", "status", "c"),
    "report": command("campaign", "report", "c", "-o", "r.html"),
    "add-known": command("campaign", "add-known", "c"),
    "combine": command("campaign", "combine", "c", ...),
    "reproduce": command("campaign", "reproduce", "c", "1"),
}
READERS = {"sweep": OF_A_SWEEP, "recording": OF_A_RECORDING, "zoo": OF_A_ZOO, "campaign": OF_A_CAMPAIGN}


@pytest.fixture
def tried(files, tmp_path, monkeypatch, capsys):
    """Runs all commands on one damaged file after the other; returns how often each had a result, and which errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    for name in ("other", "other sweep"):
        shutil.copy(files[name], tmp_path)
    shutil.copy(files["recording"], tmp_path / "other.shadowrec")
    shutil.copytree(files["campaign folder"], tmp_path / "c")

    def run(which: str, mutate, seeds: range) -> dict[str, int]:
        counts: Counter[str] = Counter()
        path = tmp_path / f"damaged{files[which].suffix}"
        if which == "campaign":
            path = tmp_path / files[which].relative_to(files["campaign folder"].parent)
        readers = READERS.get(which, OF_A_RUN)
        slowest = 0.0
        for seed in seeds:
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
                counts[slug] += 1
                assert not list(tmp_path.glob("*.part")), (seed, name)
        print(which, mutate.__name__, seeds, dict(counts), f"slowest {slowest:.1f} s")
        return counts

    return run


STORES = ("run", "combined", "schema-1", "schema-4", "schema-5", "sweep", "recording", "campaign")
KINDS = [*itertools.product(STORES, (of_bytes, of_values)), ("zoo", of_bytes), ("zoo", of_json)]
SEEDS = [range(FEW), *(range(first, first + PIECE) for first in range(0, MANY, PIECE))]
CASES = [
    pytest.param(
        *(which, mutate, seeds),
        id=f"{which}-{mutate.__name__}-{seeds.start}-{seeds.stop}",
        marks=[pytest.mark.slow] if len(seeds) == PIECE else [],
    )
    for seeds in SEEDS
    for which, mutate in KINDS
]


@pytest.mark.parametrize(("which", "mutate", "seeds"), CASES)
def test_a_result_or_one_line(tried, which, mutate, seeds):
    counts = tried(which, mutate, seeds)
    assert sum(counts[slug] for slug in SLUGS & counts.keys()) > 0
    assert len(seeds) == FEW or counts[""] > 0  # not all is refused: readers are tried too


@pytest.mark.parametrize("n", [FEW * 5, pytest.param(MANY, marks=pytest.mark.slow)])
def test_a_graph_with_other_values(n):
    """As `zoo add` reads graphs: the number of a program is the hash of its graph, which whoever changes it knows."""
    whole = json.dumps(to_json(from_json(MM)))
    ran = refused = 0
    for seed in range(n):
        data = other_value(json.loads(whole), random.Random(seed))
        try:
            graph = from_json(data)
        except (ValueError, NotStorable):  # Refused is one
            refused += 1
            continue
        program_of("p", "modules", graph)
        with contextlib.suppress(RuntimeError, ValueError, IndexError):  # of its calls
            Runner(graph)(make_inputs(graph.inputs))
            ran += 1
    assert ran > 0
    assert refused > 0


FOLDER = {"model.py": MODEL, "weight_meta.py": WEIGHTS, "input_meta.py": META}


@pytest.mark.parametrize("mutate", [of_bytes, of_source])
@pytest.mark.parametrize("n", [FEW * 5, pytest.param(MANY, marks=pytest.mark.slow)])
def test_a_graph_of_another_tool_or_a_reason(tmp_path, n, mutate):
    """Read in this process: a worker process would take anything for a reason."""
    n_programs, slowest = 0, 0.0
    for seed in range(n):
        for name, text in FOLDER.items():
            (tmp_path / name).write_text(text)
        mutate(tmp_path / [*FOLDER][seed % len(FOLDER)], seed)
        began = time.perf_counter()
        found = collect_folders(tmp_path, lambda _: True, lambda *_: None)
        slowest = max(slowest, time.perf_counter() - began)
        n_programs += len(found.programs)
        assert found.programs or any(stage.left_out for stage in found.stages), seed
    print("folder of a graph", mutate.__name__, n, f"{n_programs} programs, slowest {slowest:.1f} s")
    assert 0 < n_programs < n


@pytest.mark.parametrize("mutate", [of_bytes, of_json, of_source])
@pytest.mark.parametrize("n", [FEW * 5, pytest.param(MANY, marks=pytest.mark.slow)])
def test_settings_of_a_campaign(tried, files, tmp_path, capsys, n, mutate):
    path = tmp_path / "c" / "campaign.json"
    whole, slugs, slowest = path.read_text(), Counter(), 0.0
    for seed in range(n):
        path.write_text(whole)
        mutate(path, seed)
        for name in ("status", "report"):
            began = time.perf_counter()
            slugs[OF_A_CAMPAIGN[name](capsys, path)] += 1
            slowest = max(slowest, time.perf_counter() - began)
    print("settings of a campaign", mutate.__name__, n, dict(slugs), f"slowest {slowest:.1f} s")
    assert slugs.keys() <= SLUGS | OTHERS | {""}
    assert slugs.keys() - {""}
