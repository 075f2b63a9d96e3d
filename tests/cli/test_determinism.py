"""`shadowrun determinism`: fresh processes of a program, then its calls again in this one."""

from __future__ import annotations

import json

import pytest

from shadowrun.cli.main import main
from tests.cli.test_output_options import all_formats, check, check_all

pytestmark = pytest.mark.usefixtures("forked_processes")

UNSEEDED = "import os, torch\ntorch.manual_seed(int.from_bytes(os.urandom(4), 'little'))\ntorch.rand(8) + 1\n"
SEEDED = "import torch\ntorch.manual_seed(0)\ntorch.rand(8, 4) + 1\n"


@pytest.fixture
def script(tmp_path):
    def write(text):
        path = tmp_path / "program.py"
        path.write_text(text)
        return str(path)

    return write


def report_of(tmp_path, *words):
    status = main(["determinism", "-o", str(tmp_path / "out.json"), *words])
    return status, json.loads((tmp_path / "out.json").read_text())


def operator(report, op):
    return next(o for o in report["operators"] if o["op"] == op)


def test_a_seeded_program_holds(tmp_path, script):
    words = ("--runs", "2", "--threads", "1,2", "--batch-slices", "1", "--layouts", "--fail-on", "run,threads,batch")
    status, report = report_of(tmp_path, *words, script(SEEDED))
    assert status == 0
    add = operator(report, "aten::add.Tensor")
    for change in ("run to run", "one process", "threads", "batch slice", "layout"):
        assert add[change]["outcome"] == "holds"
    assert add["run to run"]["n_runs"] == 2
    assert [(r["threads"], r["status"]) for r in report["runs"]] == [(1, 0), (2, 0)] * 2


def test_random_numbers_break_and_what_uses_them_lies_downstream(tmp_path, script, capsys):
    outputs = all_formats("determinism", tmp_path)
    status, report = report_of(tmp_path, "--runs", "2", "--fail-on", "run", "-f", "md", *outputs, script(UNSEEDED))
    assert status == 1
    check_all("determinism", tmp_path)
    assert operator(report, "aten::rand")["run to run"]["outcome"] == "breaks"
    assert operator(report, "aten::rand")["random"]
    assert operator(report, "aten::add.Tensor")["run to run"]["outcome"] == "downstream"
    printed = capsys.readouterr()
    check("md", printed.out)
    assert "torch.manual_seed" in (tmp_path / "all.txt").read_text(encoding="utf-8")
    assert "operators break by run" in printed.err


def test_a_program_that_fails_is_a_row_and_a_status(new_processes, tmp_path, script):
    status, report = report_of(tmp_path, "--runs", "1", script(SEEDED + "raise SystemExit('no data')\n"))
    assert status == 1
    assert [(r["status"], r["message"]) for r in report["runs"]] == [(1, "no data")]


@pytest.mark.parametrize("words", [("--threads", "1,1"), ("--threads", "0"), ("--runs", "0"), ("--batch-slices", "x")])
def test_wrong_counts_are_refused(words, script, capsys):
    with pytest.raises(SystemExit) as end:
        main(["determinism", *words, script(SEEDED)])
    assert end.value.code == 2
    assert "whole number" in capsys.readouterr().err


def test_a_program_is_needed(capsys):
    assert main(["determinism"]) == 2
    assert "missing-script" in capsys.readouterr().err
