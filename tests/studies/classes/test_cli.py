"""``shadowrun classes``: formats, known classes, and bad input."""

import csv
import io
import json
import re
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest

from shadowrun.cli.main import main
from shadowrun.errors import DataFileError
from shadowrun.recording.file_format.recording_file import read
from shadowrun.studies.classes import known_classes


def f32(*values):
    return np.array(values, np.float32)


def net(value, *, nan=False):
    """Two calls; the value is what the last one gives."""
    return [
        ("fc", "aten::mm", [], [f32(1, 2, value)]),
        ("act", "aten::relu", [0], [f32(1, np.nan if nan else 2, value)]),
    ]


SKYLAKE = {"device": "cpu", "vendor": "Intel", "architecture": "Skylake", "cores": 2, "cpu_flag_list": ["sse", "avx2"]}
ROME = {"device": "cpu", "vendor": "AMD", "architecture": "Zen 2", "cores": 8, "cpu_flag_list": ["sse", "sse4a"]}


@pytest.fixture
def folder(write, tmp_path):
    write("runs/a.shadowrec", net(3), SKYLAKE)
    write("runs/b.shadowrec", net(np.nextafter(f32(3), f32(4))[0]), ROME)
    write("runs/c.shadowrec", net(3), SKYLAKE)
    return tmp_path / "runs"


def test_a_folder_in_the_terminal(folder, capsys):
    assert main(["classes", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "classes of 3 recordings" in shown
    assert re.search(r"^ +1 act/aten::relu +0 +3 +2 +2 22 of 23", shown, re.MULTILINE)
    assert re.search(r"^a +A\nb +B\nc +A$", shown, re.MULTILINE)
    assert re.search(r"^architecture +the classes +Skylake: 2, 1; Zen 2: 1, 1$", shown, re.MULTILINE)
    assert "relu never lowers the remaining precision yes" in shown
    assert "shadowrun: " not in capsys.readouterr().err


def test_other_formats(folder, tmp_path, capsys):
    files = [tmp_path / f"x.{suffix}" for suffix in ("json", "csv", "md", "html", "txt")]
    options = [word for file in files for word in ("-o", str(file))]
    assert main(["classes", str(folder), "--output-of", "*/*", "--plots", str(tmp_path / "plots"), *options]) == 0
    assert capsys.readouterr().out == ""
    data, rows, markdown, page, text = (file.read_text(encoding="utf-8") for file in files)
    found = json.loads(data)
    assert [(o["output"], o["n_classes"]) for o in found["outputs"]] == [("fc/aten::mm", 2), ("act/aten::relu", 2)]
    assert found["outputs"][0]["remaining_precision"] == [[23, 22], [22, 23]]
    assert [c["n_added"] for c in found["graph"]] == [1, 0]
    records = list(csv.DictReader(io.StringIO(rows)))
    assert [r["class"] for r in records] == list("ABAABA")
    assert records[0]["digest"] == f"{int(read(folder / 'a.shadowrec').ladder(0)[0]):016x}"
    assert "| act/aten::relu | 0 | 3 | 2 |" in markdown
    assert "<svg" not in markdown + text
    pictures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert [ET.fromstring(p)[0].text for p in pictures] == [
        "Dendrogram by remaining precision",
        "Cumulative number of classes",
        "Classes along the graph",
    ]
    plots = sorted((tmp_path / "plots").iterdir())
    assert [p.name for p in plots] == [
        *("curve-1.svg", "curve-2.svg", "dendrogram-1.svg", "dendrogram-2.svg", "graph.svg")
    ]
    for plot in plots:
        ET.parse(plot)


def test_names_of_files_cannot_write_html(write, tmp_path):
    evil = "<script>alert(1)</script>"
    paths = [write(f"x/{i}.shadowrec", net(i), SKYLAKE | {"architecture": f"{evil}{i}"}) for i in (3, 4)]
    module = [(evil, "aten::mm", [], [f32(5)])]
    paths += [write(f"y/{i}.shadowrec", [*net(i), *module], SKYLAKE) for i in (3, 4)]
    for two in (paths[:2], paths[2:]):
        out = tmp_path / "x.html"
        assert main(["classes", *map(str, two), "-o", str(out), "--plots", str(tmp_path)]) == 0
        assert out.read_text(encoding="utf-8").count("<script") == 1
    assert all("<script" not in p.read_text(encoding="utf-8") for p in tmp_path.glob("*.svg"))


def test_no_torch_is_imported(folder):
    code = "import sys; from shadowrun.cli.main import main; status = main(sys.argv[1:]); print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "classes", str(folder), "-f", "html"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("False\n")


def test_by_value(write, capsys):
    paths = [str(write(f"{i}.shadowrec", net(value))) for i, value in enumerate((0.0, -0.0))]
    assert main(["classes", *paths, "-f", "csv"]) == 0
    assert [r["class"] for r in csv.DictReader(io.StringIO(capsys.readouterr().out))] == ["A", "B"]
    assert main(["classes", *paths, "--values", "-f", "csv"]) == 0
    assert [r["class"] for r in csv.DictReader(io.StringIO(capsys.readouterr().out))] == ["A", "A"]


def test_one_class_has_nothing_to_join_nor_to_explain(folder, write, capsys):
    assert main(["classes", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "How near the classes" in shown
    assert "What explains" in shown
    write("runs/b.shadowrec", net(3), ROME)
    assert main(["classes", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^a +A\nb +A\nc +A$", shown, re.MULTILINE)
    assert "How near the classes" not in shown
    assert "What explains" not in shown


def test_repeats(folder, write, capsys):
    write("runs/d.shadowrec", net(7), ROME)
    assert main(["classes", str(folder), "--repeats"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^a +A\nb +B\*$", shown, re.MULTILINE)
    assert "under 60 % of the repeats" in shown
    assert "a platform repeats itself                 no              1  2 b on act/aten::relu step 0" in shown


def test_equal_names_get_their_folders(write, capsys):
    paths = [str(write(f"{folder}/x.shadowrec", net(i))) for i, folder in enumerate(("one", "two"))]
    assert main(["classes", *paths, "-f", "csv"]) == 0
    found = [r["platform"] for r in csv.DictReader(io.StringIO(capsys.readouterr().out))]
    assert found == ["one/x", "two/x"]


def test_files_of_ranks_are_one_recording(write, tmp_path, capsys):
    for machine in "ab":
        for rank in (0, 1):
            value = rank if machine == "a" else 5
            write(f"{machine}.{rank}.shadowrec", net(value), rank=rank, world_size=2)
    assert main(["classes", str(tmp_path), "-f", "csv"]) == 0
    rows = [(r["platform"], r["output"]) for r in csv.DictReader(io.StringIO(capsys.readouterr().out))]
    outputs = ("act/aten::relu", "rank 1 act/aten::relu")
    assert rows == [(machine, output) for output in outputs for machine in "ab"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Name recordings"),
        (["none.shadowrec"], "There is no recording 'none.shadowrec'"),
        (["runs/a.shadowrec"], "two or more recordings to compare, and there is one"),
        (["runs/a.shadowrec", "./runs/a.shadowrec"], "is given twice"),
        (["runs", "empty"], "has no .shadowrec files"),
        (["runs", "text.shadowrec"], "is not a recording"),
        (["runs", "cut.shadowrec"], "The recording 'cut.shadowrec' is damaged"),
        (["nothing.shadowrec", "nothing2.shadowrec"], "have no results to compare"),
        (["runs", "--where", "cores=99"], "and there are none"),
        (["runs", "--where", "colour=red"], "no recording has the fact 'colour'"),
        (["runs", "--output-of", "x/y"], "no recorded call matches"),
        (["runs", "--save", "x"], "it needs --published"),
        (["runs", "--reason", "x"], "use both"),
        (["runs", "--known", "x", "--write-known", "y"], "use one of them"),
        (["runs", "--known", "x", "--values"], "leave out"),
        (["runs", "--known", "none.toml"], "known classes 'none.toml' cannot be read"),
        (["runs", "--plots", "text.shadowrec"], "cannot be made"),
        (["runs", "--published", "x"], "Name recordings"),
        (["--published", "none"], "cannot be read"),
    ],
)
def test_bad_input(folder, write, tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("text.shadowrec").write_text("hello", encoding="utf-8")
    whole = (folder / "a.shadowrec").read_bytes()
    Path("cut.shadowrec").write_bytes(whole[: len(whole) // 2])
    write("nothing.shadowrec", [])
    write("nothing2.shadowrec", [])
    assert main(["classes", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_different_programs_and_inputs_are_said_first(folder, write, tmp_path, capsys):
    other = write("other.shadowrec", [("x", "aten::exp", [], [f32(1)])], provenance={"input:0": "1"}, skipped={})
    same = write("same.shadowrec", net(3), provenance={"input:0": "2"})
    assert main(["classes", str(folder), str(other), str(same)]) == 0
    first, second = re.findall(r"^! (.*(?:\n  .*)*)", capsys.readouterr().out, re.MULTILINE)[:2]
    assert first.startswith("These are recordings of different programs: all have 0 calls in common, of 3")
    assert second.startswith("Inputs or program differ between the recordings: input:0.")


def test_known_classes(folder, tmp_path, capsys):
    file = str(tmp_path / "known_classes.toml")
    assert main(["classes", str(folder), "--write-known", file, "--reason", 'say "so" \x7f']) == 0
    assert "3 recordings, 2 classes: wrote 2 new ones" in capsys.readouterr().out
    content = tomllib.loads(Path(file).read_text(encoding="utf-8"))
    assert [c["name"] for c in content["class"]] == ["Skylake 2", "Zen 2 8"]
    assert content["class"][0]["reason"] == 'say "so" \x7f'
    assert main(["classes", str(folder), "--known", file]) == 0
    assert "passed: 3 recordings are of known classes" in capsys.readouterr().out
    # Again: nothing is new, and the file stays as it is.
    before = Path(file).read_bytes()
    assert main(["classes", str(folder), "--write-known", file]) == 0
    assert Path(file).read_bytes() == before


def test_a_new_class_has_a_distance(folder, write, tmp_path, capsys):
    file = tmp_path / "known_classes.toml"
    main(["classes", str(folder), "--write-known", str(file)])
    new = write("new.shadowrec", net(f32(3).view(np.int32)[0].__add__(5).view(np.float32)), SKYLAKE)
    assert main(["classes", str(new), "--known", str(file)]) == 1
    shown = capsys.readouterr().out
    assert "FAILED: 1 of 1 recordings are of a new class" in shown
    message = "the nearest is 'Skylake 2': 20 of 23 bits agree, at most 7 ULP apart"
    with pytest.raises(AssertionError, match=re.escape(message)):
        known_classes.check(new, file)
    # The same bytes as known for other hardware are not known for this one.
    moved = write("moved.shadowrec", net(3), ROME)
    with pytest.raises(AssertionError, match=re.escape("the nearest is 'Zen 2 8': 22 of 23 bits agree, at most 1 ULP")):
        known_classes.check(read(moved), file)
    fresh = write("fresh.shadowrec", net(3), ROME | {"architecture": "Zen 5"})
    with pytest.raises(AssertionError, match="equal to class 'Skylake 2', which is for other hardware"):
        known_classes.check(fresh, file)
    sign = write("sign.shadowrec", net(-3), SKYLAKE)
    with pytest.raises(AssertionError, match="0 of 23 bits agree: signs or exponents differ"):
        known_classes.check(sign, file)
    other = write("other.shadowrec", [("x", "aten::exp", [], [f32(1)])], SKYLAKE)
    with pytest.raises(AssertionError, match="no known class has these outputs"):
        known_classes.check(other, file)
    assert known_classes.check(folder / "c.shadowrec", file).known == "Skylake 2"


@pytest.mark.parametrize(
    "content",
    [
        "[",
        "class = 1",
        "[[class]]",
        "[[class]]\nname = 'x'\ndate = 2026-01-01\noutput = []\n[class.fingerprint]",
        "[[class]]\nname = 'x'\ndate = 'yesterday'\noutput = []\n[class.fingerprint]",
        "\xff",
    ],
)
def test_damaged_known_classes(tmp_path, content):
    file = tmp_path / "known_classes.toml"
    file.write_text(content, encoding="latin-1")
    with pytest.raises(DataFileError, match=r"known_classes\.toml"):
        known_classes.read_known(file)


def test_a_ladder_of_another_length_is_refused(folder, tmp_path):
    file = tmp_path / "known_classes.toml"
    main(["classes", str(folder), "--write-known", str(file)])
    file.write_text(file.read_text(encoding="utf-8").replace('"float32"', '"float16"'), encoding="utf-8")
    with pytest.raises(DataFileError, match="a ladder of 24 rungs for float16, which has 11"):
        known_classes.read_known(file)
