"""The current folder may be anyone's: no process that a command starts imports a module from it.

Python puts it in front of the path of a process that is started with `-c` or `-m`, whatever the path of its parent is.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import shadowrun
from shadowrun import current_folder
from shadowrun.cli import options
from shadowrun.compiled import repro as compiled_repro
from shadowrun.errors import UsageError
from shadowrun.platforms import backends
from shadowrun.platforms.plugins import import_plugins
from shadowrun.repro import call_replayer
from shadowrun.repro.script import ReproOptions
from shadowrun.store.captured_inputs import StoredCall
from shadowrun.studies.isolation.process import WorkerProcess, own_command
from tests.compiled import models, regions
from tests.untrusted import building

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
    texts = [file.read_text("utf-8") for file in PACKAGE.rglob("*.py")]
    found = [found for text in texts if "sys.executable" in text for found in _commands(ast.parse(text))]
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


def test_names_that_hooks_of_packages_know_stay_as_they_are(monkeypatch):
    """A worker has another current folder: a relative name is made absolute, if it is one of a folder."""
    Path("lib").mkdir()
    Path("__editable__.x-1.0.finder.__path_hook__").mkdir()  # by which the folder would be taken for the package
    names = ["lib", "", "a_hook", "__editable__.x-1.0.finder.__path_hook__"]
    monkeypatch.setattr(sys, "path", [*names, *sys.path])
    here = str(Path.cwd())
    assert current_folder.import_path()[:4] == [f"{here}/lib", here, *names[2:]]
    monkeypatch.setattr(current_folder, "_left", here)
    monkeypatch.chdir("lib")
    assert current_folder.import_path()[:4] == [f"{here}/lib", here, *names[2:]]


def test_of_looks_at_calls(tmp_path, monkeypatch):
    """They make the call, or run its operator on the meta device."""
    folder, seen = tmp_path / "empty", []
    folder.mkdir()
    monkeypatch.setattr(current_folder, "_empty", str(folder))
    before = Path.cwd()

    def look(*_, **__):
        seen.append(Path.cwd())
        raise UsageError("looked", slug="no-repro")

    monkeypatch.setattr(call_replayer, "check_call", look)
    monkeypatch.setattr(compiled_repro.CapturedRegion, "read", look)
    monkeypatch.setattr(compiled_repro, "check_harmless", lambda *_: None)
    monkeypatch.setattr(compiled_repro, "load_captured", lambda *_: None)
    with pytest.raises(UsageError, match="looked"):
        call_replayer.captured_plan(StoredCall("aten::relu", (torch.ones(2),), {}), checked=True)
    with pytest.raises(UsageError, match="looked"):
        compiled_repro.write_region_script(argparse.Namespace(info=None), None, None, tmp_path, ReproOptions())
    assert seen == [folder, folder]
    assert Path.cwd() == before


@pytest.fixture
def linked(tmp_path, monkeypatch, pwned):
    """The linker adds a file of the current folder to each library that it makes; where the libraries are made."""
    if shutil.which("gcc") is None:
        pytest.skip("needs gcc")
    touches = f'__attribute__((constructor)) static void p(void) {{ fclose(fopen("{pwned}", "w")); }}'
    Path("e.c").write_text(f"#include <stdio.h>\n{touches}")
    subprocess.run(["gcc", "-c", "-fPIC", "e.c", "-o", "libgcc_s.so.1"], check=True)
    built = tmp_path / "built"
    built.mkdir()
    monkeypatch.setenv("BUILD_IN", str(built))
    subprocess.run([sys.executable, "-P", "-c", "from tests.untrusted import building; building.build()"], check=True)
    if not pwned.exists():
        pytest.skip("this linker looks elsewhere")
    pwned.unlink()
    shutil.rmtree(next(built.iterdir()))
    return built


def _make_files():
    """A compiled graph, and calls."""
    model, x = models.make("gated")
    torch._dynamo.reset()
    with regions.compare(file="graph.shadowrun"):
        torch.compile(model, backend=building.tanh_is_wrong)(x)
    with shadowrun.compare("cpu[threads=1]", file="x.shadowrun"):
        building.doubled(torch.ones(3))
    with shadowrun.record("x.shadowrec", capture=1 << 20):
        building.doubled(torch.ones(3))


OF_CALLS = ("replay x.shadowrec --target cpu", "slowdown x.shadowrun --target cpu --rounds 3")
OF_SCRIPT = "repro graph.shadowrun --import tests.untrusted.building:tanh_is_wrong"


@pytest.mark.parametrize("words", [OF_SCRIPT, *OF_CALLS])
def test_of_compilers_that_calls_of_a_file_start(words, monkeypatch, linked, pwned):
    monkeypatch.delenv("BUILD_IN")
    _make_files()
    monkeypatch.setenv("BUILD_IN", str(linked))
    command = [sys.executable, "-P", "-m", "shadowrun", *words.split(), "--import", "tests.untrusted.building"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done
    # A script runs in a process of its own.
    assert len(list(linked.iterdir())) == 1 + (words == OF_SCRIPT), done.stdout
    assert not pwned.exists()
    if words == OF_SCRIPT:
        assert f"{Path('repro', '01-compiled-graph-0-mismatch', 'repro.py')} (f32[1, 1]), exits 1 here" in done.stdout


def builds(_settings, _channel):
    """A worker whose tasks do."""
    return lambda _: building.build()


def test_of_compilers_that_a_worker_starts(linked, pwned):
    worker = WorkerProcess(f"{__name__}:builds", {})
    worker.begin("x", {})
    worker._process.stdin.close()
    worker._process.wait(100)
    worker.end()
    assert len(list(linked.iterdir())) == 1
    assert not pwned.exists()
    assert not Path(worker._folder.name).exists()


def test_names_of_the_user_are_from_the_folder_that_was_left(tmp_path, pwned):
    with current_folder.in_empty_folder():
        assert current_folder.from_folder_of_user(Path("x")) == Path("x").absolute()
    (tmp_path / "empty").mkdir()
    here = Path.cwd()
    current_folder.has_empty_folder(str(tmp_path / "empty"))
    try:
        for _ in range(2):
            with current_folder.in_empty_folder(), current_folder.in_empty_folder():
                assert Path.cwd() == tmp_path / "empty"
                assert current_folder.from_folder_of_user(Path("x")) == here / "x"
            assert Path.cwd() == here
    finally:
        current_folder.has_empty_folder("")
