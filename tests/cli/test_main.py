"""Help, versions, errors and exit statuses of the command line as a whole."""

import re
import subprocess
import sys

import pytest

from shadowrun.cli import compare_options
from shadowrun.cli import main as cli

COMMANDS = cli.COMMANDS


def usage(*argv):
    """Exit status of argparse."""
    with pytest.raises(SystemExit) as caught:
        cli.main(list(argv))
    return caught.value.code


def test_help_imports_no_torch():
    code = (
        "import sys\nfrom shadowrun.cli.main import COMMANDS, main\n"
        "for argv in (*([name, '--help'] for name in COMMANDS), ['--help']):\n"
        "    try: main(argv)\n    except SystemExit as end: assert not end.code, (argv, end.code)\n"
        "    heavy = {'torch', 'numpy', 'rich', 'jinja2'} & set(sys.modules)\n    assert not heavy, (argv, heavy)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_examples(name, capsys):
    assert usage(name, "--help") == 0
    text = capsys.readouterr().out
    assert "Examples:" in text
    assert f"shadowrun {name}" in text


def test_help_lists_every_command_with_its_summary(capsys):
    assert usage("--help") == 0
    text = capsys.readouterr().out
    for name in COMMANDS:
        assert re.search(rf"^ +{name}\s+[A-Z]", text, re.MULTILINE), name
    assert "Exit status:" in text


def test_examples_of_the_help_can_be_parsed(capsys):
    """Options of the examples exist: a renamed option must not live on in the help."""
    parser = cli.build_parser()
    for name in ("", *COMMANDS):
        usage(*filter(None, [name]), "--help")
        for line in capsys.readouterr().out.splitlines():
            match = re.match(r"  shadowrun ([a-z].*?)(?:   .*| [|>].*)?$", line)
            if match:
                parser.parse_args(match[1].replace("'", "").replace('"', "").split())


def test_version(capsys):
    assert usage("--version") == 0
    assert re.fullmatch(
        r"shadowrun \d+\.\d+\.\d+, torch \d+\.\d+\.\S+, native (on|(off|partial) \(.+\))\n", capsys.readouterr().out
    )


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["run", "--targett", "sim"], ["export", "-f", "pdf"]])
def test_wrong_usage_is_2(argv, capsys):
    assert usage(*argv) == 2
    assert "usage: shadowrun" in capsys.readouterr().err


def test_own_errors_are_one_line(capsys, tmp_path):
    assert cli.main(["report", str(tmp_path / "none.shadowrun")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("shadowrun: error: There is no data file")
    assert error.endswith("[shadowrun explain data-file-missing]\n")
    assert error.count("\n") == 1


def test_internal_errors_are_2_and_have_a_traceback(capsys, monkeypatch):
    import shadowrun.run

    def broken(path, **_):
        raise ZeroDivisionError(path)

    monkeypatch.setattr(shadowrun, "load", broken, raising=False)
    assert cli.main(["report"]) == 2
    error = capsys.readouterr().err
    assert "ZeroDivisionError" in error
    assert "shadowrun: internal error" in error


def test_module_and_script_are_the_same():
    by_module = subprocess.run([sys.executable, "-m", "shadowrun", "--version"], capture_output=True, check=True)
    assert by_module.stdout.startswith(b"shadowrun ")


def test_reader_that_leaves(tmp_path):
    """``shadowrun platforms | head -1`` ends without a complaint."""
    command = f"{sys.executable} -m shadowrun platforms --flaws | head -1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, check=False, cwd=tmp_path)
    assert done.stderr == b""


@pytest.mark.parametrize("text", ["", "mismatch,", "mismatches"])
def test_a_gate_without_a_kind_is_refused(text, capsys):
    assert usage("run", "--target", "cpu", f"--fail-on={text}", "x.py") == 2
    assert usage("sweep", "--target", "cpu", f"--fail-on={text}") == 2
    assert capsys.readouterr().err.count("is no kind of finding") == 2


@pytest.mark.parametrize("argv", [["--jobs=0"], ["--samples=x"], ["--timeout=nan"], ["--memory=-1"]])
def test_a_number_that_cannot_be_used_is_refused(argv, capsys):
    assert usage("sweep", "--target", "cpu", *argv) == 2
    assert "number >" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "steps"), [("3", [3]), ("0,2,5-7", [0, 2, 5, 6, 7]), ("1-1", [1]), (" 1 , 2 ", [1, 2])]
)
def test_step_numbers(text, steps):
    assert compare_options.step_numbers(text) == steps


@pytest.mark.parametrize("text", ["", "x", "1-", "-1", "3-1", "1.5"])
def test_step_numbers_refused(text, capsys):
    assert usage("run", "--target", "cpu", f"--steps={text}", "x.py") == 2
    assert "argument --steps" in capsys.readouterr().err
