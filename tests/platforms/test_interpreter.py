"""Platforms with an interpreter of their own: another environment, with another torch or without one.

CI has one torch. The environment here has the same one, and nothing of ours; what another version would lack or have in
another form is taken away or added at its start. `docs/howto/cpu.md` says with which other versions it really ran.
"""

import os
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch

import shadowrun
from shadowrun import Cause, Status
from shadowrun.errors import PlatformError
from shadowrun.platforms.spec import parse
from shadowrun.platforms.worker import wire
from shadowrun.platforms.worker.client import Unsendable, Worker, WorkerDied

pytestmark = pytest.mark.skipif(os.name != "posix", reason="workers need a POSIX system")

ONE = (1, (0,))
NOT_THERE = ("shadowrun", "_editable", "__editable", "rich", "numpy", "pytest", "_pytest", "hypothesis", "distutils-")
# Run when that interpreter starts: its torch is another one from then on.
OTHER = """
import ctypes, time, torch
torch.ops.aten.__dict__["hardswish"] = None
lib = torch.library.Library("otherform", "DEF")
lib.define("scaled(Tensor x, float y, *, float z) -> Tensor")
lib.define("listed(Tensor x) -> Tensor[]")
lib.define("fine(Tensor x, SymInt n=1, *, bool more=False) -> Tensor")
lib.define("crash(Tensor x) -> Tensor")
lib.define("hang(Tensor x) -> Tensor")
lib.impl("scaled", lambda x, y, *, z: x, "CPU")
lib.impl("listed", lambda x: [x], "CPU")
lib.impl("fine", lambda x, n=1, more=False: x * n, "CPU")
lib.impl("crash", lambda x: ctypes.string_at(0), "CPU")
lib.impl("hang", lambda x: time.sleep(1000), "CPU")
"""


@pytest.fixture(scope="module")
def venv(tmp_path_factory):
    """An environment with torch, and neither shadowrun nor what that needs."""
    root = tmp_path_factory.mktemp("other torch, elsewhere")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(root)], check=True)
    (packages,) = root.glob("lib/python*/site-packages")
    for folder in {sysconfig.get_paths()[key] for key in ("purelib", "platlib")}:
        for entry in Path(folder).iterdir():
            if not entry.name.startswith(NOT_THERE) and entry.suffix != ".pth":
                (packages / entry.name).symlink_to(entry)
    (packages / "other_torch.py").write_text(OTHER, encoding="utf-8")
    (packages / "other_torch.pth").write_text("import other_torch\n", encoding="utf-8")
    return root


@pytest.fixture(scope="module")
def spec(venv):
    return f'cpu[python="{venv}",env:GREETING="a, b]",threads=1]'


@pytest.fixture(scope="module")
def library():
    made = torch.library.Library("otherform", "DEF")
    made.define("scaled(Tensor x, float y) -> Tensor")
    made.define("listed(Tensor x) -> Tensor")
    made.define("fine(Tensor x, int n=1) -> Tensor")
    made.define("crash(Tensor x) -> Tensor")
    made.define("hang(Tensor x) -> Tensor")
    for name in ("listed", "crash", "hang"):
        made.impl(name, lambda x: x.clone(), "CPU")
    made.impl("scaled", lambda x, y: x * y, "CPU")
    made.impl("fine", lambda x, n=1: x * n, "CPU")
    yield torch.ops.otherform
    made._destroy()


@pytest.fixture(scope="module")
def worker(spec):
    made = Worker(parse(spec))
    made.start()
    yield made
    made.stop()


def test_it_runs_in_that_environment(worker, venv):
    command = Path(f"/proc/{worker.pid}/cmdline")
    if command.exists():
        assert command.read_bytes().split(b"\0")[0].decode() == str(venv / "bin" / "python")
        assert b"GREETING=a, b]" in Path(f"/proc/{worker.pid}/environ").read_bytes().split(b"\0")
    facts = worker.facts()
    assert facts["torch"] == torch.__version__
    assert facts["python"]
    assert worker.call("aten::neg", (torch.ones(2),), {}, ONE, [])[0][0].tolist() == [-1, -1]


def test_an_operator_that_its_torch_lacks(worker):
    with pytest.raises(
        NotImplementedError, match=r"operator 'aten::hardswish' is not currently implemented for the torch"
    ):
        worker.call("aten::hardswish", (torch.ones(2),), {}, ONE, [])
    with pytest.raises(Unsendable, match="the worker has no operator nobodys::thing"):
        worker.call("nobodys::thing", (torch.ones(2),), {}, ONE, [])


def test_operators_of_another_form(worker, library):
    x = torch.ones(2)
    for name, args, why in (
        ("otherform::scaled", (x, 2.0), "it also needs z"),
        ("otherform::listed", (x,), r"it returns \(List\[Tensor\]\), not \(Tensor\)"),
    ):
        for _ in range(2):
            with pytest.raises(Unsendable, match=f"torch .* has another {name}: {why}"):
                worker.call(name, args, {}, ONE, [])
    for args, n in (((x,), 1), ((x, 3), 3)):
        assert worker.call("otherform::fine", args, {}, ONE, [])[0][0].tolist() == [n, n]


SIGNATURE = wire.signature(torch.ops.aten.addmm.out)


def changed(place, **fields):
    names = ("name", "type", "kwarg_only", "has_default", "written")
    arguments = [dict(zip(names, a, strict=True)) for a in SIGNATURE[0]]
    arguments[place] |= fields
    return [tuple(a.values()) for a in arguments], SIGNATURE[1]


@pytest.mark.parametrize(
    ("mine", "why"),
    [
        (SIGNATURE, ""),
        (changed(1, name="left"), "it has no argument 'mat1' in that place"),
        (changed(2, kwarg_only=True), "it has no argument 'mat2' in that place"),
        (changed(2, type="float"), "its argument 'mat2' is float, not Tensor"),
        (changed(5, written=False), "it does not write to its argument 'out'"),
        (changed(3, has_default=False), "it also needs beta"),
        (changed(3, type="float"), ""),
        ((SIGNATURE[0], ["Tensor", "Tensor"]), "it returns (Tensor, Tensor), not (Tensor)"),
        ((SIGNATURE[0][:2], SIGNATURE[1]), "it has no argument 'mat2' in that place"),
    ],
)
def test_what_makes_a_form_another(mine, why):
    assert wire.signature_difference(SIGNATURE, mine, 3, ["out"]) == why


def test_a_comparison_with_it(spec, library, venv):
    """What its torch lacks is unsupported there, the rest is compared, and no folder's name is recorded."""
    with shadowrun.compare(spec) as run:
        torch.nn.functional.hardswish(torch.ones(3)).exp()
    verdicts = {r.call.op: r for r in run.records()}
    lacking = verdicts["aten::hardswish"]
    assert (lacking.verdict.status, lacking.verdict.cause) == (Status.UNSUPPORTED, Cause.MISSING_OPERATOR)
    assert lacking.missing_kernel == "aten::hardswish"
    assert verdicts["aten::exp"].verdict.status is Status.MATCH
    assert str(venv) not in str(run.info)
    assert run.info.target == 'cpu[env:GREETING="a, b]",python="(a path)",threads=1]'


def test_it_as_the_reference(spec):
    with shadowrun.compare("cpu", ref=spec) as run:
        torch.nn.functional.hardswish(torch.ones(3)).exp()
    verdicts = {r.call.op: r.verdict for r in run.records()}
    assert verdicts["aten::hardswish"].status is Status.UNVERIFIED
    assert "is not currently implemented for the torch" in verdicts["aten::hardswish"].evidence
    assert verdicts["aten::exp"].status is Status.MATCH


def test_a_kernel_that_crashes_or_hangs_there(spec, library):
    """The program goes on, with its own results, and the next call finds another process."""
    with shadowrun.compare(spec, ops=["otherform::*", "aten::exp"], call_limit_s=60.0) as run:
        x = torch.ones(3)
        pids = [run._target.remote.pid]
        y = library.crash(x)
        a = y.exp()
        pids.append(run._target.remote.pid)
        run._target.remote.limit_s = 1.0
        z = library.hang(y)
        run._target.remote.limit_s = 60.0
        b = z.exp()
        pids.append(run._target.remote.pid)
    assert torch.equal(z, x)
    assert torch.equal(a, b)
    assert len({*pids}) == 3
    verdicts = {r.call.op: r.verdict for r in run.records()}
    for op, explanation in (
        ("otherform::crash", "worker died: signal 11 (SIGSEGV)"),
        ("otherform::hang", "worker hung: no answer within 1 s, ended by signal 9 (SIGKILL)"),
    ):
        assert verdicts[op].status is Status.ERROR
        assert verdicts[op].explanation == explanation
    assert run.counts()[Status.MATCH] == 2


def test_a_process_that_cannot_be_started_again_is_left_alone(venv, tmp_path, monkeypatch):
    """The environment is removed while the program runs: three tries, and each call says why it is not compared."""
    path = interpreter(tmp_path / "python", f'exec "{venv}/bin/python" "$@"')
    worker = Worker(parse(f"cpu[python={path}]"))
    worker.start()
    path.unlink()
    os.kill(worker.pid, signal.SIGKILL)
    x = torch.ones(2)
    with pytest.raises(WorkerDied, match=r"worker died: signal 9 \(SIGKILL\)"):
        worker.call("aten::neg", (x,), {}, ONE, [])
    for _ in range(3):
        with pytest.raises(WorkerDied, match=r"could not be started again: .* does not exist"):
            worker.call("aten::neg", (x,), {}, ONE, [])
    monkeypatch.setattr(worker, "_ensure_started", lambda: pytest.fail("a fourth try"))
    with pytest.raises(WorkerDied, match=r"could not be started again$"):
        worker.call("aten::neg", (x,), {}, ONE, [])


# -- what cannot be such a platform ------------------------------------------------------------------


def refused(spec):
    with pytest.raises(PlatformError) as caught:
        shadowrun.compare(spec)
    assert caught.value.slug == "no-worker"
    return str(caught.value)


def interpreter(path, script):
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


def test_no_such_interpreter(tmp_path):
    assert "interpreter '/nowhere/python' does not exist" in refused("cpu[python=/nowhere/python]")
    assert f"interpreter '{tmp_path}/bin/python' does not exist" in refused(f"cpu[python={tmp_path}]")
    (tmp_path / "text").write_text("", encoding="utf-8")
    assert "may not be executed" in refused(f"cpu[python={tmp_path}/text]")


def test_something_else_than_an_interpreter(tmp_path):
    path = interpreter(tmp_path / "other", "echo I am something else >&2; exit 3")
    assert refused(f"cpu[python={path}]").endswith("did not start (exit status 3): I am something else.")
    path = interpreter(tmp_path / "silent", "exit 0")
    assert refused(f"cpu[python={path}]").endswith("did not start (exit status 0): it wrote nothing.")


def test_an_interpreter_without_torch(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(tmp_path)], check=True)
    assert "it has no torch (Python 3." in refused(f"cpu[python={tmp_path}]")
    (packages,) = tmp_path.glob("lib/python*/site-packages")
    (packages / "torch.py").write_text("__version__ = '1.13.1+cpu'\n", encoding="utf-8")
    assert "its torch 1.13.1+cpu is too old, 2.11 is needed" in refused(f"cpu[python={tmp_path}]")
    (packages / "torch.py").write_text("raise OSError('libcudart.so.13: no such file')\n", encoding="utf-8")
    assert "OSError: libcudart.so.13: no such file" in refused(f"cpu[python={tmp_path}]")
    (packages / "other.pth").write_text("import sys; sys.version_info = (3, 9, 18)\n", encoding="utf-8")
    assert "Python 3.9 is too old, 3.11 is needed" in refused(f"cpu[python={tmp_path}]")
