"""``shadowrun combine``: which files, where to, and what it says."""

import sys
from pathlib import Path

import pytest
import torch

import shadowrun
from shadowrun.cli.main import main


@pytest.fixture(autouse=True)
def ranks(tmp_path, monkeypatch):
    """Files of three ranks, as torchrun's environment makes them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "3")
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        with shadowrun.compare("cpu[threads=1]", file="run.shadowrun"):
            for _ in range(rank + 1):
                torch.ones(3, 3) @ torch.ones(3, 3)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"run.{rank}.shadowrun" for rank in range(3)]


def names():
    return sorted(path.name for path in Path().iterdir())


def test_without_names_the_ranks_of_this_folder(capsys):
    assert main(["combine"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("run.shadowrun: 3 runs (ranks 0-2 of 3), ")
    assert err == ""
    run = shadowrun.load("run.shadowrun")
    assert sum(1 for _ in run.records(op="aten::mm")) == 6
    assert [record.call.rank for record in run.records(op="aten::mm")] == [0, 1, 1, 2, 2, 2]
    assert len(names()) == 4
    assert main(["report", "run.shadowrun"]) == 0
    assert "3 files: ranks 0-2 of 3" in capsys.readouterr().out
    assert main(["coverage", "run.shadowrun", "--fail-under", "100"]) == 0


def test_the_output_is_not_taken_for_a_rank_nor_replaced_unasked(capsys):
    assert main(["combine"]) == 0
    assert main(["combine"]) == 2
    assert "'run.shadowrun' exists. Give --force to replace it" in capsys.readouterr().err
    assert main(["combine", "--force"]) == 0
    assert main(["combine", "run.*", "-o", "run.shadowrun", "--force"]) == 0
    assert len(shadowrun.load("run.shadowrun").sources()) == 3


def test_append(capsys):
    assert main(["combine", "run.2.shadowrun", "run.0.shadowrun", "-o", "all"]) == 0
    assert "2 runs (ranks 0, 2 of 3)" in capsys.readouterr().out
    assert main(["combine", "run.1.shadowrun", "-o", "all", "--append"]) == 0
    assert [source.info.rank for source in shadowrun.load("all").sources()] == [0, 1, 2]


def test_bad_files_are_named_and_left_out_on_demand(capsys):
    Path("run.1.shadowrun").write_text("hello", encoding="utf-8")
    assert main(["combine"]) == 2
    assert "'run.1.shadowrun' is not a shadowrun data file" in capsys.readouterr().err
    assert main(["combine", "--ignore-errors", "--delete"]) == 0
    out, err = capsys.readouterr()
    assert "left out: 'run.1.shadowrun' is not" in err
    assert "2 runs (ranks 0, 2 of 3)" in out
    assert names() == ["run.1.shadowrun", "run.shadowrun"]


def test_delete_spares_the_output():
    assert main(["combine", "run.0.shadowrun", "-o", "all"]) == 0
    assert main(["combine", "all", "run.1.shadowrun", "-o", "all", "--append", "--delete"]) == 0
    assert names() == ["all", "run.0.shadowrun", "run.2.shadowrun"]
    assert len(shadowrun.load("all").sources()) == 2


def test_an_empty_folder(capsys):
    Path("empty").mkdir()
    assert main(["combine", "empty"]) == 2
    assert "has no data file to combine" in capsys.readouterr().err


def test_a_bar_on_a_terminal_only(capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(["combine"]) == 0
    out, err = capsys.readouterr()
    assert "combining" in err
    assert out.startswith("run.shadowrun: 3 runs")
