"""Fallbacks on the mechanism that vendors use: a device in C++ whose missing kernels go through a boxed CPU fallback.

Run by ``nox -s cpp_device``: it needs a C++ compiler and ninja. Each scenario has its own process: torch has one
private-use device per process, and this one's is the simulated device's.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.cpp_device

ROOT = Path(__file__).parents[2]
PRELUDE = """
import json, os, sys, warnings, torch
from tests.platforms.cpp_device.plugin import *
from tests.platforms.cpp_device.program import *
take, manner = start(sys.argv[1], NAME)
import shadowrun
"""


def run(arguments, *folders):
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [ROOT, *folders])), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done


@pytest.fixture(scope="session")
def library():
    for tool in (os.environ.get("CXX", "c++"), "ninja"):
        if shutil.which(tool) is None and shutil.which(tool, path=str(Path(sys.executable).parent)) is None:
            pytest.skip(f"the C++ device cannot be compiled: {tool} is not on the PATH")
    return run(["tests/platforms/cpp_device/build.py"]).stdout.strip().splitlines()[-1]


@pytest.fixture
def in_process(library):
    """Runs a script that prints one JSON value; returns that and what it wrote to stderr."""

    def start(body, name="cppdev"):
        # `_exit`: where a device has an autograd thread, torch alone aborts now and then at the end of the process.
        done = run(["-c", f"NAME = {name!r}{PRELUDE}{body}\nsys.stdout.flush()\nos._exit(0)", library])
        return json.loads(done.stdout.strip().splitlines()[-1]), done.stderr

    return start


COMPARED = """
device = NAME if {own} else "cpu"
manner({manner})
with shadowrun.compare(NAME, ref="cpu") as run:  # first: vendors warn once per process
    compared = every(device)
plain = every(device)
with Truth(take, NAME) as truth:
    assert every(device) == plain
print(json.dumps([compared == plain, truth.calls, reported(run)]))
"""


@pytest.mark.parametrize("own", [True, False], ids=["the device's program", "a program of the CPU"])
@pytest.mark.parametrize("manner", range(4), ids=["silent", "warned each time", "warned once", "warned on stderr"])
def test_each_call_that_fell_back_is_named_and_no_other(in_process, own, manner):
    (same, truth, reported), _ = in_process(COMPARED.format(own=own, manner=manner))
    assert same, "the program gets the same bits and random stream"
    assert reported["own"] == []
    truth = [(op, kernels) for op, kernels in truth if op not in reported["skipped"]]
    fell = [(op, bool(kernels)) for op, kernels in truth]
    assert [(op, status == "fallback") for op, status, *_ in reported["calls"]] == fell
    assert {status for _, status, *_ in reported["calls"]} <= {"match", "fallback", "unverified"}
    assert sum(fallen for _, fallen in fell) > 60, "most kernels are missing"
    assert sum(not fallen for _, fallen in fell) > 10, "some are not"
    known, missed = {"aten::erfinv"}, []  # that one never warns
    for (op, kernels), (_, _, cause, evidence) in zip(truth, reported["calls"], strict=True):
        warned = manner > 0 and not known.issuperset(kernels)
        if manner == 3:  # once for each kernel: the next operator that needs it is silent
            known.update(kernels)
        if kernels and not warned and manner != 3:
            assert (op, cause) == (op, "silent fallback")
            assert "aten::_to_cpu was called" in evidence
        elif warned and cause != "warned fallback":
            missed.append(op)
        elif warned:
            assert "falls back to the CPU" in evidence
    assert missed == []


def test_a_device_that_is_silent_and_one_that_warns_differ_under_any_filter(in_process):
    result, _ = in_process("""
manner(WARNED_ONCE)
causes = {}
x = torch.ones(3).to(NAME)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    with shadowrun.compare(NAME) as run:
        for _ in range(2):
            x.cos(), x.sin(), x.unfold(0, 2, 1), x.expm1()
    for r in run.records():
        causes.setdefault(r.call.op, []).append(str(r.verdict.cause))
print(json.dumps([causes, reported(run)["own"]]))
""")
    causes, own = result
    twice = ["warned fallback"] * 2
    assert causes == dict.fromkeys(("aten::cos", "aten::sin", "aten::unfold", "aten::expm1"), twice)
    assert own == []


@pytest.mark.parametrize("manner", [1, 2])
def test_the_user_s_warnings_come_as_without_us(in_process, manner):
    """In a process each: the device warns once. In backward they come from a thread without Python."""
    script = f"""
manner({manner})
def step():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        x = torch.ones(3).to(NAME).requires_grad_()
        for _ in range(2):
            (x.tanh() + x.cos()).sum().backward()
        torch.ops.aten.sin(x)
    return [[str(w.message), w.category.__name__, w.filename, w.lineno] for w in caught]
"""
    plain, reported = in_process(script + "print(json.dumps(step()))")
    assert plain
    compared, reported_compared = in_process(
        script + "with shadowrun.compare(NAME): found = step()\nprint(json.dumps(found))"
    )
    assert compared == plain
    without_time = [[line.partition("] ")[2] for line in text.splitlines()] for text in (reported, reported_compared)]
    assert without_time[0] == without_time[1]


def test_replays_leave_the_user_his_one_warning(in_process):
    n, _ = in_process("""
manner(WARNED_ONCE)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    with shadowrun.compare(NAME) as run:
        for _ in range(3):
            torch.ones(3).cos()
    assert not caught
    torch.ones(3).to(NAME).cos()
print(json.dumps(len(caught)))
""")
    assert n == 1


def test_what_it_lacks_is_unsupported_and_the_program_goes_on(in_process):
    result, _ = in_process("""
def body(device):
    x = torch.ones(3).to(device)
    return [x.sinh().cpu().tolist(), x.sinh_().cpu().tolist()]
with shadowrun.compare(NAME) as run:
    values = body(NAME)
with shadowrun.compare(NAME) as other:
    body("cpu")
    torch.nn.functional.conv2d(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 2, 2))
try:
    with shadowrun.compare(NAME, on_unsupported="raise"):
        body(NAME)
except NotImplementedError as error:
    raised = str(error)
found = []
for r in (run, other):
    found.append([[f.kind, f.op, str(f.cause), list(f.missing_kernels)] for f in r.findings()])
    assert not r.internal_failures()
print(json.dumps([values == body("cpu"), *found, raised]))
""")
    same, own, other, raised = result
    assert same
    sinh = [["unsupported", op, "missing operator", ["aten::sinh.out"]] for op in ("aten::sinh", "aten::sinh_")]
    assert sorted(own) == sinh
    lacked = [f[:3] for f in sorted(other) if f[0] != "fallback"]
    assert lacked == [["unsupported", "aten::convolution", "missing operator"], *[f[:3] for f in sinh]]
    assert raised.startswith("The operator 'aten::sinh.out' is not currently implemented for the CPPDEV device.")


@pytest.mark.parametrize(
    ("name", "spec"), [("privateuseone", "privateuseone"), ("privateuseone", "privateuseone:0"), ("mychip", "mychip:0")]
)
def test_a_device_is_found_under_the_name_that_it_has(in_process, name, spec):
    result, _ = in_process(
        f"""
from shadowrun.platforms import devices
with shadowrun.compare({spec!r}) as run:
    torch.ones(3).cos()
    torch.ones(3).to(NAME).cos()
there = {{d.device_type: d.detail for d in devices() if d.available}}
print(json.dumps([reported(run)["calls"], there]))
""",
        name,
    )
    calls, there = result
    assert [(op, status) for op, status, *_ in calls if op == "aten::cos"] == [("aten::cos", "fallback")] * 2
    assert name in there
    assert "sim" not in there, "torch has one private-use device"


def test_what_no_witness_sees(in_process):
    """The documented limit: a kernel that copies to the CPU by hand, and says nothing."""
    calls, _ = in_process("""
with shadowrun.compare(NAME) as run:
    torch.ones(3).to(NAME).expm1()
print(json.dumps(reported(run)["calls"]))
""")
    assert [status for op, status, *_ in calls if op == "aten::expm1"] == ["match"]


def test_a_helper_that_calls_to_cpu_itself_is_seen_also_where_the_backend_has_a_kernel_for_it(in_process):
    calls, stderr = in_process("""
library = torch.library.Library("aten", "IMPL")
library.impl("_to_cpu", lambda tensors: [t.cpu() for t in tensors if isinstance(t, torch.Tensor)], "PrivateUse1")
with shadowrun.compare(NAME) as run:
    torch.zeros(3).to(NAME).erfinv()
    torch.zeros(3).to(NAME).cos()
torch.zeros(3).to(NAME).cos()
print(json.dumps(reported(run)["calls"]))
""")
    assert [status for op, status, *_ in calls if op in ("aten::erfinv", "aten::cos")] == ["fallback"] * 2
    assert "Overriding" not in stderr


def test_the_command_line_finds_a_device_that_torch_starts_by_itself(library, tmp_path):
    """A package with an entry point of torch's group, whose device has another name than the package."""
    (tmp_path / "chip_package-1.dist-info").mkdir()
    (tmp_path / "chip_package-1.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: chip_package\nVersion: 1\n"
    )
    (tmp_path / "chip_package-1.dist-info" / "entry_points.txt").write_text(
        "[torch.backends]\nchip_package = chip:load\n"
    )
    (tmp_path / "chip.py").write_text(
        f"def load():\n    from tests.platforms.cpp_device.plugin import start\n    start({library!r}, 'mychip')\n"
    )
    (tmp_path / "train.py").write_text("import torch\ntorch.ones(3, device='mychip').cos()\n")
    data = tmp_path / "run.shadowrun"
    run(["-m", "shadowrun", "run", "--target", "mychip", "--data", str(data), str(tmp_path / "train.py")], tmp_path)
    report = run(["-m", "shadowrun", "report", str(data)], tmp_path).stdout
    assert "aten::cos" in report
    assert "fallback" in report
