"""The current folder may be anyone's: no process that a command starts imports a module from it.

Python puts it in front of the path of a process that is started with `-c` or `-m`, whatever the path of its parent is.
"""

from __future__ import annotations

import ast
import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest

import shadowrun
from shadowrun.cli import options
from shadowrun.errors import UsageError
from shadowrun.platforms import backends
from shadowrun.platforms.plugins import import_plugins
from shadowrun.studies.isolation.process import WorkerProcess, own_command

PACKAGE = Path(shadowrun.__file__).parent
# Each process of ours imports some of them. Torch's compiler starts one that imports `ctypes`.
SHADOWED = ("argparse", "ctypes", "json", "shadowrun", "sqlite3", "torch")
ENTRY = "tests.untrusted.test_current_folder:starts_another"


@pytest.fixture(autouse=True)
def pwned(tmp_path, monkeypatch):
    """The file that modules of the current folder make: a folder from elsewhere."""
    found, folder = tmp_path / "PWNED", tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", str(PACKAGE.parent))
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    for name in SHADOWED:
        Path(f"{name}.py").write_text(f"import pathlib\npathlib.Path({str(found)!r}).touch()\nraise ImportError")
    return found


def test_of_shadowrun_itself(tmp_path, pwned):
    """`replay --free`, `record --platforms`, `determinism` and `mitigate` record the user's program with it."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "beside.py").touch()
    program = tmp_path / "mine" / "program.py"
    program.write_text("import beside, sys, torch\ntorch.ones(2) + 1\nprint(sys.argv[1:])")
    words = [*own_command(), "record", "-o", "a.shadowrec", program, "x"]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "['x']\n"), done.stderr
    assert Path("a.shadowrec").is_file()
    assert not pwned.exists()


def _commands(tree):
    """The words with which each process of this Python is started, and the function that does it."""
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef):
            for node in ast.walk(function):
                if (
                    isinstance(node, ast.List | ast.Tuple)
                    and node.elts
                    and ast.unparse(node.elts[0]) == "sys.executable"
                ):
                    yield function.name, [ast.unparse(word) for word in node.elts[1:]]


def test_each_process_is_started_without_the_folder():
    found = [
        (name, words) for file in PACKAGE.rglob("*.py") for name, words in _commands(ast.parse(file.read_text("utf-8")))
    ]
    assert len(found) >= 7
    others = [(name, words) for name, words in found if words[0] not in ("'-P'", "'-I'")]
    assert others == [("own_command", ["'-c'", "_COMMAND", "sys.path[0]"])]


def starts_another(settings, _):
    """A worker whose library starts a process, as torch's compiler does."""
    subprocess.run([sys.executable, "-c", "import ctypes"], check=False)
    Path(settings["done"]).touch()


def test_of_what_a_worker_starts(tmp_path, pwned):
    worker = WorkerProcess(ENTRY, {"done": str(tmp_path / "done")})
    worker._process.stdin.close()
    worker._process.wait(100)
    worker.end()
    assert (tmp_path / "done").exists()
    assert not pwned.exists()


@pytest.mark.parametrize(("words", "safe"), [("explain bad-option", "1"), ("run program.py", None)])
def test_of_what_a_command_starts(words, safe):
    """But the user's program starts processes as without us."""
    Path("program.py").touch()
    code = "import os; from shadowrun.cli.main import main; main(); print(os.environ.get('PYTHONSAFEPATH'))"
    words = [sys.executable, "-P", "-c", code, *words.split()]
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == str(safe), done.stderr


def test_of_an_installed_module(tmp_path, monkeypatch, pwned):
    """`--import` takes modules from the folder, but not those that an installed one has no need of."""
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "plug.py").write_text("try:\n    import optional_of_plug\nexcept ImportError:\n    pass")
    Path("json.py").rename("optional_of_plug.py")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    import_plugins(["plug"])
    assert "plug" in sys.modules
    assert not pwned.exists()
    Path("of_the_user.py").write_text("import optional_of_plug")
    with pytest.raises(UsageError, match="of_the_user"):
        import_plugins(["of_the_user"])
    assert pwned.exists()
    assert os.getcwd() not in sys.path  # noqa: PTH109


def test_of_the_reset_of_a_device(tmp_path, monkeypatch, pwned):
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "chip_reset.py").write_text("import json, pathlib\npathlib.Path('reset').touch()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    row = backends.backend_of("cuda")
    monkeypatch.setattr(backends, "backend_of", lambda _: dataclasses.replace(row, reset="chip_reset"))
    subprocess.run(options.reset_command(["cuda"]), check=True)
    assert Path("reset").exists()
    assert not pwned.exists()
