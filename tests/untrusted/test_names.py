"""Names of files on the command line, and what lies in the place of a file that is written: a folder from elsewhere."""

from __future__ import annotations

import itertools
import os
import stat
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import shadowrun
from shadowrun.cli.commands import compile  # noqa: A004 - the command
from shadowrun.cli.main import main
from shadowrun.errors import UsageError
from shadowrun.report.dataframes import write_records
from shadowrun.settings import Settings, read_settings
from shadowrun.store.atomic_write import check_replaceable
from shadowrun.store.captured_inputs import StoredCall, clear, folder_of, save
from shadowrun.studies.known_issues_file import nearest_ledger
from shadowrun.studies.sweep.coverage_file import CoverageFile, SweepInfo
from shadowrun.types import RunInfo
from tests.compiled import faulty, models
from tests.untrusted.test_limits import run_file

PRECIOUS = "precious\n"
needs_links = pytest.mark.skipif(os.name != "posix", reason="links, and such names, are POSIX's")

pytestmark = pytest.mark.usefixtures("here")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


# -- links in a folder of scripts ---------------------------------------------------------------------------


@needs_links
@pytest.mark.parametrize("linked", ["", "01-aten.tanh.default-mismatch"])
def test_a_script_of_a_compiled_graph_goes_through_no_link(capsys, linked):
    """Of `compile --repro DIR`, and of a campaign's folder of scripts, which may have been there before."""
    module, x = models.make("gated")
    report = shadowrun.compile_check(module, x, backend=faulty.tanh_is_wrong, ladder=False)
    torch._dynamo.reset()
    Path("there").mkdir()
    Path("there/repro.py").write_text(PRECIOUS)
    place = Path("scripts", linked)
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(Path("there").absolute())
    compile._write_repros([report], Path("scripts"))
    assert "is a link, which is not followed" in capsys.readouterr().out
    assert [p.read_text() for p in Path("there").iterdir()] == [PRECIOUS]


# -- settings above the working folder --------------------------------------------------------------------


@needs_links
@pytest.mark.parametrize("name", ["shadowrun.toml", "pyproject.toml"])
def test_settings_of_another_user_are_not_read(tmp_path, monkeypatch, name):
    """Below a folder like `/tmp` they could start any program, as the platform of a run."""
    own, head = Path.lstat, "[tool.shadowrun.run]\n" if name == "pyproject.toml" else "[run]\n"
    (tmp_path / name).write_text(head + 'target = "cpu[python=/tmp/evil]"\n')
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    assert read_settings().run == {"target": "cpu[python=/tmp/evil]"}
    assert nearest_ledger() == (tmp_path / name if name == "shadowrun.toml" else Path("shadowrun.toml"))

    def by_another(path):
        return SimpleNamespace(st_uid=12345) if path == tmp_path / name else own(path)

    monkeypatch.setattr(Path, "lstat", by_another)
    with pytest.warns(shadowrun.ShadowrunWarning, match="another user has put it there"):
        assert read_settings() == Settings()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert nearest_ledger() == Path("shadowrun.toml")


@needs_links
def test_settings_belong_to_the_user_the_system_or_the_owner_of_the_folder(tmp_path, monkeypatch):
    """A project in a container often belongs to another user than the process."""
    own = Path.stat

    def by_another(path, **how):
        facts = list(own(path, **how))
        facts[stat.ST_UID] = 12345
        return os.stat_result(facts)

    monkeypatch.setattr(Path, "stat", by_another)
    (tmp_path / "mine").mkdir()
    (tmp_path / "shadowrun.toml").write_text('[run]\ntarget = "npu"\n')
    assert read_settings(start=tmp_path / "mine").run == {"target": "npu"}


@needs_links
@pytest.mark.filterwarnings("error")
def test_a_project_of_another_user_that_is_not_about_us_needs_no_word(tmp_path, monkeypatch):
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    monkeypatch.setattr("shadowrun.settings._belongs_here", lambda *_: False)
    assert read_settings(start=tmp_path) == Settings()


# -- names that are options --------------------------------------------------------------------------------


@needs_links
@pytest.mark.parametrize(
    ("pattern", "name"),
    [
        ("classes *.shadowrec", "--import=evil.shadowrec"),
        ("support *.shadowcov", "--import=evil.shadowcov"),
        ("combine *.shadowrun", "--import=evil.shadowrun"),
        ("combine *.shadowrun", "-oother.shadowrun"),
        ("diff *", "--import"),
        ("zoo add exported *.pt2", "--import=evil.pt2"),
        ("campaign combine c *.shadowcampaign", "--import=evil.shadowcampaign"),
        ("replay --target cpu *", "--free"),  # which runs the next file of the folder
        ("classes *", "--"),
    ],
)
def test_no_file_is_an_option(capsys, pattern, name):
    """`classes *.shadowrec` is an example of its help: the shell made an option of a file, which imported a module."""
    *words, glob = pattern.split()
    Path(name).touch()
    Path("evil.py").write_text("import pathlib; pathlib.Path('PWNED').touch()")
    Path(f"x{pattern.rpartition('*')[2]}").touch()
    found = sorted(path.name for path in Path().glob(glob))
    assert name in found
    assert main([*words, *found]) == 2
    assert "is an option, and the name of a file" in capsys.readouterr().err
    assert not Path("PWNED").exists()


def test_words_that_are_no_options_of_ours_stay(capsys):
    run_file("-x.shadowrun")
    assert main(["report", "--", "-x.shadowrun"]) == 0
    assert main(["replay", "none.shadowrec", "--target", "cpu", "--free", "program.py", "-x.shadowrun"]) == 2
    assert "none.shadowrec" in capsys.readouterr().err


@pytest.mark.parametrize("words", [("report",), ("campaign", "status", "c"), ()])
def test_the_parser_prints_a_name_as_text(capsys, words):
    with pytest.raises(SystemExit):
        main([*words, "-\x1b[31m\u202e\n::set-output"])
    said = capsys.readouterr().err
    assert all(line.isprintable() for line in said.splitlines())
    assert "\n::set-output" not in said


# -- paths that cannot be used -----------------------------------------------------------------------------

LONG = "x" * 300
COMMANDS = ("report", "export", "combine", "coverage", "classes", "support", "known", "slowdown", "repro")


@pytest.mark.parametrize("command", COMMANDS)
def test_a_name_that_is_too_long_is_one_line(capsys, command):
    assert main([command, LONG]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("there", [".", "/"])
def test_a_folder_has_no_list(capsys, there):
    CoverageFile.begin(Path("x.shadowcov"), SweepInfo("npu", "cpu")).close()
    assert main(["support", "x.shadowcov", "--write", f"accuracy:{there}"]) == 2
    said = capsys.readouterr().err
    assert "Is a directory" in said
    assert "Traceback" not in said


@needs_links
def test_links_that_lead_to_each_other_are_one_line(capsys):
    """`Path.resolve` raises RuntimeError for them, which is no error of the system."""
    Path("a.shadowrun").symlink_to("b.shadowrun")
    Path("b.shadowrun").symlink_to("a.shadowrun")
    for words in (["a.shadowrun", "b.shadowrun"], ["."], ["a.shadowrun", "-o", "b.shadowrun"]):
        assert main(["combine", *words]) == 2
        said = capsys.readouterr().err
        assert "Traceback" not in said
        assert "shadowrun explain" in said


@needs_links
@pytest.mark.parametrize("there", ["NEW", "ledger.toml", "other/shadowrun.toml"])
@pytest.mark.parametrize("how", ["--init", "--update"])
def test_a_ledger_is_not_written_through_a_link(capsys, there, how):
    other = Path("other/shadowrun.toml")
    other.parent.mkdir()
    other.write_text("# of another project\n")
    Path("ledger.toml").symlink_to(there)
    assert main(["known", str(run_file()), how, "--ledger", "ledger.toml"]) == 2
    said = capsys.readouterr().err
    assert "is a link, which is not followed" in said
    assert "Traceback" not in said
    assert Path("ledger.toml").is_symlink()
    assert not Path("NEW").exists()
    assert other.read_text() == "# of another project\n"


@needs_links
def test_the_nearest_ledger_is_not_written_through_a_link(capsys):
    other = Path("other.toml")
    other.write_text("# of another project\n")
    Path("shadowrun.toml").symlink_to(other)
    assert main(["known", str(run_file()), "--update"]) == 2
    assert "is a link, which is not followed" in capsys.readouterr().err
    assert main(["known", str(run_file()), "--update", "--ledger", "other.toml"]) == 0
    assert "[[known]]" in other.read_text()


@pytest.mark.parametrize("target", ["np[a-z]", "cuda:[0-9]", "np[a-z][threads=1]", "*", "np?"])
def test_a_line_of_the_ledger_covers_one_platform(capsys, target):
    """Of the user's own runs, a pattern would excuse the findings of others as well."""
    path = run_file(info=RunInfo(target, "cpu", wall_s=1.0))
    assert main(["known", str(path), "--update", "--ledger", "own.toml"]) == 0
    assert "has a name that no platform has" in capsys.readouterr().out
    assert not Path("own.toml").exists()


def test_a_platform_with_settings_has_its_line(capsys):
    path = run_file(info=RunInfo("cpu[threads=1]", "cpu", wall_s=1.0))
    assert main(["known", str(path), "--update", "--ledger", "own.toml"]) == 0
    assert main(["known", str(path), "--ledger", "own.toml"]) == 0


# -- links in the place of what is written -----------------------------------------------------------------


@needs_links
@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_records_are_not_written_through_a_link(ending):
    if ending == "parquet":
        pytest.importorskip("pyarrow")
    Path("victim").write_text(PRECIOUS)
    run = shadowrun.load(run_file())
    for there, name in itertools.product(("victim", "NEW"), (f"r.{ending}", f"r.{ending}.part")):
        Path(name).unlink(missing_ok=True)
        Path(name).symlink_to(there)
        assert write_records(run.records(), Path(f"r.{ending}")) == 1
        assert not Path(f"r.{ending}").is_symlink()
        assert Path(f"r.{ending}").stat().st_size
    assert Path("victim").read_text() == PRECIOUS
    assert not Path("NEW").exists()


def test_records_that_cannot_be_written_leave_the_older_ones():
    Path("r.csv").write_text(PRECIOUS)

    def rows():
        yield from shadowrun.load(run_file()).records()
        raise OSError(28, "No space left on device")

    with pytest.raises(UsageError, match="No space left"):
        write_records(rows(), Path("r.csv"))
    assert Path("r.csv").read_text() == PRECIOUS
    assert sorted(path.name for path in Path().glob("r.csv*")) == ["r.csv"]


@needs_links
def test_captured_inputs_are_not_written_through_a_link():
    """The folder of another program would get values of this one, and the files that their names replace."""
    data, elsewhere = Path("x.shadowrun"), Path("elsewhere")
    elsewhere.mkdir()
    (elsewhere / "0.pt").write_text(PRECIOUS)
    call = StoredCall("aten::mm", (torch.ones(2, 2),), {})
    folder_of(data).symlink_to(elsewhere)
    with pytest.raises(OSError, match="is a link"):
        save(folder_of(data), "1.pt", call)
    clear(data)  # of an earlier run: a new one begins
    save(folder_of(data), "0.pt", call)
    assert not folder_of(data).is_symlink()
    assert {path.name: path.read_text() for path in elsewhere.iterdir()} == {"0.pt": PRECIOUS}


# -- what is no file is not replaced -------------------------------------------------------------------------


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs named pipes")
@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize(
    "words",
    [
        ("report", "x.shadowrun", "-o", "txt:there"),
        ("combine", "x.shadowrun", "-o", "there", "--force"),
        ("known", "x.shadowrun", "--init", "--ledger", "there"),
        ("sweep", "--target", "cpu[threads=1]", "--ops", "exp", "--file", "there"),
        ("run", "--target", "sim", "--data", "there", "program.py"),
    ],
    ids=lambda words: words[0],
)
def test_what_is_no_file_stays(capsys, words, linked):
    """A pipe or a device has no size, and was taken for an empty file: root replaced `/dev/null` for all."""
    run_file()
    Path("program.py").write_text("")
    os.mkfifo("pipe")
    Path("there").symlink_to("pipe") if linked else Path("pipe").rename("there")
    assert main(list(words)) == 2
    assert "Traceback" not in capsys.readouterr().err
    assert Path("there").is_fifo()
    assert Path("there").is_symlink() == linked


@pytest.mark.parametrize("name", ["/dev/null", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "/proc/1/environ"])
@pytest.mark.skipif(sys.platform != "linux", reason="folders of Linux")
def test_files_of_the_system_are_not_replaced(name):
    with pytest.raises(OSError, match="not replaced"):
        check_replaceable(Path(name))
