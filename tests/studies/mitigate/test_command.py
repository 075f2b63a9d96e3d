"""`shadowrun mitigate` on real operators."""

from __future__ import annotations

import json

import pytest

from shadowrun.cli.main import main
from shadowrun.cli.studies.mitigate import _specs
from tests.cli.test_output_options import all_formats, check, check_all

PROGRAM = """
import sys
import torch
from torch import nn

net = nn.Sequential(nn.Linear(512, 64), nn.Tanh(), nn.Linear(64, 8))
with torch.no_grad():
    for p in net.parameters():
        p.copy_((torch.arange(p.numel()) * 7919 % 1009 / 1009 - 0.5).reshape(p.shape) / 8)
x = (torch.arange(16 * 512) * 104729 % 10007 / 10007 - 0.5).reshape(16, 512)
for _ in range(20):
    y = net(x)
if "check" in sys.argv and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
    sys.exit("no vector unit")
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text(PROGRAM, encoding="utf-8")
    return "x.py"


def test_what_makes_instruction_sets_agree(script, forked_processes, tmp_path):
    """Kernels with and without vectors add in other orders; float64 and rounding back makes that vanish."""
    platforms = "cpu[threads=1] cpu[isa=default,mkl_cbwr=COMPATIBLE,threads=1]"
    words = (
        "--platforms",
        platforms,
        "--only",
        "float64,truncate=16,tf32=off",
        "--combinations",
        "0",
        "--keep",
        "kept",
    )
    assert main(["mitigate", *words, "-o", "x.json", script]) == 0
    found = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))
    trials = {"+".join(t["mitigations"]): t for t in found["trials"]}
    base, double, short = (trials[name] for name in ("", "float64", "truncate=16"))
    assert base["n_classes"] == 2
    assert 0 < base["remaining_bits"] < base["mantissa_bits"] == 23
    assert (double["n_classes"], double["n_platforms_left"], double["has_effect"]) == (1, 2, True)
    assert short["has_effect"]
    ignored = short["bits_to_ignore"]
    assert ignored is None or not ignored or ignored > 16, "its lowest 16 bits are 0 on both platforms"
    assert found["not_applicable"] == {"tf32=off": "the program made no call on a CUDA device"}
    for trial in found["trials"]:
        assert [p["outcome"] for p in trial["processes"]] == ["recorded"] * 2
        assert all(s["processor"] > 0 and s["wall"] > 0 for s in trial["seconds"])
        assert len(trial["seconds"]) == 2
    assert double["processor_time_ratio"] > 0
    assert base["processor_time_ratio"] == 1
    assert len(list((tmp_path / "kept" / "float64").glob("*.shadowrec"))) == 2


def test_a_platform_that_fails_is_a_row(script, forked_processes, tmp_path, capsys):
    platforms = "cpu[threads=1] cpu[threads=2] cpu[isa=default]"
    words = ("--platforms", platforms, "--only", "threads=1", "--runs", "0", "-o", "x.json", "-f", "md")
    assert main(["mitigate", *words, *all_formats("mitigate", tmp_path), script, "check"]) == 1
    check("md", capsys.readouterr().out)
    check_all("mitigate", tmp_path)
    base, single = json.loads((tmp_path / "x.json").read_text(encoding="utf-8"))["trials"]
    for trial in (base, single):
        assert [p["outcome"] for p in trial["processes"]] == ["recorded", "recorded", "exit status 1"]
        assert trial["processes"][2]["note"] == "no vector unit"
        assert trial["classes"][2] is None
        assert trial["seconds"] == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "Give the program to run"),
        (["x.py"], "Give two platforms or more, such as --platforms 'cpu cpu[threads=1]'; there are 0"),
        (["x.py", "--platforms", "cpu cpu[threads=1]"], "Options of shadowrun come before the program"),
        (["--platforms", "cpu cpu", "x.py"], "there are 1"),
        (["--platforms", "cpu sim", "x.py"], "is of the CPU's settings"),
        (["--grid", "threads=1,2", "y.py"], "The script 'y.py' does not exist"),
        (["--grid", "threads", "x.py"], "--grid 'threads': write a setting with its values"),
        (["--grid", "threads=1,2", "--only", "thread=1", "x.py"], "Did you mean 'threads=1'"),
        (["--grid", "threads=1,2", "--truncate", "60", "x.py"], "--truncate 60: use numbers of bits from 1 to 52"),
        (["--grid", "threads=1,2", "--try", "color=red", "x.py"], "Unknown setting 'color'"),
        (["--grid", "threads=1,2", "--keep", "x.py", "x.py"], "Name a folder"),
        (["--grid", "threads=1,2", "-o", "x.pdf", "x.py"], "x.pdf"),
    ],
)
def test_bad_input(script, capsys, words, message):
    assert main(["mitigate", *words]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


def test_a_program_that_fails_everywhere(script, tmp_path, capsys):
    (tmp_path / "bad.py").write_text("raise SystemExit('no data')", encoding="utf-8")
    assert main(["mitigate", "--grid", "threads=1,2", "bad.py"]) == 2
    assert "Fewer than two platforms ran the program: cpu[threads=1]: exit status 1 no data" in capsys.readouterr().err


def test_platforms_with_spaces_or_commas_between_them():
    assert _specs("cpu cpu[threads=1,isa=avx2],cpu[mkldnn=off]") == [
        "cpu",
        "cpu[threads=1,isa=avx2]",
        "cpu[mkldnn=off]",
    ]
    assert _specs("cpu[") == ["cpu["]
