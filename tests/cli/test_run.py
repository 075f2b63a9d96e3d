"""`shadowrun run`: the program behaves as under Python, and the gate decides about the status."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import shadowrun
from shadowrun.cli.main import main
from tests import forked

TRAIN = """
    import sys, torch
    net = torch.nn.Linear(4, 4)
    loss = net(torch.randn(2, 4)).relu().sum()
    loss.backward()
    print("program:", *sys.argv[1:])
"""


def read(name):
    return Path(name).read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def program(folder):
    def write(text, name="train.py"):
        (folder / name).write_text(textwrap.dedent(text), encoding="utf-8")
        return name

    return write


def shell(*argv, **options):
    """In a process of its own: what flaws and signals need."""
    command = [sys.executable, "-m", "shadowrun", *argv]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600, **options)


def compare(*argv):
    return main(["run", "--target", "cpu[threads=1]", *argv])


def test_report_comes_after_the_programs_output(program, capsys):
    assert compare(program(TRAIN), "--lr", "-o", "x.html") == 0
    out = capsys.readouterr().out
    assert out.startswith("program: --lr -o x.html\n")
    assert "cpu[threads=1] against cpu" in out
    run = shadowrun.load(".shadowrun")
    assert run.info.argv == ("train.py", "--lr", "-o", "x.html")
    assert run.info.target == "cpu[threads=1]"
    assert any(record.call.op == "aten::relu" for record in run.records())


def test_the_programs_world(program, folder, capsys):
    (folder / "sub").mkdir()
    program("VALUE = 3", "sub/helper.py")
    script = program(
        """
        import sys, os, helper, pickle, __main__
        class Thing: pass
        assert __name__ == "__main__" and __main__.Thing is Thing
        assert type(pickle.loads(pickle.dumps(Thing()))) is Thing
        assert sys.path[0] == os.path.realpath(os.path.dirname(__file__)), sys.path[0]
        assert sys.argv == ["sub/train.py", "a"], sys.argv
        assert __file__ == os.path.abspath("sub/train.py") and __spec__ is None
        assert helper.VALUE == 3
        def f(x: int): pass
        assert f.__annotations__ == {"x": int}, "our own __future__ imports reached the program"
        """,
        "sub/train.py",
    )
    before = sys.argv, sys.path[:], sys.modules["__main__"]
    assert compare("--fail-on", "none", script, "a") == 0, capsys.readouterr().err
    assert (sys.argv, sys.path, sys.modules["__main__"]) == before


def test_module(program, folder, capsys):
    (folder / "pkg").mkdir()
    program("", "pkg/__init__.py")
    program(
        "import sys; assert __package__ == 'pkg'; from . import other; print('module', sys.argv[1:])", "pkg/tool.py"
    )
    program("print('main')", "pkg/__main__.py")
    program("", "pkg/other.py")
    assert compare("--fail-on", "none", "-m", "pkg.tool", "--data", "mine") == 0
    assert "module ['--data', 'mine']" in capsys.readouterr().out
    assert compare("--fail-on", "none", "-m", "pkg") == 0
    assert capsys.readouterr().out.startswith("main\n")


def test_exception_prints_as_python_prints_it(program):
    script = program(
        """
        import torch
        def inner():
            raise ValueError("mine")
        def outer(x):
            torch.ones(2) + 1
            try:
                {}[x]
            except KeyError:
                inner()
        outer(7)
        """
    )
    plain = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    ours = shell("run", "--target", "cpu[threads=1]", script)
    assert ours.returncode == plain.returncode == 1
    assert ours.stderr == plain.stderr
    assert next(shadowrun.load(".shadowrun").records()).call.op == "aten::ones"


def test_operators_own_exception(program, capsys):
    assert compare(program("import torch\ntorch.ones(2, 3) @ torch.ones(2, 3)")) == 1
    error = capsys.readouterr().err
    assert "RuntimeError: mat1 and mat2 shapes cannot be multiplied" in error
    assert "shadowrun/" not in error


def test_syntax_error(program, capsys):
    assert compare(program("x = = 1")) == 1
    error = capsys.readouterr().err
    assert "SyntaxError" in error
    assert 'train.py", line 1' in error


@pytest.mark.parametrize(("code", "status"), [("3", 3), ("0", 0), ("None", 0), ("True", 1), ("'why'", 1)])
def test_exit_status_of_the_program(program, capsys, code, status):
    assert compare("--fail-on", "none", program(f"import sys; sys.exit({code})")) == status
    assert ("why\n" in capsys.readouterr().err) == (code == "'why'")


def test_a_run_that_verified_nothing_fails(program, capsys):
    assert compare(program("print('no torch here')")) == 1
    assert "shadowrun: FAILED: no call could be compared" in capsys.readouterr().err


def test_missing_script(capsys):
    for script, what in (("none.py", "does not exist"), (".", "is a folder")):
        assert compare(script) == 2
        assert f"The script {script!r} {what}" in capsys.readouterr().err
    assert compare("-m", "no.such_module") == 2
    assert "There is no module 'no.such_module' to run" in capsys.readouterr().err
    assert main(["run", "--target", "cpu"]) == 2
    assert "Give the program to run" in capsys.readouterr().err


def test_missing_target(program, capsys):
    assert main(["run", program(TRAIN)]) == 2
    assert "Give the platform to test, such as --target npu" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "slug"),
    [
        (["--target", "cudda"], "unknown-device"),
        (["--target", "musa"], "absent-device"),
        (["--target", "cpu[x=1]"], "unknown-setting"),
        (["--target", "cpu", "--rtol", "1"], "bad-option"),
        (["--target", "cpu", "--flaws", "x"], "bad-simulation"),
        (["--target", "cpu", "--preset", "young"], "bad-simulation"),
        (["--target", "cpu", "-o", "x.pdf"], "unknown-format"),
        (["--target", "cpu", "-o", "none/x.md"], "unwritable-report"),
        (["--target", "cpu", "-o", "x.md", "-o", "x.md"], "unwritable-report"),
        (["--target", "cpu", "--data", "none/x"], "data-file-unwritable"),
    ],
)
def test_refused_before_the_program_starts(program, capsys, options, slug):
    assert main(["run", *options, program("print('started')")]) == 2
    out, error = capsys.readouterr()
    assert "started" not in out
    assert f"[shadowrun explain {slug}]" in error
    assert "Traceback" not in error


def test_reports_and_appending(program, capsys):
    script = program(TRAIN)
    assert compare("-o", "a.json", "-o", "b.md", "-o", "c.html", "-o", "d.txt", script) == 0
    json.loads(read("a.json"))
    assert "<html" in read("c.html")
    assert "aten::relu" in read("b.md")
    assert "\x1b" not in read("d.txt")
    calls = sum(shadowrun.load(".shadowrun").counts().values())
    assert compare("--append", script) == 0
    assert sum(shadowrun.load(".shadowrun").counts().values()) == 2 * calls
    assert compare(script) == 0
    assert sum(shadowrun.load(".shadowrun").counts().values()) == calls


def test_ops_and_modules_and_steps(program, capsys):
    script = program(
        """
        import torch, shadowrun
        net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
        for _ in range(3):
            net(torch.ones(1, 2))
            shadowrun.current().step()
        """
    )
    assert compare("--ops", "aten::relu", "--steps", "0,2", script) == 0
    records = [r for r in shadowrun.load(".shadowrun").records() if r.verdict.status == "match"]
    assert [(r.call.op, r.call.step) for r in records] == [("aten::relu", 0), ("aten::relu", 2)]


def test_nested_compare_says_why_not(program, capsys):
    assert compare(program("import shadowrun\nwith shadowrun.compare('cpu'): pass")) == 1
    assert "NestingError: A comparison (cpu[threads=1] against cpu) is running already" in capsys.readouterr().err


@pytest.mark.usefixtures("interrupts")
@pytest.mark.parametrize("command", [["-m", "shadowrun"], [Path(sys.executable).with_name("shadowrun")]])
def test_ctrl_c_reports_what_was_seen_and_ends_as_python_does(program, command):
    script = program(
        """
        import atexit, torch, time
        atexit.register(print, "at exit")
        torch.ones(2).relu()
        print("ready", flush=True)
        time.sleep(60)
        """
    )

    def interrupted(*argv):
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "ready\n"
            os.kill(process.pid, signal.SIGINT)
            out, error = process.communicate(timeout=600)
        return process.returncode, out, error

    plain = interrupted(sys.executable, script)
    status, out, error = interrupted(sys.executable, *command, "run", "--target", "cpu[threads=1]", script)
    assert status == plain[0]
    assert "aten::relu" in out
    assert out.endswith("at exit\n")
    assert error.splitlines()[0] == plain[2].splitlines()[0]
    assert error.endswith("KeyboardInterrupt\n")


def test_a_program_has_the_names_and_the_collector_that_python_gives_a_script(program):
    script = program(
        """
        import gc, json, sys
        named = {k: v for k, v in globals().items() if k.startswith("__") and k not in ("__file__", "__builtins__")}
        print(json.dumps({k: v if v in (None, {}) else type(v).__name__ for k, v in named.items()}, sort_keys=True),
              type(__builtins__).__name__, gc.isenabled(), gc.get_threshold())
        if "shadowrun" in sys.modules:
            print(gc.get_freeze_count() > 100_000)
        """,
        "names.py",
    )
    for arguments in ([script], ["-m", "names"]):
        plain = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True, timeout=60)
        names, is_frozen, *_ = shell("run", "--target", "cpu[threads=1]", *arguments).stdout.splitlines()
        assert (names + "\n", is_frozen) == (plain.stdout, "True")


def test_killed_run_leaves_a_data_file(program):
    script = program(
        """
        import torch, os, signal, shadowrun
        torch.ones(2).relu()
        shadowrun.current().records()
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert forked.shadowrun("run", "--target", "cpu[threads=1]", script).returncode == -signal.SIGKILL
    assert "aten::relu" in {record.call.op for record in shadowrun.load(".shadowrun").records()}


LERP = """
    import torch
    a = torch.ones(4)
    a.lerp_(torch.zeros(4), 0.5)
    torch.maximum(a, torch.tensor(float("nan")))
    print("done", a.tolist())
"""


def test_flaws_and_the_gate(program):
    script = program(LERP)
    flaws = ["--target", "npu", "--flaws", "missing-lerp,maximum-drops-nan"]
    run = forked.shadowrun("run", *flaws, script)
    assert run.returncode == 1, run.stderr
    assert run.stdout.startswith("done [0.5, 0.5, 0.5, 0.5]\n")
    assert "shadowrun: FAILED: 1 unsupported, 1 mismatch" in run.stderr
    assert "shadowrun:   unsupported: aten::lerp_.Scalar" in run.stderr
    assert "shadowrun:   mismatch: aten::maximum" in run.stderr
    assert shadowrun.load(".shadowrun").info.target == "npu"
    assert forked.shadowrun("run", *flaws, "--fail-on", "fallback,slow", script).returncode == 0
    assert forked.shadowrun("run", *flaws, "--fail-on", "none", script).returncode == 0
    assert forked.shadowrun("run", "--preset", "clean", script).returncode == 0

    # The gate is about findings, whatever the program's own status.
    failing = program(LERP + "    raise SystemExit(5)\n", "failing.py")
    assert forked.shadowrun("run", *flaws, failing).returncode == 1
    assert forked.shadowrun("run", *flaws, "--fail-on", "none", failing).returncode == 5


def test_unknown_flaw_and_preset(program):
    script = program(LERP)
    run = forked.shadowrun("run", "--target", "sim", "--flaws", "missing-lrep", script)
    assert run.returncode == 2
    assert "missing-lrep" in run.stderr
    assert "Did you mean 'missing-lerp'?" in run.stderr
    run = forked.shadowrun("run", "--target", "sim", "--preset", "yung", script)
    assert run.returncode == 2
    assert "Did you mean 'young'?" in run.stderr


@pytest.mark.parametrize("kinds", ["everything", "mismatch,", "none,slow"])
def test_unknown_kind_of_finding(program, capsys, kinds):
    with pytest.raises(SystemExit) as caught:
        compare("--fail-on", kinds, program(TRAIN))
    assert caught.value.code == 2
    kinds = "unsupported, error, mismatch, fallback, slow, new, worse, or none"
    assert f"is no kind of finding; use {kinds}" in capsys.readouterr().err


ACCELERATORS = """
import sys, torch
print(torch.accelerator.is_available(), torch.ones(1, device=DEVICE).device if "DEVICE" in globals() else "cpu")
"""


def test_a_program_that_does_not_name_sim_does_not_see_it(tmp_path):
    (tmp_path / "plain.py").write_text(ACCELERATORS)
    (tmp_path / "places.py").write_text("DEVICE = 'sim'\n")
    (tmp_path / "named.py").write_text("from places import DEVICE\n" + ACCELERATORS)
    (tmp_path / "told.py").write_text("import sys; DEVICE = sys.argv[1]\n" + ACCELERATORS)

    def printed(*words):
        return forked.shadowrun("run", "--target", "sim", *words).stdout

    assert printed("plain.py").startswith("False cpu\n")
    assert printed("--flaws", "missing-lerp", "plain.py").startswith("False ")
    assert printed("named.py").startswith("True sim:0\n")
    assert printed("told.py", "sim").startswith("True sim:0\n")


def test_a_data_file_that_cannot_be_made_ends_in_one_line(program, capsys):
    """In /proc, since root may write to any other folder."""
    assert compare("--data", "/proc/x.shadowrun", program(TRAIN)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("shadowrun: error: Cannot write the data file '/proc/x.shadowrun'")
    assert said.err.count("\n") == 1


def test_a_second_run_into_one_file_names_its_own_file(program, capsys):
    from shadowrun.store.lock import FileLock

    held = FileLock(Path(".shadowrun"))
    try:
        assert compare(program(TRAIN)) == 0
    finally:
        held.release()
    out = " ".join(capsys.readouterr().out.split())
    (there,) = Path().glob("*.pid*")
    assert "Another process was writing .shadowrun" in out
    assert f"this run is in {there.name}." in out
