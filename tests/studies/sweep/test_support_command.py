"""``shadowrun support``: sweeps side by side, and what changed between two; from coverage files alone."""

import csv
import io
import json
from pathlib import Path

import pytest

from shadowrun.cli.main import main
from shadowrun.studies.sweep.cases import Case, CaseFinding, CaseOutcome, Kind, Part
from shadowrun.studies.sweep.coverage_file import CoverageFile, SweepInfo
from shadowrun.studies.sweep.reports.support import Changes, Direction, Platforms, read_sweeps
from tests.browser_kit import MISSING, started

WRONG = CaseFinding(Kind.MISMATCH, "aten::exp", "", "implementation", "scaled by 2", "1 element")
LACKS = CaseFinding(Kind.UNSUPPORTED, "aten::sin", "aten::sin.out", "missing operator", "", "NotImplementedError: no")
SLOWLY = CaseFinding(Kind.SILENT_FALLBACK, "aten::sin", "", "silent fallback", "", "")
HARNESS = CaseFinding(Kind.HARNESS, "", "", "", "", "the reference fails")
SCRIPT = CaseFinding(Kind.ERROR, "aten::tan", "", "", "<script>alert(1)</script>", "")


def write(path, target, outcomes, *, complete=True):
    """A coverage file: {(operator, part): findings of its cases}."""
    file = CoverageFile.begin(path, SweepInfo(target, "cpu", versions={"torch": "2.13.0"}))
    for (operator, part), cases in outcomes.items():
        for number, found in enumerate(cases):
            file.add(Case(operator, "float32", part, number), CaseOutcome.from_findings(found, "f32[2]"))
    file.add_time(1.0, 1.0, complete=complete)
    file.close()
    return path


@pytest.fixture(autouse=True)
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    f, b = Part.FORWARD, Part.BACKWARD
    write(Path("old"), "npu", {
        ("exp", f): [[], []], ("exp", b): [[WRONG]], ("sin", f): [[LACKS], [LACKS]], ("cos", f): [[]],
        ("odd", f): [[HARNESS]], ("gone", f): [[]],
    })  # fmt: skip
    write(Path("new"), "npu", {
        ("exp", f): [[], [WRONG]], ("exp", b): [[]], ("sin", f): [[SLOWLY], [SLOWLY]], ("cos", f): [[]],
        ("odd", f): [[HARNESS]], ("tan", f): [[SCRIPT]],
    }, complete=False)  # fmt: skip
    write(Path("cuda"), "cuda", {("exp", f): [[]], ("sin", f): [[]], ("cos", f): [[]]})


def test_side_by_side():
    table = Platforms.from_sweeps(read_sweeps([Path("old"), Path("new"), Path("cuda")]))
    assert [s.label for s in table.sweeps] == ["npu (old)", "npu (new)", "cuda"]
    rows = {row.name: row.supports for row in table.rows}
    assert rows == {
        "sin": ("none", "none", "full"),
        "tan": (None, "none", None),
        "exp": ("partial", "partial", "full"),
        "cos": ("full", "full", "full"),
        "odd": ("untested", "untested", None),
        "gone": ("full", None, None),
    }
    assert next(iter(rows)) == "sin"
    assert table.n_differing == 2
    # Harness errors are in no share.
    assert table.sweeps[0].percent_full == pytest.approx(100 * 2 / 4)
    assert table.sweeps[2].percent_full == 100


def test_changes():
    changes = Changes.between(*read_sweeps([Path("old"), Path("new")]))
    found = {(c.name, c.part): (c.direction, c.before, c.after) for c in changes.changes}
    assert found == {
        ("exp", "forward"): (Direction.REGRESSED, "full", "partial"),
        ("exp", "backward"): (Direction.GAINED, "none", "full"),
        ("sin", "forward"): (Direction.CHANGED, "none", "none"),
    }
    assert changes.changes[0].direction is Direction.REGRESSED
    assert changes.n_compared == 4
    assert (changes.only_before, changes.only_after) == (("gone",), ("tan",))


def test_one_more_way_to_fail_is_a_regression(tmp_path):
    both = write(tmp_path / "both", "npu", {("exp", Part.FORWARD): [[WRONG, LACKS]]})
    one = write(tmp_path / "one", "npu", {("exp", Part.FORWARD): [[WRONG]]})
    assert [c.direction for c in Changes.between(*read_sweeps([one, both])).changes] == [Direction.REGRESSED]
    assert [c.direction for c in Changes.between(*read_sweeps([both, one])).changes] == [Direction.GAINED]
    assert Changes.between(*read_sweeps([one, one])).changes == ()


def test_text(capsys):
    assert main(["support", "new", "cuda"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "2 of 5 operators are not alike on all" in lines
    assert "! the sweep of npu is not complete" in lines
    (row,) = [line.split(maxsplit=3) for line in lines if line.startswith("exp")]
    assert row == ["exp", "partial", "full", "float32 forward, mismatch: aten::exp: scaled by 2"]
    assert not [line for line in lines if line.startswith("cos")]
    assert main(["support", "--diff", "old", "new"]) == 0
    shown = capsys.readouterr().out
    assert "1 regressed, 1 gained, 1 fails differently, of 4 parts that both tested" in shown
    assert "only in npu (new): 1 operators, tan" in shown


def test_other_formats(capsys):
    assert main(["support", "old", "cuda", "-f", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [p["label"] for p in document["platforms"]] == ["npu", "cuda"]
    assert {o["name"]: o["support"] for o in document["operators"]}["sin"] == ["none", "full"]
    assert main(["support", "old", "cuda", "-f", "csv"]) == 0
    rows = {row["operator"]: row for row in csv.DictReader(io.StringIO(capsys.readouterr().out))}
    assert (rows["sin"]["npu"], rows["sin"]["cuda"], rows["gone"]["cuda"]) == ("none", "full", "")
    assert main(["support", "new", "-f", "md"]) == 0
    assert "&#60;script&#62;" in capsys.readouterr().out
    assert main(["support", "--diff", "old", "new", "-f", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["n"] == {"regressed": 1, "gained": 1, "fails differently": 1}
    assert main(["support", "--diff", "old", "new", "-f", "csv"]) == 0
    assert len(list(csv.DictReader(io.StringIO(capsys.readouterr().out)))) == 3
    assert main(["support", "--diff", "old", "new", "-f", "md"]) == 0
    assert "| regressed | exp | float32 | forward | full → partial |" in capsys.readouterr().out
    assert main(["support", "--diff", "old", "new", "-f", "html"]) == 0
    assert '<span class="chip bad">regressed</span>' in capsys.readouterr().out


def test_page(capsys):
    assert main(["support", "old", "new", "cuda", "-o", "page.html"]) == 0
    page = Path("page.html").read_text(encoding="utf-8")
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert "http" not in page.replace("http-equiv", "")
    assert 'data-tags="none none full differs"' in page
    assert "the sweep of npu (new) is not complete" in page


@pytest.mark.skipif(bool(MISSING), reason=MISSING)
def test_the_page_s_filter_in_a_browser(tmp_path):
    assert main(["support", "old", "new", "cuda", "-o", "page.html"]) == 0
    acts = """
        const tools = document.querySelector(".tools .only").closest(".tools");
        tools.querySelector(".search").value = "SI";
        tools.querySelector(".only").checked = true;
        tools.dispatchEvent(new Event("input"));
        const rows = [...tools.parentNode.querySelectorAll("tbody tr")].filter(row => !row.hidden);
        return [tools.querySelector("output").textContent, rows.map(row => row.cells[0].textContent)];
    """
    with started() as browser:
        browser.open(tmp_path / "page.html")
        shown, rows = browser.run(acts)
        assert browser.console() == []
    assert rows == ["sin"]
    assert shown == "1 of 6"


def test_gates(capsys):
    assert main(["support", "old", "cuda", "--fail-under", "95"]) == 1
    assert "npu: 50.0 % of the operators are full, under 95 %" in capsys.readouterr().err
    assert main(["support", "cuda", "--fail-under", "100"]) == 0
    assert main(["support", "--diff", "old", "new", "--fail-on", "regressed"]) == 1
    assert "1 regressed" in capsys.readouterr().err
    assert main(["support", "--diff", "old", "old", "--fail-on", "regressed"]) == 0
    # Of two files that are compared, the second is the one that must be good enough.
    assert main(["support", "--diff", "old", "cuda", "--fail-under", "95"]) == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--diff", "old"], "two coverage files, not 1"),
        (["old", "--fail-on", "regressed"], "needs --diff"),
        (["missing"], "missing"),
        ([], ".shadowcov"),
    ],
)
def test_bad_input(capsys, options, words):
    assert main(["support", *options]) == 2
    assert words in capsys.readouterr().err
