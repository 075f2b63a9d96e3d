"""`campaign repro`, `reproduce` and `add-known` on a small campaign, from end to end."""

import json

import pytest
import torch

from shadowrun.cli.main import main
from shadowrun.settings import read_settings
from shadowrun.studies.campaign.campaign_folder import CampaignFolder
from shadowrun.studies.campaign.causes.known_causes import known_causes, new_lines
from shadowrun.studies.campaign.causes.reproduce import find_variant, hex_of
from shadowrun.studies.campaign.causes.root_causes import Signature
from shadowrun.studies.campaign.store import CampaignStore
from shadowrun.studies.campaign.summary import causes_of
from shadowrun.studies.zoo.graph import Fill, Graph, Input, Node, Ref
from shadowrun.studies.zoo.program import program_of, write_zoo

pytestmark = pytest.mark.usefixtures("forked_processes")

aten = torch.ops.aten
X = Input("x", (4, 8), fill=Fill("uniform", 0.1, 0.9))
MM = Graph((X, Input("w", (8, 4))), (Node(aten.mm.default, (Ref(-1), Ref(-2))),), (Ref(0),))
ERFINV = Graph((X,), (Node(aten.erfinv.default, (Ref(-1),)), Node(aten.relu.default, (Ref(0),))), (Ref(1),))
FLAWS = "matmul-in-bf16,erfinv-crashes"


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    """A finished campaign with a mismatch and a crash."""
    where = tmp_path_factory.mktemp("campaign")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(where)
        write_zoo(where / "z", [program_of("mm", "tests", MM), program_of("erfinv", "tests", ERFINV)], ())
        options = ("--target", "sim", "--flaws", FLAWS, "--zoo", "z", "--jobs", "1", "--n", "3")
        assert main(["campaign", "run", "c", *options, "--mutators", "batch-slice,layout"]) == 0
    return where


@pytest.fixture
def here(campaign, monkeypatch):
    monkeypatch.chdir(campaign)
    return campaign


def found(here):
    store = CampaignStore.open(here / "c" / "campaign.shadowcampaign")
    return store, {c.signature.op: c for c in causes_of(store)}


def test_a_script_for_each_root_cause(here, quick, capsys):
    assert main(["campaign", "repro", "c", "--time-limit", "10"]) == 0
    said = capsys.readouterr().out
    assert "crash aten::erfinv: " in said
    assert "mismatch aten::mm, float: reduced precision: " in said
    assert said.count("exits 1 here") == 2
    folders = sorted(p.name for p in (here / "c" / "scripts").iterdir())
    assert [name.rpartition("-")[0] for name in folders] == ["aten-erfinv-crash", "aten-mm-mismatch"]
    for name in folders:
        files = {p.name for p in (here / "c" / "scripts" / name).iterdir() if p.is_file()}
        assert files == {"repro.py", "short.py", "inputs.pt", "versions.json", "cause.json", "issue.md"}
        assert "```python\n# aten::" in (here / "c" / "scripts" / name / "issue.md").read_text()
        assert len((here / "c" / "scripts" / name / "short.py").read_text().splitlines()) <= 15
    # The report has them from then on.
    assert main(["campaign", "report", "c", "-f", "json"]) == 0
    causes = json.loads(capsys.readouterr().out)["root_causes"]
    assert [c["op"] for c in causes] == ["aten::erfinv", "aten::mm"]
    assert all("import torch" in c["script"] for c in causes)


def test_one_of_them_elsewhere_and_names_that_fit_none(here, capsys):
    assert main(["campaign", "repro", "c", "aten::*mm*", "-o", "out", "--no-minimise"]) == 0
    assert len(list((here / "out").iterdir())) == 1
    assert "self f32[" in capsys.readouterr().out
    for name in ("99", "aten::conv*"):
        assert main(["campaign", "repro", "c", name]) == 2
        assert "unknown-finding" in capsys.readouterr().err
    (here / "link").symlink_to(here / "out")
    assert main(["campaign", "repro", "c", "-o", "link"]) == 2
    assert "is a link" in capsys.readouterr().err


def test_a_variant_is_run_again_by_number_identity_and_recipe(here, capsys):
    store, causes = found(here)
    number = causes["aten::mm"].first
    row = next(v for v in store.variants() if v.number == number)
    assert find_variant(store, hex_of(row.identity)[:10]).number == number
    for text in (str(number), row.recipe):
        assert main(["campaign", "reproduce", "c", text, "--script"]) == 0
        said = capsys.readouterr().out
        assert "mm (tests, " in said
        assert "the same as the recorded result" in said
        assert "matmul" in said
        assert "v0 = aten::mm(x" in said


def test_a_crash_is_an_outcome_again(here, capsys):
    number = found(here)[1]["aten::erfinv"].first
    assert main(["campaign", "reproduce", "c", str(number), "-f", "json"]) == 0
    data = json.loads(capsys.readouterr().out)
    (result,) = data["results"]
    assert result["findings"][0]["explanation"] == "signal 11 (SIGSEGV)"
    assert result["difference"] is None


def test_another_result_than_the_recorded_one(here, tmp_path, capsys):
    store, causes = found(here)
    number = causes["aten::mm"].first
    recipe = json.loads(next(v for v in store.variants() if v.number == number).recipe)
    # A recipe that the campaign did not make has no recorded result.
    other = json.dumps([recipe[0], [["insert", 1, 0, "relu"]], 7])
    assert main(["campaign", "reproduce", "c", other]) == 0
    assert "recorded" not in capsys.readouterr().out.partition("sim (")[0]
    copy = CampaignFolder.open(here / "c")
    shard = copy.shards()[0]
    was = shard.read_bytes()
    try:
        changed = CampaignStore.begin(shard, copy.info())
        with changed.written():
            changed._connection.execute("delete from finding where number = ?", (number,))
            changed._connection.execute("update result set status = 'ok' where number = ?", (number,))
        changed.close()
        assert main(["campaign", "reproduce", "c", str(number)]) == 1
        said = capsys.readouterr().out
        assert "DIFFERS from the recorded result" in said
        assert "it was ok, and is finding" in said
    finally:
        shard.write_bytes(was)
        main(["campaign", "combine", "c"])


@pytest.mark.parametrize(
    ("text", "slug"),
    [
        ("ffffff0000", "unknown-variant"),
        ("[1]", "unknown-variant"),
        ("[" * 5000, "unknown-variant"),
        ("mm", "unknown-variant"),
        ("", "unknown-variant"),
    ],
)
def test_no_variant(here, capsys, text, slug):
    assert main(["campaign", "reproduce", "c", text]) == 2
    error = capsys.readouterr().err
    assert slug in error
    assert "Traceback" not in error


def test_a_recipe_that_names_nothing_is_invalid_and_no_error(here, capsys):
    assert main(["campaign", "reproduce", "c", '["ffff",[],0]']) == 0
    assert "invalid: no program ffff" in capsys.readouterr().out


def test_lines_are_written_once(here, capsys, tmp_path):
    ledger = tmp_path / "ledger.toml"
    ledger.write_text('[tolerance]\n"aten::exp" = {rtol = 1e-3, atol = 0}')
    assert main(["campaign", "add-known", "c", "--ledger", str(ledger), "--dry-run"]) == 0
    assert "2 lines would be added" in capsys.readouterr().out
    assert ledger.read_text().count("[[known]]") == 0
    assert main(["campaign", "add-known", "c", "aten::mm", "--ledger", str(ledger), "--reason", 'a "b" \\ ü']) == 0
    assert main(["campaign", "add-known", "c", "--ledger", str(ledger), "--expires", "2099-01-31"]) == 0
    assert main(["campaign", "add-known", "c", "--ledger", str(ledger)]) == 0
    assert capsys.readouterr().out.endswith(": nothing to add\n")
    settings = read_settings(ledger)
    assert len(settings.tolerance) == 1
    mm, erfinv = settings.known
    assert (mm.operator, mm.platform, mm.kind, mm.reason) == ("aten::mm", "sim", "mismatch", 'a "b" \\ ü')
    assert (erfinv.operator, erfinv.kind, str(erfinv.expires)) == ("aten::erfinv", "error", "2099-01-31")
    # Known ones pass the gate of the report.
    fails = ["campaign", "report", "c", "--fail-on", "mismatch,crash"]
    assert main(fails) == 1
    assert main([*fails, "--known", str(ledger)]) == 0
    assert "known" in capsys.readouterr().out


def test_a_table_of_pyproject(here, tmp_path):
    ledger = tmp_path / "pyproject.toml"
    ledger.write_text('[project]\nname = "mine"\n')
    assert main(["campaign", "add-known", "c", "--ledger", str(ledger)]) == 0
    assert len(read_settings(ledger).known) == 2
    assert ledger.read_text().startswith('[project]\nname = "mine"\n\n[[tool.shadowrun.known]]\n')


def test_lines_of_both_files_count(here, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = '[[tool.shadowrun.known]]\noperator = "*mm"\nplatform = "sim"\nreason = "ticket 1"\n'
    (tmp_path / "pyproject.toml").write_text(line)
    assert main(["campaign", "add-known", str(here / "c")]) == 0
    assert capsys.readouterr().out.endswith("shadowrun.toml: 1 line added\n")
    assert [known.operator for known in read_settings().known] == ["*mm", "aten::erfinv"]


def test_a_ledger_that_is_none_stays_as_it_is(here, tmp_path, capsys):
    for text in ("{", '[known]\noperator = "x"\n'):
        ledger = tmp_path / "ledger.toml"
        ledger.write_text(text)
        assert main(["campaign", "add-known", "c", "--ledger", str(ledger)]) == 2
        assert "bad-settings" in capsys.readouterr().err
        assert ledger.read_text() == text
    assert main(["campaign", "add-known", "c", "--ledger", str(tmp_path / "no" / "ledger.toml")]) == 2
    assert "--ledger" in capsys.readouterr().err


def test_names_of_a_store_become_no_patterns(here):
    import dataclasses

    (cause,) = (c for c in found(here)[1].values() if c.signature.kind == "mismatch")
    for op, target in (("*", "sim"), ("aten::m?", "sim"), ("aten::mm", "*")):
        named = dataclasses.replace(cause, signature=Signature("mismatch", op, "float", "", ""))
        lines, skipped = new_lines([(1, named)], [target], (), "c")
        assert not lines
        assert skipped
    assert known_causes([cause], ["sim"], ()) == {}
