"""``shadowrun static``: what a device that is not here lacks of what a program calls."""

import csv
import io
import json
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import shadowrun
from shadowrun.cli.main import main


@pytest.fixture
def recorded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with shadowrun.compare("cpu[threads=1]", file=".shadowrun"):
        for _ in range(3):
            torch.linalg.eig(torch.eye(3))
        q = torch.ones(1, 1, 4, 8)
        F.scaled_dot_product_attention(q, q, q).transpose(0, 1)


def test_what_a_run_would_lack(recorded, capsys):
    assert main(["static", "MPS,cuda,xpu"]) == 0
    shown = capsys.readouterr().out
    assert "mps: 1 operator absent (by native_functions.yaml)" in shown
    assert "cuda: no operator is absent" in shown
    line = next(line for line in shown.splitlines() if "aten::linalg_eig" in line)
    assert line.split() == ["aten::linalg_eig", "3", "absent", "kernel", "unknown"]
    assert "nothing ran" in shown


def test_views_are_looked_up_and_what_is_for_one_device_is_not_blamed(recorded, capsys):
    assert main(["static", "mps", "-f", "csv"]) == 0
    states = {row["operator"]: row["mps"] for row in csv.DictReader(io.StringIO(capsys.readouterr().out))}
    assert states["aten::transpose.int"] == "generic"
    attention = [state for op, state in states.items() if op.endswith("_for_cpu")]
    assert attention == ["specific"]


def test_all_of_aten_in_other_formats(recorded, capsys):
    assert main(["static", "mps,xpu", "--all", "-f", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["static"] is True
    assert len(document["operators"]) > 2500
    n = document["devices"]["mps"]["n_by_state"]
    assert sum(n.values()) == len(document["operators"])
    assert document["devices"]["xpu"]["n_by_state"]["absent"] == 0
    assert 50 < document["devices"]["xpu"]["percent"] < document["devices"]["mps"]["percent"] < 100
    assert main(["static", "mps,xpu", "--all", "-o", "static.md"]) == 0
    page = Path("static.md").read_text(encoding="utf-8")
    assert "| have kernels | " in page
    assert "at least" in page


def test_gate(recorded, capsys):
    assert main(["static", "cuda", "--fail-under", "100"]) == 0
    assert main(["static", "mps", "--fail-under", "99"]) == 1
    assert "mps has" in capsys.readouterr().err


def test_bad_input(recorded, capsys):
    assert main(["static", "abacus"]) == 2
    assert "'abacus'" in capsys.readouterr().err
    assert main(["static", "mps", "--import", "no_such_package"]) == 2
    assert "no_such_package" in capsys.readouterr().err
    assert main(["static", ","]) == 2
    assert "No device is named" in capsys.readouterr().err
    assert main(["static", "mps", "no-such-file"]) == 2
    assert "no-such-file" in capsys.readouterr().err
