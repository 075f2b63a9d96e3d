"""What a file costs is bounded by its bytes: in each reader as far as it thought of it, and in one place for all.

The files here are of a few megabytes. Before, each took all memory, or more than a minute.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import resource
import sqlite3
import struct
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch

import shadowrun
from shadowrun import limits
from shadowrun.cli import main as cli
from shadowrun.cli.main import build_parser, main
from shadowrun.errors import DataFileError, UsageError
from shadowrun.limits import ResourceLimits
from shadowrun.recording.file_format.recording_file import read
from shadowrun.recording.file_format.recording_writer import is_recording
from shadowrun.settings import read_settings
from shadowrun.store import DataFile, validation
from shadowrun.store.salvage import OnDisk, Pages
from shadowrun.studies.classes.import_published import read_published
from shadowrun.studies.slowdown.calls import read_mix
from shadowrun.studies.sweep import scripts
from shadowrun.studies.sweep.cases import Case, CaseFinding, CaseOutcome, Kind, Part
from shadowrun.studies.sweep.coverage_file import CoverageFile, SweepInfo
from shadowrun.studies.sweep.recorded_calls import read_calls
from shadowrun.types import Cause, Phase, RunInfo, Status, Verdict

LONG = 100_000
MANY = 1_000

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def edit(path, *statements):
    connection = sqlite3.connect(path)
    for statement, *values in statements:
        connection.execute(statement, values)
    connection.commit()
    connection.close()


def run_file(path="x.shadowrun", info=None):
    data = DataFile.create(Path(path), info or RunInfo("npu", "cpu", wall_s=1.0))
    verdict = Verdict(Status.MISMATCH, Cause.IMPLEMENTATION, "x", "y", 0.5)
    place = data.context_id("aten::cat", "f32[2]", ("f32",), "[2]", "m", Phase.FORWARD, "x.py:1", "npu")
    data.add((0, 0, place, data.verdict_id(verdict, ""), 1.0, 1.0, 1.0, 1.0))
    data.close()
    return Path(path)


def many(n, columns, table):
    """Insert `n` rows into a table; `i` counts them."""
    return (
        f"with recursive n(i) as (select 1 union all select i + 1 from n where i < {n}) "
        f"insert into {table} select {columns} from n, {table} where {table}.rowid = (select min(rowid) from {table})"
    )


def taken(act):
    """Peak of the memory that a call takes, in bytes."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


# -- one place for all ---------------------------------------------------------------------------------


linux = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere memory is not bounded")


@linux
@pytest.mark.parametrize("imported", [[], ["--import", "json"]])
def test_memory_of_a_command_that_reads_is_bounded(imported):
    """Whatever takes it: here, a reader that knows no bounds. What a package takes at its import is not counted."""
    run_file()
    code = (
        "import sys, shadowrun.cli.commands.report as report\n"
        "from shadowrun import limits\n"
        "limits._MEMORY = 1 << 20\n"
        "report.run = lambda args: bytearray(200 << 20) and 0\n"
        "from shadowrun.cli.main import main; sys.exit(main())"
    )
    words = [sys.executable, "-c", code, "report", "x.shadowrun", *imported]
    ended = subprocess.run(words, check=False, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 2, ended
    assert "file-too-costly" in ended.stderr
    assert "Traceback" not in ended.stderr
    unbounded = subprocess.run([*words, "--no-limits"], check=False, capture_output=True, text=True, timeout=100)
    assert (unbounded.returncode, unbounded.stderr) == (0, "")


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes")
def test_time_of_a_command_that_reads_is_bounded():
    """Also where nothing of Python runs, as in a pattern or a query."""
    run_file()
    code = (
        "import sys, re, shadowrun.cli.commands.report as report\n"
        "from shadowrun import limits\n"
        "limits._SECONDS = 1\n"
        "report.run = lambda args: bool(re.match('(a*)*b', 'a' * 60))\n"
        "from shadowrun.cli.main import main; sys.exit(main())"
    )
    words = [sys.executable, "-c", code, "report", "x.shadowrun"]
    ended = subprocess.run(words, check=False, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 2, ended
    assert "file-too-costly" in ended.stderr


@linux
@pytest.mark.parametrize("written", ["r.csv", "temporary"])
def test_files_that_a_command_that_reads_writes_are_bounded(written):
    """A table repeats a text for each call, as a query may in its temporary file: 2 MB became gigabytes."""
    path = run_file()
    edit(
        path,
        (many(MANY, "i, 0, context_id, verdict_id, 1, 1, null, null", "call"),),
        ("update op set name = ?", "aten::" + "a" * 2 * LONG),
    )
    query = "select op.name, seq from call join context on context.id = context_id join op on op.id = op_id order by 1"
    code = (
        "import sys, shadowrun\n"
        "from shadowrun import limits\n"
        "from shadowrun.cli.commands import export\n"
        "limits._MEMORY = 100 << 20\n"
        f"if {written == 'temporary'}:\n"
        f"    export.run = lambda args: list(shadowrun.load(args.data)._data.query({query!r})) and 0\n"
        "from shadowrun.cli.main import main; sys.exit(main())"
    )
    words = [sys.executable, "-c", code, "export", "x.shadowrun", "--records", "r.csv"]
    ended = subprocess.run(words, check=False, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 2, ended
    assert "file-too-costly" in ended.stderr
    assert not list(Path().glob("r.csv*"))


@linux
def test_a_report_goes_to_the_end_of_a_long_log():
    run_file()
    with Path("log").open("ab") as log:
        log.truncate(3 << 30)  # a hole, which takes no disk
        log.seek(0, os.SEEK_END)
        ended = subprocess.run(
            [sys.executable, "-m", "shadowrun", "report", "x.shadowrun"],
            check=False, stdout=log, stderr=subprocess.PIPE, text=True, timeout=100,
        )  # fmt: skip
    assert ended.stderr == ""
    assert Path("log").stat().st_size > 3 << 30


@linux
@pytest.mark.parametrize("costly", ["bytearray(200 << 20)", "re.match('(a*)*b', 'a' * 60)"])
def test_a_sweep_has_its_files_read_in_bounds_first(costly):
    """In its own process, beside its workers, they have none."""
    run_file()
    code = (
        "import sys, re, shadowrun.cli.studies.sweep as sweep\n"
        "from shadowrun import limits\n"
        "limits._SECONDS, limits._MEMORY = 1, 1 << 20\n"
        f"sweep.read_first = lambda args: {costly}\n"
        "from shadowrun.cli.main import main; sys.exit(main())"
    )
    words = [sys.executable, "-c", code, "sweep", "--from", "x.shadowrun", "--target", "sim", "--list"]
    ended = subprocess.run(words, check=False, capture_output=True, text=True, timeout=100)
    assert (ended.returncode, ended.stdout) == (2, ""), ended
    assert "file-too-costly" in ended.stderr
    unbounded = subprocess.run([*words, "--no-limits"], check=False, capture_output=True, text=True, timeout=100)
    assert unbounded.returncode == 0, unbounded
    assert "aten::cat" in unbounded.stdout


@pytest.mark.parametrize("damaged", ["x.shadowrun", "x.shadowcov", "c/campaign.json"])
def test_what_is_read_first(damaged):
    run_file()
    CoverageFile.begin(Path("x.shadowcov"), SweepInfo("npu", "cpu")).close()
    Path("c").mkdir()
    Path(damaged).write_bytes(b"no such file")
    words = "campaign resume c" if damaged.startswith("c") else "sweep --file x.shadowcov --from x.shadowrun"
    args = cli.build_parser().parse_args(words.split())
    with pytest.raises(DataFileError, match=damaged):
        args.read_first(args)


@pytest.mark.parametrize("name", cli.READ)
def test_each_command_that_reads_has_the_option(name, capsys):
    with pytest.raises(SystemExit):
        main([name, "--help"])
    assert "--no-limits" in capsys.readouterr().out


def test_an_allowance_grows_with_the_files():
    Path("a").write_bytes(b"x" * 3_000_000)
    Path("folder").mkdir()
    Path("folder/b.shadowrec").write_bytes(b"x" * 1_000_000)
    with Path("holes").open("wb") as file:
        file.truncate(1 << 40)
    Path("folder/up").symlink_to(Path.cwd())
    none = ResourceLimits.for_files(["", "no such file", "x" * 9000, "a\0b", "*nothing*"])
    assert none.n_bytes == 0
    assert ResourceLimits.for_files(["a", "a", "./a"]).n_bytes == 3_000_000
    assert ResourceLimits.for_files(["a", "folder"]).n_bytes == 4_000_000
    assert ResourceLimits.for_files(["fold*"]).n_bytes == 1_000_000
    assert ResourceLimits.for_files(["holes"]).n_bytes < 1_000_000
    assert ResourceLimits.for_files(["a"]).memory > none.memory
    assert ResourceLimits.for_files(["a"]).seconds > none.seconds


def test_further_names_of_a_file_and_files_that_no_reader_opens_allow_nothing():
    """An archive has both for few bytes: a hard link, and a file that is long and compresses well."""
    Path("d/error").mkdir(parents=True)
    Path("d/x.shadowrec").write_bytes(b"x" * 1_000_000)
    Path("d/error/big").write_bytes(b"x" * 1_000_000)
    for n in range(20):
        Path(f"d/error/{n}.shadowrec").hardlink_to("d/x.shadowrec")
    assert ResourceLimits.for_files(["d"]).n_bytes == 1_000_000
    assert ResourceLimits.for_files(["d", "d/error/1.shadowrec", "d/error/2.shadowrec"]).n_bytes == 1_000_000


@pytest.mark.parametrize("name", ["run.3.shadowrun", ".shadowrun", ".shadowrun.3"])
def test_files_of_ranks_count_in_a_folder(name):
    Path("d").mkdir()
    Path("d", name).write_bytes(b"x" * 1_000_000)
    assert ResourceLimits.for_files(["d"]).n_bytes == 1_000_000


@pytest.mark.parametrize("words", [["known", "x.shadowrun"], ["classes", "a.shadowrec", "--experiment", "error"]])
def test_words_that_are_no_files_allow_nothing(words, monkeypatch):
    """Defaults and names of settings, of which a folder beside the file may have the name."""
    for name in ("error", "mismatch", "npu"):
        Path(name).mkdir()
    seen = []
    monkeypatch.setattr(cli.ResourceLimits, "for_files", lambda names, packed: seen.append(list(names)))
    monkeypatch.setattr(cli.child_process, "in_child", lambda _: 0)
    monkeypatch.setattr(sys, "argv", ["shadowrun", *words])
    main([*words])
    assert seen == [[words[1]]]


# Arguments of these names that are written, or that are no files.
WRITTEN = {"output", "records", "trace", "badge", "write", "save", "plots", "left_out"}


def test_all_files_that_commands_read_are_known():
    kinds = re.compile(r"^[AB]$|FILE|DATA|DIR|RECORDING|SOURCE")
    readers = [
        p for p in commands_of(build_parser()) if any(map(p.get_default, ("reads", "read_first", "reads_and_runs")))
    ]
    names = {action.dest for p in readers for action in p._actions if kinds.search(str(action.metavar))}
    assert names - WRITTEN == set(cli.FILES_TO_READ)


def commands_of(parser):
    """Parsers of commands and of their actions."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield command
                yield from commands_of(command)


def test_a_bound_of_the_user_stays(monkeypatch):
    """Who limits the processor time of a shell means it."""
    set_to = []
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limit: set_to.append((kind, limit)))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (7, 9))
    ResourceLimits.for_files([]).bound_time_and_disk()
    assert [limit for kind, limit in set_to if kind != resource.RLIMIT_CORE] == [(7, 9), (7, 9)]


# -- trees of pages --------------------------------------------------------------------------------------


def deepen(path, table, levels):
    """Put pages in front of a table, each of which leads to the next: SQLite's own check calls itself for each."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("pragma page_size = 512")
    connection.execute("vacuum")
    ((root,),) = connection.execute("select rootpage from sqlite_master where name = ?", (table,)).fetchall()
    ((n,),) = connection.execute("pragma page_count").fetchall()
    connection.execute("pragma writable_schema = on")
    connection.execute("update sqlite_master set rootpage = ? where name = ?", (n + 1, table))
    connection.close()
    places = [*range(n + 2, n + levels + 1), root]
    pages = b"".join(struct.pack(">BHHHBI500x", 5, 0, 0, 512, 0, place) for place in places)
    data = bytearray(path.read_bytes()) + pages
    data[28:32] = (n + levels).to_bytes(4, "big")
    data[92:96] = data[24:28]  # SQLite believes the number of pages only then
    path.write_bytes(data)


def test_a_tree_of_a_hundred_thousand_levels():
    """It ended the process by SIGSEGV, also that of a program that loads it."""
    path = run_file()
    deepen(path, "site", 200_000)
    with pytest.raises(DataFileError, match="too deep"):
        shadowrun.load(path)


def test_a_tree_of_a_coverage_file_and_of_a_recording():
    CoverageFile.begin(Path("x.shadowcov"), SweepInfo("npu", "cpu")).close()
    with shadowrun.record("x.shadowrec"):
        torch.ones(2) + 1
    deepen(Path("x.shadowcov"), "operator", 30)
    deepen(Path("x.shadowrec"), "form", 30)
    with pytest.raises(DataFileError, match="too deep"):
        CoverageFile.open(Path("x.shadowcov"))
    with pytest.raises(DataFileError, match="too deep"):
        read(Path("x.shadowrec"))


@pytest.mark.parametrize("page", [512, 65536])
def test_a_page_leads_to_pages_that_there_are_not(page):
    """No file system goes to such a place; and a set of all such numbers took 46 bytes for each byte of the file."""
    path = run_file()
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute(f"pragma page_size = {page}")
    connection.execute("vacuum")
    ((root,),) = connection.execute("select rootpage from sqlite_master where name = 'site'").fetchall()
    connection.close()
    data = bytearray(path.read_bytes())
    below = [*range(2**31, 2**31 + 50), 2**32 - 1]
    head = struct.pack(">BHHHBI", 5, 0, len(below) - 1, 0, 0, below[-1])
    places = [page - 4 * k for k in range(1, len(below))]
    inner = head + struct.pack(f">{len(places)}H", *places)
    inner = inner.ljust(page - 4 * len(places), b"\0") + struct.pack(f">{len(places)}I", *below[:-1])
    data[(root - 1) * page : root * page] = inner
    path.write_bytes(data)
    seen, plain = set(), validation._pages_below
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(validation, "_pages_below", lambda file, n, size: seen.add(n) or plain(file, n, size))
        with pytest.raises(DataFileError, match="is damaged"):
            shadowrun.load(path)
    assert root in seen
    assert max(seen) <= len(data) // page


# -- texts that many rows refer to ---------------------------------------------------------------------


def test_contexts_of_an_operator_with_a_long_name():
    path = run_file()
    columns = "i + 10, op_id, inputs, dtypes, shapes, 'm' || i, phase, site_id, device"
    edit(
        path,
        (many(MANY, columns, "context"),),
        (many(MANY, "i, 0, i + 10, verdict_id, 1, 1, null, null", "call"),),
        ("update op set name = ?", "aten::" + "a" * LONG),
        ("update site set text = ?", "b" * LONG),
    )
    assert taken(lambda: shadowrun.load(path).findings()) < 60 * LONG


@pytest.mark.parametrize("read", [read_calls, read_mix])
def test_calls_that_are_rebuilt_take_no_disk(read):
    """SQLite sorted them by name, in temporary files: a file of 2 MB took 30 GB."""
    path = run_file()
    columns = "i + 10, op_id, 'f32[' || i || ']', dtypes, shapes, module, phase, site_id, device"
    edit(
        path,
        (many(MANY, columns, "context"),),
        (many(MANY, "i, 0, i + 10, verdict_id, 1, 1, null, null", "call"),),
        ("update op set name = ?", "aten::" + "a" * LONG),
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (40 * LONG, hard))
    try:
        read(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_calls_of_a_context_with_long_texts():
    path = run_file()
    edit(
        path,
        (many(MANY, "i, 0, context_id, verdict_id, 1, 1, null, null", "call"),),
        ("update verdict set evidence = ?", "e" * LONG),
        ("update context set inputs = ?, module = ?", "i" * LONG, "m" * LONG),
    )
    assert taken(lambda: list(shadowrun.load(path).records())) < 60 * LONG


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("no end within 5 s, more than 2 GiB", (5.0, 2 << 30)),
        ("no end within 1e+03 s", (1000.0, 4 << 30)),
        ("no end within 1.2.3 s, more than ... GiB", (60.0, 4 << 30)),  # no numbers, but for a pattern
        ("no end within 9e999 s, more than 9e999 GiB", (3600.0, 1024 << 30)),
    ],
)
def test_limits_that_a_coverage_file_names(text, limits):
    assert scripts._limits(text) == limits


def test_cases_of_a_finding_with_long_texts():
    path = Path("x.shadowcov")
    file = CoverageFile.begin(path, SweepInfo("npu", "cpu"))
    for sample in range(MANY):
        found = CaseFinding(Kind.MISMATCH, "aten::exp", "", "implementation", "x", "y")
        file.add(Case("exp", "float32", Part.FORWARD, sample), CaseOutcome((found,)))
    file.close()
    edit(
        path,
        ("update finding set message = ?, op = ?", "m" * LONG, "o" * LONG),
        ("update operator set name = ?", "n" * LONG),
    )
    file = CoverageFile.open(path)
    assert taken(lambda: list(file.results())) < 60 * LONG
    file.close()


def test_captured_calls_of_many_findings(monkeypatch):
    """All of them were read again for each finding."""
    from shadowrun.analysis import findings

    path = run_file()
    numbers = "with recursive n(i) as (select 10 union all select i + 1 from n where i < 300)"
    ops = f"{numbers} insert into op select i, 'o' || i from n"
    edit(
        path,
        (ops,),
        (many(200, "i + 10, i + 10, inputs, dtypes, shapes, module, phase, site_id, device", "context"),),
        (many(200, "i, 0, i + 10, verdict_id, 1, 1, null, null", "call"),),
        ("insert into capture select seq, seq || '.pt', 1 from call",),
    )  # fmt: skip
    asked = []
    read = findings.captured_calls
    monkeypatch.setattr(findings, "captured_calls", lambda data: asked.append(1) or read(data))
    found = shadowrun.load(path).findings()
    assert len(found) == 201
    assert all(finding.kept == (finding.first_seq,) for finding in found)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("table", "column"), [("form", "dtype"), ("form", "layout"), ("tensor", "name"), ("context", "device")]
)
def test_what_torch_names_is_short(table, column):
    """Queries compare it for each difference."""
    path = run_file()
    edit(
        path,
        ("insert into form values (0, 'f32', '[2]', '[1]', 'cpu', 'strided')",),
        ("insert into tensor values (0, 'output 0', 0, 0, 2)",),
        (f"update {table} set {column} = ?", "a" * LONG),
    )
    with pytest.raises(DataFileError, match=f"{table}.{column}"):
        DataFile.open(path)


# -- salvage -------------------------------------------------------------------------------------------


def varint(value):
    """As SQLite writes a whole number of 64 bits, in nine bytes."""
    value &= 2**64 - 1
    first = [128 | (value >> 8) >> 7 * k & 127 for k in reversed(range(8))]
    return bytes([*first, value & 255])


def test_a_row_of_negative_length_gives_nothing_back(tmp_path):
    """What a file may have read was a sum of lengths, and a negative one made it any number."""
    size = 4096
    header = bytearray(b"SQLite format 3\0".ljust(100, b"\0"))
    header[16:18] = size.to_bytes(2, "big")
    first = (bytes(header) + b"\x0d" + bytes(7)).ljust(size, b"\0")
    leaf = bytearray(size)
    negative, row = varint(-(2**62)) + varint(1) + bytes(4), varint(3) + varint(2) + b"\x02\x0fa"
    leaf[size - 100 : size - 100 + len(negative)] = negative
    leaf[size - 60 : size - 60 + len(row)] = row
    leaf[:8] = b"\x0d\0\0" + (2).to_bytes(2, "big") + bytes(3)
    leaf[8:12] = (size - 100).to_bytes(2, "big") + (size - 60).to_bytes(2, "big")
    path = tmp_path / "x"
    path.write_bytes(first + bytes(leaf))
    with path.open("rb") as file:
        pages = Pages(OnDisk(file))
        most = pages._left
        assert list(pages.rows(2)) == [(2, ("a",))]
        assert pages._left <= most
        assert pages.bad == {2}


# -- published results ---------------------------------------------------------------------------------


def published(**changes):
    result = {"cpu_info": {"flags": [], "vendor_id_raw": "x", "brand_raw": "x", "count": 2}, "model_type": "m"}
    result |= {"prediction": {"dtype": "float32", "shape": [1], "bytes": "AAAAAA=="}} | changes
    return json.dumps({"path": "equivalence_classes/a.json", "data": result})


def test_published_repeats_have_elements():
    """A line of two hundred bytes had 65,000 results of nothing, each of which was digested."""
    Path("x.jsonl").write_text(published(all_predictions={"dtype": "float32", "shape": [65_000, 0], "bytes": ""}))
    with pytest.raises(DataFileError, match="0 bytes"):
        read_published("x.jsonl")


def test_published_results_are_counted_over_all_lines(monkeypatch):
    from shadowrun.studies.classes import import_published

    monkeypatch.setattr(import_published, "_MAX_RESULTS", 3)
    Path("x.jsonl").write_text("\n".join([published()] * 3))
    assert read_published("x.jsonl")
    Path("x.jsonl").write_text("\n".join([published()] * 4))
    with pytest.raises(DataFileError, match="more than 3 results"):
        read_published("x.jsonl")


def test_published_lines_unpack_in_proportion(monkeypatch):
    import lzma

    from shadowrun.studies.classes import import_published

    monkeypatch.setattr(import_published, "_MIN_BYTES", 1 << 16)
    Path("x.jsonl.xz").write_bytes(lzma.compress((b" " * 1000 + b"\n") * 1000))
    with pytest.raises(DataFileError, match="in all"):
        read_published("x.jsonl.xz")


# -- what is recorded never, and a file may say --------------------------------------------------------


@pytest.mark.parametrize("status", Status)
@pytest.mark.parametrize("op", ["compiled::graph 0", "aten::cat"])
def test_any_status_of_any_call(status, op, capsys):
    """A region that was unsupported was an internal error of `report`."""
    path = run_file()
    edit(path, ("update op set name = ?", op), ("update outcome set status = ?", status))
    for words in (["report"], ["export", "-f", "json"], ["coverage"], ["diff", str(path)], ["repro"], ["explain"]):
        main([words[0], str(path), *words[1:]])
        assert "internal error" not in capsys.readouterr().err


# -- files that are none -------------------------------------------------------------------------------


@pytest.fixture(params=["pipe", "device", "large", "key"])
def endless(request):
    """A file without an end, as an archive can bring it."""
    path = Path("x.toml")
    if request.param == "pipe":
        if not hasattr(os, "mkfifo"):
            pytest.skip("no pipes")
        os.mkfifo(path)
    elif request.param == "device":
        if not Path("/dev/zero").exists():
            pytest.skip("no such device")
        path.symlink_to("/dev/zero")
    elif request.param == "key":
        # It took memory of the square of its length: a gigabyte.
        path.write_text(".".join("a" * 20_000) + " = 1")
    else:
        path.write_bytes(b"# " + b"x" * (limits._MAX_TEXT + 1))
    return path


def test_settings_without_end(endless):
    with pytest.raises(UsageError, match=r"regular file|more than"):
        read_settings(endless)


@pytest.mark.parametrize(
    "words", [("diff", "a.shadowrec", "a.shadowrec", "--map"), ("classes", "a.shadowrec", "--known")]
)
def test_maps_and_known_classes_without_end(endless, words, capsys):
    from shadowrun.recording.file_format.recording_writer import Writer
    from shadowrun.recording.model import Process

    Writer(Path("a.shadowrec"), Process("a")).finish(Process("a", complete=True))
    assert main([*words, str(endless)]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes")
@pytest.mark.parametrize("words", [("diff", "x.shadowrec", "x.shadowrec"), ("support", "x.shadowrec")])
def test_a_pipe_is_no_recording(words, capsys):
    """To open it waited for somebody who writes."""
    os.mkfifo("x.shadowrec")
    assert not is_recording(Path("x.shadowrec"))
    assert main(list(words)) == 2
    assert "Traceback" not in capsys.readouterr().err


# -- what is printed beside reports --------------------------------------------------------------------

EVIL = "\x1b]0;own\x07\x1b[31m\u202e"


def test_a_gate_prints_a_platform_as_text(capsys):
    file = CoverageFile.begin(Path("x.shadowcov"), SweepInfo(f"npu{EVIL}", "cpu"))
    file.add(Case("exp", "float32", Part.FORWARD, 0), CaseOutcome((CaseFinding(Kind.MISMATCH, "aten::exp"),)))
    file.close()
    assert main(["support", "x.shadowcov", "--fail-under", "99"]) == 1
    err = capsys.readouterr().err
    assert "FAILED" in err
    assert err.strip().isprintable()


@pytest.mark.skipif(os.name != "posix", reason="such names are POSIX's")
def test_combine_prints_a_name_as_text(capsys):
    """The name of the output follows from the files that lie there."""
    for rank in range(2):
        run_file(f"{EVIL}.{rank}.shadowrun", RunInfo("npu", "cpu", rank=rank, world_size=2, wall_s=1.0))
    assert main(["combine"]) == 0
    assert capsys.readouterr().out.strip().isprintable()


@pytest.mark.parametrize("name", [*cli.READ, "zoo", "campaign", "slowdown", "replay"])
def test_commands_on_files_print_by_one_function(name):
    """`print` hands on what a terminal obeys; `print_line` does not."""
    (module,) = Path(cli.__file__).parent.glob(f"*/{name}.py")
    tree = ast.parse(module.read_text(encoding="utf-8"))
    assert not [n for n in ast.walk(tree) if isinstance(n, ast.Call) and getattr(n.func, "id", "") == "print"]
