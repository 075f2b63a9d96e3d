"""Recordings that somebody made: a report or an error of ours, in moments, however many of what they have.

Each of these ended in a traceback, took all memory, or took hours. A test that hangs is ended after a minute of
processor time.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path

import numpy as np
import pytest

from shadowrun.cli.main import main
from shadowrun.errors import DataFileError
from shadowrun.recording.file_format.recording_file import read
from shadowrun.recording.file_format.recording_writer import Block, Writer
from shadowrun.recording.model import CALL, NONE, RESULT, Context, Form, Kind, Process, sample_positions
from shadowrun.studies.diff.align import renamed
from shadowrun.types import Phase

INT = Form("int32", (2,), (1,))
FLOAT = Form("float32", (2, 2), (2, 1))
PROCESS = Process("a.shadowrec", complete=True)


@pytest.fixture(autouse=True)
def ended(tmp_path, monkeypatch):
    """End a test that hangs; each has a folder of its own."""
    monkeypatch.chdir(tmp_path)

    def stop(*_):
        raise AssertionError("it does not end")

    # Of processor time: a busy machine is no fault.
    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, 60)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)


def calls(n, **columns):
    found = np.zeros(n, CALL)
    found["kernel"], found["occurrence"] = NONE, np.arange(n)
    for name, values in columns.items():
        found[name] = values
    return found


def results(n, **columns):
    found = np.zeros(n, RESULT)
    found["base"] = NONE
    for name, values in columns.items():
        found[name] = values
    return found


def contexts(n, op="aten::mm", **fields):
    return [Context(op, f"m{k}", Phase.FORWARD, "", "cpu", "[]")._replace(**fields) for k in range(n)]


def write(name, call, result, *, given=(), rungs=(), samples=(), rows=(), of=None, forms=(FLOAT,), process=PROCESS):
    """A recording of one block."""
    path = Path(name)
    writer = Writer(path, process)
    for number, context in enumerate(of or contexts(1)):
        writer.context(number, context)
    for number, form in enumerate(forms):
        writer.form(number, form)
    hashes = (np.asarray(column, np.uint64) for column in (rungs, samples, rows))
    writer.block(Block(call, result, np.asarray(given, np.int64), *hashes))
    writer.finish(process)
    return path


def both(capsys, command, *options, status=0):
    """Run a command on both recordings; returns what it printed."""
    assert main([command, "a.shadowrec", "b.shadowrec", *options]) == status
    out, err = capsys.readouterr()
    assert "internal error" not in err
    assert "Warning" not in err
    return out


def whole(shift=0, forms=(FLOAT,), **columns):
    """A call with one result."""
    row = {"n_rungs": 24, "n_samples": 4, **columns}
    return {
        "call": calls(1, n_results=1), "result": results(1, **row), "rungs": np.arange(24) + shift,
        "samples": np.arange(4) + shift, "forms": forms,
    }  # fmt: skip


# -- what forms allow ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        whole(forms=[Form("float64", (2, 2), (2, 1)), FLOAT]),
        whole(forms=[Form("float32", (3,), (1,))]),
        whole(forms=[Form("float32", (-1, -4), (1, 1))]),
        whole(forms=[Form("float32", (2**63 - 1, 2), (1, 1))]),
        whole(forms=[Form("float32", (2,) * 999, (1,) * 999)]),
        whole(n_nan=5),
        whole(n_zero=-1),
        whole(n_neg_zero=2**63 - 1),
        {**whole(n_rungs=0, n_rows=2**31 - 2), "rungs": ()},
        {**whole(forms=[Form("float32", (), ())], n_samples=1, n_rows=2), "samples": [0], "rows": np.arange(48)},
        {**whole(), "process": Process("a", rank=-1)},
        {**whole(), "process": Process("a", fingerprint={str(k): k for k in range(20_000)})},
        {**whole(), "process": Process("a", fingerprint={"cpu_flag_list": ["avx"] * 20_000})},
        {**whole(), "process": Process("a", options={"outputs": ["[" * 50_000]})},
        {**whole(), "of": contexts(1, module="m" * 1_000_000)},
    ],
    ids=[
        "ladder", "samples", "negative size", "2^64 elements", "2^999 elements", "NaNs", "a negative count",
        "a huge count", "rows without a ladder", "rows of a scalar", "rank", "facts", "flags", "pattern", "name",
    ],
)  # fmt: skip
def test_what_no_tensor_has_is_refused(wrong):
    """`diff` and `classes` met them in the midst of their work: overflows, memory without end, wrong indices."""
    with pytest.raises(DataFileError) as caught:
        read(write("a.shadowrec", **wrong))
    assert caught.value.slug == "data-file-corrupt"


def test_the_greatest_tensors_are_read(capsys):
    n = 2**63 - 1
    for name, shift in (("a.shadowrec", 0), ("b.shadowrec", 7)):
        write(name, **whole(shift, forms=[Form("float32", (n,), (1,))], n_nan=shift, n_zero=n))
    for command in ("diff", "classes"):
        both(capsys, command)
    assert sample_positions(n).max() < n
    assert sample_positions(n).min() >= 0


def test_a_recording_of_no_process(capsys):
    import sqlite3

    path = write("a.shadowrec", calls(0), results(0))
    with sqlite3.connect(path) as connection:
        connection.executescript("delete from block; delete from process")
    connection.close()
    write("b.shadowrec", **whole())
    for command in ("diff", "classes"):
        both(capsys, command, status=2)


# -- what refers to each other -------------------------------------------------------------------------


def test_calls_with_one_key(capsys):
    twins = calls(4, n_results=1, n_inputs=(0, 1, 1, 1), occurrence=0)
    row = results(4, n_rungs=24)
    for name in ("a.shadowrec", "b.shadowrec"):
        write(name, twins, row, given=[0, 1, 2], rungs=np.arange(96))
    both(capsys, "classes")


@pytest.fixture
def views():
    """Two recordings of a view of equal dtype, whose bases are of different ones."""
    forms = [FLOAT, Form("float64", (2, 2), (2, 1))]
    for name, base, n in (("a.shadowrec", 0, 24), ("b.shadowrec", 1, 53)):
        rows = results(2, n_rungs=(n, 0), kind=(0, Kind.VIEW), base=(NONE, 0), position=(0, 1), form=(base, 0))
        write(name, calls(1, n_results=2), rows, rungs=np.arange(n) + n, forms=forms)


@pytest.mark.usefixtures("views")
def test_a_view_has_the_ladder_of_another_dtype(capsys):
    both(capsys, "classes")


@pytest.mark.usefixtures("views")
def test_known_classes_of_another_ladder(capsys):
    assert main(["classes", "a.shadowrec", "--write-known", "k.toml"]) == 0
    # Only the view: the base is of another dtype, which is a difference of its own.
    text = Path("k.toml").read_text()
    first, second = text.index("[[class.output]]"), text.rindex("[[class.output]]")
    assert first < second
    Path("k.toml").write_text(text[:first] + text[second:])
    assert main(["classes", "b.shadowrec", "--known", "k.toml"]) == 1
    assert "internal error" not in capsys.readouterr().err


@pytest.mark.parametrize(("dtype", "bits"), [("float32", 0x7FA00000), ("bfloat16", 0x7FA0), ("float64", 0xFFEF << 48)])
def test_signalling_nans_and_great_values(capsys, recwarn, dtype, bits):
    n = {"float32": 24, "bfloat16": 8, "float64": 53}[dtype]
    for name, sample in (("a.shadowrec", bits), ("b.shadowrec", 0x7FEF << 48 if dtype == "float64" else 1)):
        found = whole(n_rungs=n, forms=[Form(dtype, (2, 2), (2, 1))])
        write(name, **{**found, "rungs": np.arange(n) + len(name) * ord(name[0]), "samples": [sample] * 4})
    for command in ("diff", "classes"):
        both(capsys, command)
    assert not recwarn


# -- many ----------------------------------------------------------------------------------------------


def test_many_devices(capsys):
    """Each was tried at each quotation mark of all arguments."""
    n = 30_000
    of = [c._replace(device=f"d{k}", arguments='["x", "y", "z"]') for k, c in enumerate(contexts(n))]
    for name in ("a.shadowrec", "b.shadowrec"):
        write(name, calls(n, context=np.arange(n)), results(0), of=of)
    both(capsys, "diff")


def test_quotation_marks_that_nothing_closes(capsys):
    of = contexts(1, arguments='"' + '\\"' * 1_000_000)
    for name in ("a.shadowrec", "b.shadowrec"):
        write(name, calls(1), results(0), of=of)
    both(capsys, "diff")


def test_results_and_inputs_of_one_call(capsys):
    """The inputs were gone through for each result."""
    n = 30_000
    rows = results(2 * n, n_rungs=24, kind=np.repeat((Kind.LEAF, Kind.RESULT), n), position=255)
    for name, shift in (("a.shadowrec", 0), ("b.shadowrec", 7)):
        rungs = np.concatenate([np.arange(24 * n), np.arange(24 * n) + shift])
        write(name, calls(1, n_results=2 * n, n_inputs=n), rows, given=np.arange(n), rungs=rungs)
    both(capsys, "diff")


def test_outputs_of_one_call(capsys):
    """The results were gone through for each output."""
    n = 60_000
    rows = results(n, n_rungs=1, kind=np.arange(n) // 256 % 2, position=np.arange(n) % 255)
    process = Process("a.shadowrec", options={"outputs": ["*"]})
    for name in ("a.shadowrec", "b.shadowrec"):
        write(name, calls(1, n_results=n), rows, rungs=np.arange(n), forms=[INT], process=process)
    both(capsys, "classes")


def test_outputs_of_many_steps(capsys):
    n = 30_000
    for name in ("a.shadowrec", "b.shadowrec"):
        row = results(n, n_rungs=1)
        write(name, calls(n, n_results=1, step=np.arange(n)), row, rungs=np.arange(n), forms=[INT])
    assert main(["classes", "a.shadowrec", "b.shadowrec"]) == 2
    assert "too-many-outputs" in capsys.readouterr().err


def test_facts_are_explained_once(capsys, monkeypatch):
    """The facts were gone through for each output."""
    from shadowrun.studies.classes import explain

    n, seen = 50, []
    found = explain.deciding_facts
    monkeypatch.setattr(explain, "deciding_facts", lambda *given: seen.append(1) or found(*given))
    for name, rungs in (("a.shadowrec", np.arange(n)), ("b.shadowrec", np.arange(n) // 2 * 2)):
        row = results(n, n_rungs=1)
        write(name, calls(n, n_results=1, step=np.arange(n)), row, rungs=rungs, forms=[INT])
    both(capsys, "classes")
    assert len(seen) == 2


def test_facts_that_are_lists(capsys):
    n = 4000
    for name in ("a", "b"):
        process = Process(name, fingerprint={"flags": [f"{name}{k}" for k in range(n)] + [["x"]]})
        write(f"{name}.shadowrec", **whole(), process=process)
    assert "a0" in both(capsys, "diff")


# -- long ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["diff", "classes"])
def test_long_texts(capsys, command):
    """Reports had a name of megabytes in each cell, and pictures were as wide as it is long."""
    text = "A" * 3_000_000
    for name, shift in (("a.shadowrec", 0), ("b.shadowrec", 7)):
        facts = {text: f"{shift}{text}", "cpu": text + name, "threads": text}
        process = Process("x", argv=(text, name), fingerprint=facts, provenance={"script": name, f"input:{text}": name})
        write(name, **whole(shift), of=contexts(1, arguments=text), process=process)
    for options in ((), ("-f", "html"), ("-f", "md")):
        assert len(both(capsys, command, *options)) < 300_000


def test_control_characters_in_pictures(capsys):
    for name, shift in (("a.shadowrec", 0), ("b.shadowrec", 7)):
        process = Process("x", fingerprint={"cpu": f"\x1b[31m{name}\u202e\x00"})
        write(name, **whole(shift), process=process)
    both(capsys, "classes", "--plots", "plots")
    pictures = [path.read_text(encoding="utf-8") for path in Path("plots").iterdir()]
    assert pictures
    assert not any(c in picture for picture in pictures for c in "\x1b\u202e\x00")


# -- maps and known classes ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["skip = " + "[" * 50_000, f"skip = {'9' * 5000}", f"skip = [0x{'f' * 5000}, -1]", f"op = 0x{'f' * 5000}"],
    ids=["lists", "digits", "skip", "op"],
)
def test_a_map_without_end(capsys, text):
    write("a.shadowrec", **whole())
    Path("m.toml").write_text(f"[[rows]]\n{text}\n")
    assert main(["diff", "a.shadowrec", "a.shadowrec", "--map", "m.toml"]) == 2
    assert "bad-map" in capsys.readouterr().err


def test_a_map_of_many_rows(capsys):
    """Three hundred thousand, in a file of 3 MB, took more than a minute."""
    write("a.shadowrec", **whole())
    for n, status in ((1000, 0), (1001, 2)):
        Path("m.toml").write_text("[[rows]]\n" * n)
        assert main(["diff", "a.shadowrec", "a.shadowrec", "--map", "m.toml"]) == status
    assert "1,001 [[rows]], and 1,000 are read at most" in capsys.readouterr().err


def test_a_path_that_nearly_fits():
    """A pattern of twenty stars took hours."""
    path = "a." * 200 + "b"
    assert renamed(path, {"*a." * 20 + "*c": "x"}) == path


@pytest.mark.parametrize(
    ("pattern", "name", "module", "expected"),
    [
        ("layers.*", "h.*", "layers.3.fc", "h.3.fc"),
        ("*.attn", "*.attention", "a.attnx.attn.q", "a.attnx.attention.q"),
        ("a.*.b.*", "*.*", "a.1.b.2.c", "1.2.c"),
        ("a.*.b", "x", "a.1.b.c", "x.c"),
        ("a.*", "*", "a", "a"),
        ("a", "b", "ab", "ab"),
        ("*", "m.*", "", "m."),
        ("a*b*", "*-*", "a*b1", "*-1"),
    ],
)
def test_stars_of_a_map(pattern, name, module, expected):
    assert renamed(module, {pattern: name}) == expected


@pytest.mark.parametrize("value", ["[" * 50_000, "0x" + "f" * 5000, '"' + "[" * 50_000 + '"'])
@pytest.mark.parametrize("key", ["cores", "shape"])
def test_known_classes_without_end(capsys, key, value):
    write("a.shadowrec", **whole(), process=Process("a", fingerprint={"cores": 4}))
    assert main(["classes", "a.shadowrec", "--write-known", "k.toml"]) == 0
    lines = Path("k.toml").read_text().splitlines()
    changed = [f"{line.partition('=')[0]}= {value}" if key in line.partition("=")[0] else line for line in lines]
    assert changed != lines
    Path("k.toml").write_text("\n".join(changed))
    capsys.readouterr()
    assert main(["classes", "a.shadowrec", "--known", "k.toml"]) == 2
    err = capsys.readouterr().err
    assert "bad-known-classes" in err
    assert len(err) < 2000


def test_facts_that_no_pattern_is_written_for():
    write("a.shadowrec", **whole(), process=Process("a", fingerprint={"cpu": "[" * 50_000}))
    assert main(["classes", "a.shadowrec", "--write-known", "k.toml"]) == 0
    assert main(["classes", "a.shadowrec", "--known", "k.toml"]) == 0


@pytest.mark.parametrize("kind", ["link", "link to nothing", "hard link"])
def test_known_classes_are_written_where_their_name_says(capsys, kind):
    write("a.shadowrec", **whole())
    Path("elsewhere").mkdir()
    other = Path("elsewhere/config.toml").absolute()
    if kind != "link to nothing":
        other.write_text("# mine\n")
    if kind == "hard link":
        Path("k.toml").hardlink_to(other)
    else:
        Path("k.toml").symlink_to(other)
    is_link = kind != "hard link"
    assert main(["classes", "a.shadowrec", "--write-known", "k.toml"]) == 2 * is_link
    assert ("are a link" in capsys.readouterr().err) == is_link
    assert (other.read_text() if other.exists() else "# mine\n") == "# mine\n"
    assert Path("k.toml").is_symlink() or Path("k.toml").read_text().startswith("# mine\n")
    assert other.exists() == (kind != "link to nothing")


# -- published results ---------------------------------------------------------------------------------

_RESULT = {
    "cpu_info": {"flags": [], "vendor_id_raw": "x", "brand_raw": "x", "count": 2},
    "model_type": "m",
    "prediction": {"dtype": "float32", "shape": [1], "bytes": "AAAAAA=="},
}


@pytest.mark.parametrize(
    ("changed", "stem"),
    [
        ({"all_predictions": {"dtype": "float32", "shape": [10**18, 0], "bytes": ""}}, "a"),
        ({"all_predictions": {"dtype": "float32", "shape": [-1, -1], "bytes": "AAAAAA=="}}, "a"),
        ({"all_predictions": [{"dtype": "float32", "shape": [0], "bytes": ""}] * 70_000}, "a"),
        ({"prediction": {"dtype": "float32", "shape": [1e999], "bytes": ""}}, "a"),
        ({"prediction": {"dtype": "float32", "shape": [-1, -1], "bytes": "AAAAAA=="}}, "a"),
        ({"prediction": {"dtype": "float32", "shape": [1] * 300_000, "bytes": "AAAAAA=="}}, "a"),
        ({"prediction": {"dtype": "float32", "shape": [int("9" * 4000)] * 3000, "bytes": ""}}, "a"),
        ({"prediction": {"dtype": "x" * 1_000_000, "shape": [1], "bytes": ""}}, "a"),
        ({"cpu_info": {**_RESULT["cpu_info"], "count": 1e999}}, "a"),
        ({}, "a-m-i99999999999"),
    ],
    ids=[
        "10^18 repeats",
        "negative repeats",
        "70,000 repeats",
        "inf",
        "negative",
        "dimensions",
        "digits",
        "long",
        "cores",
        "sample",
    ],
)
def test_published_results(capsys, changed, stem):
    line = {"path": f"equivalence_classes/{stem}.json", "data": {**_RESULT, **changed}}
    Path("x.jsonl").write_text(json.dumps(line))
    assert main(["classes", "--published", "x.jsonl"]) == 2
    err = capsys.readouterr().err
    assert "data-file-corrupt" in err
    assert len(err) < 2000


def test_published_results_of_lists_without_end(capsys):
    Path("x.jsonl").write_text('{"path": "x", "data": ' + "[" * 100_000)
    assert main(["classes", "--published", "x.jsonl"]) == 2
    assert "data-file-corrupt" in capsys.readouterr().err


def test_a_line_of_published_results_is_bounded(capsys, monkeypatch):
    """A few kilobytes may unpack to one line of any length."""
    import lzma

    from shadowrun.studies.classes import import_published

    monkeypatch.setattr(import_published, "_MAX_LINE", 1 << 16)
    longest = []
    opened = lzma.open

    def spied(path):
        file = opened(path)
        read_line = file.readline
        file.readline = lambda size=-1: longest.append(size) or read_line(size)
        return file

    monkeypatch.setattr(import_published.lzma, "open", spied)
    Path("x.jsonl.xz").write_bytes(lzma.compress(b" " * (1 << 20)))
    assert main(["classes", "--published", "x.jsonl.xz"]) == 2
    assert "data-file-corrupt" in capsys.readouterr().err
    assert longest == [(1 << 16) + 1]


# -- where pictures and grids are written --------------------------------------------------------------


def test_pictures_are_not_written_through_links(capsys):
    Path("mine").write_text("mine")
    Path("plots").mkdir()
    Path("plots/curve-1.svg").symlink_to(Path("mine").absolute())
    for name, shift in (("a.shadowrec", 0), ("b.shadowrec", 7)):
        write(name, **whole(shift))
    both(capsys, "classes", "--plots", "plots")
    assert Path("mine").read_text() == "mine"


@pytest.mark.parametrize(
    "words", [("classes", "--plots"), ("determinism", "--keep"), ("record", "--grid", "threads=1", "--out")]
)
def test_a_folder_that_is_a_link_gets_no_files(words, capsys):
    """As the folders of scripts: each option that names a folder to write to."""
    Path("mine").mkdir()
    Path("out").symlink_to("mine")
    Path("program.py").write_text("import torch; torch.ones(2) + 1\n")
    for name in ("a.shadowrec", "b.shadowrec"):
        write(name, **whole())
    given = ("a.shadowrec", "b.shadowrec") if words[0] == "classes" else ("program.py",)
    assert main([*words, "out", *given]) == 2
    assert "is a link" in capsys.readouterr().err
    assert not list(Path("mine").iterdir())


def test_a_picture_that_cannot_be_written(capsys):
    Path("plots/curve-1.svg").mkdir(parents=True)
    for name, shift in (("a.shadowrec", 0), ("b.shadowrec", 7)):
        write(name, **whole(shift))
    both(capsys, "classes", "--plots", "plots", status=2)


def test_a_grid_is_not_written_through_links():
    from shadowrun.platforms.spec import parse
    from shadowrun.studies.grid import FILE, record_grid

    Path("mine").write_text("mine")
    folder = Path("grid")
    folder.mkdir()
    for name in (FILE, "threads-1.shadowrec.log", "threads-1.shadowrec"):
        (folder / name).symlink_to(Path("mine").absolute())
    Path("program.py").write_text("import torch; torch.ones(2) + 1\n")
    record_grid([parse("cpu[threads=1]")], ["program.py"], folder)
    assert Path("mine").read_text() == "mine"
    assert {p.name for p in folder.iterdir()} >= {FILE, "threads-1.shadowrec"}


@pytest.mark.parametrize("is_link", [False, True])
def test_a_recording_that_was_there_is_not_read_as_that_of_a_process(is_link):
    """A process that fails early writes none."""
    from shadowrun.studies.determinism.processes import record_once

    folder = Path("kept")
    folder.mkdir()
    there = folder / "threads=default.run=000.shadowrec"
    write("a.shadowrec" if is_link else str(there), **whole())
    if is_link:
        there.symlink_to(Path("a.shadowrec").absolute())
    run = record_once(["missing.py"], folder, 0, 0)
    assert (run.path, run.status) == (None, 2)
    assert Path("a.shadowrec").exists() == is_link


def test_a_recording_without_its_header_is_named(capsys):
    """It was taken for a file of another kind: "give two recordings, or two data files"."""
    write("a.shadowrec", **whole())
    broken = Path("b.shadowrec")
    broken.write_bytes(bytes(100) + Path("a.shadowrec").read_bytes()[100:])
    both(capsys, "classes", status=2)
    for given in (["a.shadowrec", "b.shadowrec"], ["b.shadowrec", "a.shadowrec"], ["b.shadowrec", "b.shadowrec"]):
        assert main(["diff", *given]) == 2
        said = capsys.readouterr().err
        assert "'b.shadowrec' is not a recording" in said
        assert "data-file-not-ours" in said
    broken.rename("b.shadowrun")
    assert main(["diff", "a.shadowrec", "b.shadowrun"]) == 2
    assert "give two recordings, or two data files" in capsys.readouterr().err
