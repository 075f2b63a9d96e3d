"""From what a sweep found to a script: it exits 1 while the fault is there, and 0 once it is gone."""

import re

import pytest
import torch

from shadowrun import UsageError
from shadowrun.cli.main import main
from shadowrun.platforms import resolve
from shadowrun.platforms.fingerprint import fingerprint, versions
from shadowrun.repro import ReproOptions
from shadowrun.studies.sweep import case_programs, opinfo
from shadowrun.studies.sweep.cases import ANY_DTYPE, FAILURES, Case, CaseFinding, CaseOutcome, Kind, Part
from shadowrun.studies.sweep.coverage_file import CoverageFile, SweepInfo
from shadowrun.studies.sweep.inputs import printed
from shadowrun.studies.sweep.rebuild_case import Origin, Sampler
from shadowrun.studies.sweep.run_case import CaseRunner
from shadowrun.studies.sweep.scripts import write_script
from shadowrun.studies.sweep.sweep_findings import findings_of_sweep

pytestmark = [pytest.mark.usefixtures("clean_sim", "one_thread"), pytest.mark.filterwarnings("ignore")]
WHOLE = CaseFinding(Kind.MISMATCH, "", "", "implementation", "as a whole", "result 0 differs")


def swept(path, operator, part, *, target="sim", dtype="float32", finding=None, sample=None):
    """A coverage file of one part of an operator, run in this process, or with the given finding in the first case."""
    info = SweepInfo(
        target, "cpu", target_fingerprint=fingerprint(resolve(target)), ref_fingerprint=fingerprint(resolve("cpu")),
        versions=versions(),
    )  # fmt: skip
    file = CoverageFile.begin(path, info)
    runner = None if finding else CaseRunner(target, "cpu", 60.0, lambda: None)
    for number, inputs in Sampler(operator, dtype, 0, None).samples(part):
        if sample is not None and number != sample:
            continue
        findings = (
            [finding]
            if finding
            else runner.run(part, case_programs.program(opinfo.database()[operator], part, number, inputs))
        )
        file.add(Case(operator, dtype, part, number), CaseOutcome.from_findings(findings or [], printed(inputs)))
        if any(f.kind in FAILURES for f in findings or []):
            break
    file.close()
    return path


def written(path, folder, **options):
    """The script of the first thing that was found."""
    file = CoverageFile.open(path)
    try:
        found = findings_of_sweep(file.results())
        return found[0], write_script(
            found[0], file.info, Origin.from_file(file, None), folder, ReproOptions(**options)
        )
    finally:
        file.close()


@pytest.mark.parametrize(
    ("flaw", "operator", "part", "kind"),
    [
        ("missing-cumsum", "cumsum", Part.FORWARD, Kind.UNSUPPORTED),
        ("topk-device-error", "topk", Part.FORWARD, Kind.ERROR),
        ("softmax-error", "softmax", Part.TRANSPOSED, Kind.MISMATCH),
        ("relu-backward-leaks", "nn.functional.relu", Part.BACKWARD, Kind.MISMATCH),
        ("argmax-int32", "argmax", Part.FORWARD, Kind.FORM),
        ("vector-norm-falls-back", "linalg.vector_norm", Part.FORWARD, Kind.WARNED_FALLBACK),
        ("sqrt-nan-is-zero", "sqrt", Part.PROBE, Kind.MISMATCH),
        ("silu-tail", "nn.functional.silu", Part.TAIL, Kind.MISMATCH),
        ("leaky-relu-ignores-strides", "nn.functional.leaky_relu", Part.LAYOUT, Kind.MISMATCH),
        ("layer-norm-block-edge", "nn.functional.layer_norm", Part.SLICE, Kind.MISMATCH),
    ],
)
def test_each_kind_has_a_script(clean_sim, quick, tmp_path, flaw, operator, part, kind):
    clean_sim.enable(flaws=[flaw])
    found, made = written(swept(tmp_path / "x.shadowcov", operator, part), tmp_path / "script", time_limit_s=60.0)
    assert (found.finding.kind, found.first.part) == (kind, part)
    assert made.shows_fault, (made.said, made.notes)
    without = quick.run(made.script, SIM_FLAWS="")
    assert without.returncode == 0, without.stdout
    torch.load(made.script.with_name("inputs.pt"), weights_only=True)
    imported = set(re.findall(r"^(?:import|from) (\w+)", made.script.read_text(encoding="utf-8"), re.MULTILINE))
    assert imported <= {"os", "sys", "pathlib", "torch", "shadowrun", "warnings"}


@pytest.mark.parametrize(
    ("flaw", "operator", "part", "finding"),
    [
        ("softmax-error", "softmax", Part.FORWARD, WHOLE),
        ("softmax-error", "softmax", Part.BACKWARD, WHOLE),
        ("mul-inplace-lost", "mul", Part.STRIDED_INPLACE, WHOLE),
        ("argmax-int32", "argmax", Part.FORWARD, CaseFinding(Kind.FORM, "", "", "metadata", "as a whole", "dtype")),
        pytest.param("softmax-error", "log_softmax", Part.BACKWARD, WHOLE, marks=pytest.mark.slow),
        ("missing-cumsum", "cumsum", Part.OUT, CaseFinding(Kind.ERROR, "", "", "", "RuntimeError", "it failed")),
        pytest.param(
            *("missing-lerp", "lerp", Part.STRIDED_INPLACE),
            CaseFinding(Kind.ERROR, "", "", "", "RuntimeError", "it failed"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_cases_as_a_whole(clean_sim, quick, tmp_path, flaw, operator, part, finding):
    """Where no operator inside is to blame, the script calls what the case called."""
    clean_sim.enable(flaws=[flaw])
    path = swept(tmp_path / "x.shadowcov", operator, part, finding=finding)
    _, made = written(path, tmp_path / "script")
    assert made.shows_fault == (operator != "log_softmax"), (made.said, made.notes)  # that is right
    text = made.script.read_text(encoding="utf-8")
    assert "torch." in next(line for line in text.splitlines() if line.startswith("    out = "))
    assert quick.run(made.script, SIM_FLAWS="").returncode == 0


@pytest.mark.parametrize(
    ("operator", "flaw", "finding"),
    [
        ("erfinv", "erfinv-crashes", CaseFinding(Kind.CRASH, explanation="signal 11 (SIGSEGV)")),
        pytest.param(
            "digamma",
            "digamma-hangs",
            CaseFinding(Kind.TIMEOUT, explanation="no end within 3 s"),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "i0",
            "i0-hogs-memory",
            CaseFinding(Kind.OUT_OF_MEMORY, explanation="more than 0.5 GiB"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_call_that_ends_its_process(clean_sim, quick, tmp_path, operator, flaw, finding):
    clean_sim.enable(flaws=[flaw])
    path = swept(tmp_path / "x.shadowcov", operator, Part.FORWARD, finding=finding, sample=0)
    _, made = written(path, tmp_path / "script")
    assert made.shows_fault, (made.said, made.notes)
    assert f"aten::{operator} on sim" in made.said, "the operator that was called, not the whole case"
    assert quick.run(made.script, SIM_FLAWS="").returncode == 0


def test_invalid_inputs_that_a_real_device_accepts(quick, tmp_path):
    """Lazy's gather takes an ``out=`` of another dtype; were it the CPU, the script would exit 0."""
    finding = CaseFinding(Kind.MISSING_ERROR, explanation="RuntimeError")
    path = swept(
        tmp_path / "x.shadowcov", "gather", Part.INVALID, target="lazy", dtype=ANY_DTYPE, finding=finding, sample=1
    )
    found, made = written(path, tmp_path / "script")
    text = made.script.read_text(encoding="utf-8")
    assert "torch.gather(" in text
    assert made.shows_fault, (found.inputs, made.said, made.notes)
    made.script.write_text(text.replace('TARGET_DEVICE = "lazy"', 'TARGET_DEVICE = "cpu"'), encoding="utf-8")
    assert quick.run(made.script).returncode == 0


def test_a_real_kernel_of_the_cpu(quick, tmp_path):
    """Shown exactly where torch's vectors and single elements differ."""
    x = torch.full((64,), 89.0)
    differs = not torch.equal(x.cosh(), torch.cat([x[:1].cosh()] * 64))
    path = swept(tmp_path / "x.shadowcov", "cosh", Part.TAIL, target="cpu[threads=1]")
    assert bool(file_found(path)) == differs
    if differs:
        _, made = written(path, tmp_path / "script", time_limit_s=60.0)
        assert made.shows_fault
        assert "inf on cpu[threads=1]" in made.said
        values = torch.load(made.script.with_name("inputs.pt"), weights_only=True)["self"]
        assert values.numel() < 195, "made smaller"


def file_found(path):
    file = CoverageFile.open(path)
    try:
        return findings_of_sweep(file.results())
    finally:
        file.close()


def test_what_is_found_has_an_order():
    """The worst first, then what is wrong with the reference; one entry for each operator, dtype and fault."""
    case, mismatch = (
        Case("exp", "float32", Part.FORWARD, 0),
        CaseFinding(Kind.MISMATCH, "aten::exp", "", "x", "y", "first"),
    )
    died = CaseFinding(Kind.HARNESS, explanation="on the reference: crash, signal 11 (SIGSEGV)")
    results = [
        (
            Case("exp", "float32", Part.STRIDED, 2),
            CaseOutcome.from_findings([CaseFinding(Kind.MISMATCH, "aten::exp", "", "x", "y", "z")]),
        ),
        (case, CaseOutcome.from_findings([mismatch], "f32[2]")),
        (
            Case("sin", "float32", Part.FORWARD, 1),
            CaseOutcome.from_findings([died, CaseFinding(Kind.REFERENCE, "aten::sin")]),
        ),
        (Case("tan", "float32", Part.FORWARD, 1), CaseOutcome.from_findings([CaseFinding(Kind.CRASH)])),
        (
            Case("tan", "float32", Part.FORWARD, -1),
            CaseOutcome.from_findings([CaseFinding(Kind.CRASH, explanation="not tried")]),
        ),
        (
            Case("cos", "float32", Part.FORWARD, 1),
            CaseOutcome.from_findings([CaseFinding(Kind.HARNESS), CaseFinding(Kind.UNVERIFIED)]),
        ),
    ]
    found = findings_of_sweep(results)
    assert [f.title for f in found] == [
        "tan float32: crash",
        "exp float32: mismatch in aten::exp",
        "sin float32: reference wrong in aten::sin",
        "sin float32: crash",
    ]
    assert [f.counts for f in found] == [True, True, False, False]
    assert (found[1].first, found[1].inputs, found[1].finding.message) == (case, "f32[2]", "first")
    assert found[1].shown_by == "1 forward, 1 strided"


def test_the_command_lists_and_writes(clean_sim, quick, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    clean_sim.enable(flaws=["softmax-error"])
    swept(tmp_path / "x.shadowcov", "softmax", Part.FORWARD)
    assert main(["repro", "x.shadowcov"]) == 0
    shown = capsys.readouterr().out
    assert "1. softmax float32: mismatch in aten::_softmax: 1 forward" in shown
    assert "--finding N" in shown
    assert not (tmp_path / "repro").exists()
    assert main(["repro", "x.shadowcov", "--finding", "soft*", "-o", str(tmp_path / "there"), "--no-minimise"]) == 0
    assert "exits 1 here" in capsys.readouterr().out
    assert [p.name for p in (tmp_path / "there").iterdir()] == ["01-softmax-float32-mismatch"]
    assert main(["repro", "x.shadowcov", "--finding", "7"]) == 2
    assert "Findings: 1 softmax" in capsys.readouterr().err


def test_a_sweep_that_found_nothing(tmp_path, capsys):
    path = swept(tmp_path / "x.shadowcov", "exp", Part.FORWARD, sample=0)
    assert main(["repro", str(path)]) == 0
    assert "There are no findings" in capsys.readouterr().out


def test_inputs_that_cannot_be_made_again(tmp_path):
    """Another torch has other samples: rather no script than one of another case."""
    path = swept(tmp_path / "x.shadowcov", "exp", Part.FORWARD, finding=WHOLE, sample=0)
    file = CoverageFile.open(path)
    found = findings_of_sweep([(case, CaseOutcome(outcome.findings, "f32[77]")) for case, outcome in file.results()])
    with pytest.raises(UsageError, match=r"The inputs of exp float32 forward 0 \(f32\[77\]\) cannot be made again"):
        write_script(found[0], file.info, Origin.from_file(file, None), tmp_path / "script", ReproOptions())
    file.close()


def test_recorded_calls_need_their_data_file(clean_sim, quick, tmp_path, monkeypatch, capsys):
    import shadowrun

    monkeypatch.chdir(tmp_path)
    with shadowrun.compare("sim", file="run.shadowrun"):
        torch.ones(3, 4).to("sim").cumsum(1)
    clean_sim.enable(flaws=["missing-cumsum"])
    flaws = "--flaws=missing-cumsum"
    sweep = ["sweep", "--target", "sim", flaws, "--from", "run.shadowrun", "--ops", "aten::cumsum*", "--jobs", "1"]
    assert main([*sweep, "--file", "x.shadowcov"]) == 1
    capsys.readouterr()
    assert main(["repro", "x.shadowcov", "--finding", "1", "-o", str(tmp_path / "r")]) == 0
    assert "exits 1 here" in capsys.readouterr().out
    (tmp_path / "run.shadowrun").rename(tmp_path / "other.shadowrun")
    assert main(["repro", "x.shadowcov", "--finding", "1", "-o", str(tmp_path / "r")]) == 2
    assert "give its path with --from DATA" in capsys.readouterr().err
    assert main(["repro", "x.shadowcov", "--finding", "1", "--from", "other.shadowrun", "-o", str(tmp_path / "r")]) == 0
    assert main(["repro", "other.shadowrun", "--from", "x"]) == 2


def test_a_part_that_fails_where_the_whole_runs_has_no_script(tmp_path):
    finding = CaseFinding(Kind.ERROR, "aten::silu", "", "", "RuntimeError", "no single elements")
    path = swept(tmp_path / "x.shadowcov", "nn.functional.silu", Part.TAIL, finding=finding, sample=0)
    with pytest.raises(UsageError, match="runs on sim in one way and fails in the other"):
        written(path, tmp_path / "script")
