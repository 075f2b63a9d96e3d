"""`shadowrun campaign report` on a store that was written by hand."""

import json

import pytest

from shadowrun.cli.main import main
from shadowrun.studies.campaign.campaign_folder import CampaignFolder, CampaignSettings
from shadowrun.studies.campaign.oracles import FIRED, to_mask
from shadowrun.studies.campaign.store import CampaignStore
from shadowrun.studies.campaign.tables import FindingRow, ResultRow, VariantRow

MM = FindingRow("aten::mm", "f32", "mismatch", "reduced precision", "inputs rounded to bf16", "evidence", "forward")


@pytest.fixture
def folder(tmp_path):
    programs = tmp_path / "programs"
    programs.write_bytes(b"none is read")
    made = CampaignFolder.create(
        tmp_path / "c", CampaignSettings(("sim",), n=4, simulated=True, flaws=("matmul-in-bf16",)), programs
    )
    store = CampaignStore.begin(made.combined, made.info())
    with store.written():
        for n in range(3):
            store.add_variant(VariantRow(n, "0a", n, mutators=("insert",)))
        store.add_variant(VariantRow(3, "0a", 2, duplicate_of=2, mutators=("insert",)))
        store.invalidate(0, "the reference raises RuntimeError: no", "[]")
        mask = to_mask(frozenset({"shadowrun", "bitwise", FIRED}))
        store.add_result(ResultRow(1, 0, "finding", oracles=mask, n_calls=3, ops={"aten::mm": "ok"}, findings=(MM,)))
        store.add_result(ResultRow(2, 0, "ok", oracles=0, n_calls=2, ops={"aten::relu": "ok"}))
    store.close()
    return made.path


def test_the_figures_are_those_of_the_store(folder, tmp_path, capsys):
    assert main(["campaign", "report", str(folder), "-o", str(tmp_path / "r.json"), "-f", "txt"]) == 0
    data = json.loads((tmp_path / "r.json").read_text())
    assert (data["n_variants"], data["n_duplicates"]) == (3, 1)
    assert data["validity"]["insert"] == [3, 2]
    assert data["platforms"][0]["n_fired"] == 1
    assert data["root_causes"][0]["n_variants"] == 1
    assert "aten::mm  mismatch float" in capsys.readouterr().out


def test_the_gate_and_what_is_new(folder, tmp_path, capsys):
    assert main(["campaign", "report", str(folder), "--fail-on", "mismatch", "-o", str(tmp_path / "r.html")]) == 1
    assert capsys.readouterr().err.startswith("shadowrun: FAILED: 1 root cause")
    assert main(["campaign", "report", str(folder), "--fail-on", "mismatch"]) == 1
    assert main(["campaign", "report", str(folder), "--fail-on", "crash", "--before", str(folder)]) == 0
    assert "FAILED: 1 root cause" in capsys.readouterr().out
