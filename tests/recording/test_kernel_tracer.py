"""`kernels=` of a recording: the kernels that ran, and that the program and its output stay as they are."""

import ctypes
import os
import subprocess
import sys
import threading

import pytest
import torch
from torch.nn import functional as F

import shadowrun
from shadowrun.platforms.cpu import CpuSettings
from shadowrun.recording.file_format.recording_file import read
from shadowrun.recording.kernel_paths import path_of
from shadowrun.recording.kernel_tracer import CStdout, KernelTracer, accelerator_parts


def c_stdout_or_reason():
    try:
        CStdout().close()
    except OSError as error:
        return str(error)
    return ""


NO_STREAM = c_stdout_or_reason()
with_libraries = pytest.mark.skipif(bool(NO_STREAM), reason=NO_STREAM)
with_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available() or bool(NO_STREAM), reason="no oneDNN in this torch, or no glibc"
)
with_mkl = pytest.mark.skipif(
    not torch.backends.mkl.is_available() or bool(NO_STREAM), reason="no MKL in this torch, or no glibc"
)


def kernels_of(path):
    """Operator to the names of its kernels, in order."""
    recording, found = read(path), {}
    for call in range(len(recording.calls)):
        number = int(recording.calls["kernel"][call])
        name = recording.kernels[number] if number >= 0 else ""
        found.setdefault(recording.context_of(call).op, []).append(name)
    return found


@pytest.fixture
def kernels(tmp_path):
    def kernels(run, **options):
        with shadowrun.record(tmp_path / "a.shadowrec", kernels=True, **options):
            run()
        return kernels_of(tmp_path / "a.shadowrec")

    return kernels


@with_onednn
def test_a_convolution_of_onednn(kernels):
    x, w = torch.rand(4, 32, 32, 32), torch.rand(32, 32, 3, 3)
    (name,) = kernels(lambda: F.conv2d(x, w, padding=1))["aten::convolution"]
    operator, library = name.split("; ")
    assert operator == "aten::mkldnn_convolution"
    assert library.startswith("onednn convolution ")
    assert path_of(name) in ("direct", "GEMM", "Winograd")


@with_onednn
def test_without_onednn_another_kernel_runs(kernels):
    x, w = torch.rand(4, 32, 32, 32), torch.rand(32, 32, 3, 3)
    with CpuSettings((("mkldnn", False),)):
        (name,) = kernels(lambda: F.conv2d(x, w, padding=1))["aten::convolution"]
    assert name.startswith("aten::_slow_conv2d_forward")
    assert path_of(name) == "GEMM"


@with_mkl
def test_a_product_of_mkl(kernels):
    (name,) = kernels(lambda: torch.rand(64, 64) @ torch.rand(64, 64))["aten::mm"]
    assert name.startswith("aten::mm; mkl SGEMM")
    assert path_of(name) == "GEMM"


def test_kernels_of_torch_have_their_instruction_set(kernels):
    found = kernels(lambda: (torch.ones(8).sum(), torch.ones(8).view(2, 4)))
    assert found["aten::sum"] == [f"aten::sum {torch.backends.cpu.get_cpu_capability()}"]
    assert found["aten::view"] == [""]


def test_backward_and_optimizer_have_kernels(kernels):
    net = torch.nn.Linear(8, 4)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False)

    def step():
        net(torch.rand(2, 8)).sum().backward()
        optimizer.step()

    found = kernels(step)
    assert all(path_of(name) == "GEMM" for name in found["aten::addmm"] + found["aten::mm"])
    assert found["aten::add_.Tensor"][0].startswith("aten::add_ ")


def test_without_the_option_nothing_is_recorded(tmp_path):
    with shadowrun.record(tmp_path / "a.shadowrec"):
        torch.ones(8).sum()
    recording = read(tmp_path / "a.shadowrec")
    assert recording.kernels == ()
    assert set(recording.calls["kernel"].tolist()) == {-1}
    assert "kernels" not in recording.processes[0].options


def test_the_recording_says_that_it_has_kernels(kernels, tmp_path):
    kernels(lambda: torch.ones(2))
    assert read(tmp_path / "a.shadowrec").processes[0].options["kernels"] is True


def test_results_and_exceptions_are_those_of_the_program(kernels):
    x, w = torch.rand(4, 16, 20, 20, requires_grad=True), torch.rand(8, 16, 3, 3, requires_grad=True)

    def run():
        x.grad = w.grad = None
        y = F.conv2d(x, w)
        y.square().mean().backward()
        return y.detach(), x.grad, w.grad

    plain, recorded = run(), []
    found = kernels(lambda: recorded.extend(run()))
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    assert len(found["aten::convolution_backward"]) == 1

    def fails():
        torch.ones(2, 3) @ torch.ones(2, 3)

    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        kernels(fails)
    assert not torch._C._autograd._profiler_enabled()


def test_a_program_that_profiles_itself_gets_its_own_profile(kernels, tmp_path):
    def run():
        with torch.autograd.profiler.profile() as profile:
            torch.ones(8).sum()
        names.append([event.name for event in profile.function_events])
        torch.ones(8).sum()

    names = []
    with shadowrun.record(tmp_path / "b.shadowrec"):
        run()
    found = kernels(run)
    assert "aten::sum" in names[0]
    assert names[0] == names[1]
    assert found["aten::sum"][0] == ""
    assert found["aten::sum"][1].startswith("aten::sum ")


PROGRAM = """
import ctypes, os, subprocess, sys, threading
import torch
import shadowrun

libc = ctypes.CDLL(None)
x, w = torch.rand(4, 32, 32, 32), torch.rand(32, 32, 3, 3)

@torch.library.custom_op("kernels_test::shout", mutates_args=())
def shout(x: torch.Tensor) -> torch.Tensor:
    libc.printf(b"from C\\n")
    print("from Python", flush=True)
    subprocess.run(["echo", "from a child"], check=True)
    return x.clone()

@shout.register_fake
def _(x):
    return torch.empty_like(x)

def run():
    libc.printf(b"no newline yet")
    libc.fflush(None)
    print(" before", flush=True)
    torch.nn.functional.conv2d(x, w)
    x[0, 0] @ x[0, 0]
    shout(x)
    libc.fflush(None)
    if "verbose" in sys.argv:
        with torch.backends.mkldnn.verbose(torch.backends.mkldnn.VERBOSE_ON):
            torch.nn.functional.conv2d(x, w)
        libc.fflush(None)
    torch.nn.functional.conv2d(x, w)
    print("after")

with shadowrun.record(sys.argv[1], kernels=True):
    run()
"""


def output_of(tmp_path, *arguments, **variables):
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py", "a.shadowrec", *arguments]
    environment = os.environ | variables
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "profiler_start" not in done.stderr
    return done.stdout.splitlines()


EXPECTED = sorted(["no newline yet before", "from C", "from Python", "from a child", "after"])


@with_onednn
def test_the_programs_output_is_unchanged(tmp_path):
    assert sorted(output_of(tmp_path)) == EXPECTED
    names = kernels_of(tmp_path / "a.shadowrec")["aten::convolution"]
    assert len(names) == 2
    assert all("onednn convolution" in name for name in names)


@with_onednn
@pytest.mark.parametrize(
    ("arguments", "variables", "n_printed", "n_calls"),
    [(("verbose",), {}, 1, 3), ((), {"ONEDNN_VERBOSE": "1"}, 2, 2)],
    ids=["by the program", "by a variable"],
)
def test_verbose_output_that_is_wanted_is_printed(tmp_path, arguments, variables, n_printed, n_calls):
    lines = output_of(tmp_path, *arguments, **variables)
    assert [",convolution," in line for line in lines if ",exec," in line].count(True) == n_printed
    assert sorted(line for line in lines if "onednn_verbose" not in line) == EXPECTED
    names = kernels_of(tmp_path / "a.shadowrec")["aten::convolution"]
    assert len(names) == n_calls
    assert all("onednn convolution" in name for name in names)


@with_libraries
def test_c_stdout_is_captured_and_given_back():
    libc = ctypes.CDLL(None)
    stream = CStdout()
    real = ctypes.c_void_p.in_dll(libc, "stdout").value
    for text in (b"a longer text\n", b"", b"x"):
        stream.begin()
        libc.printf(text)
        assert stream.end() == text
        assert ctypes.c_void_p.in_dll(libc, "stdout").value == real
    stream.begin()
    stream.close()
    stream.close()
    assert ctypes.c_void_p.in_dll(libc, "stdout").value == real


def test_kernels_of_two_calls_at_once_are_not_known():
    tracer, inside, go = KernelTracer(), threading.Event(), threading.Event()
    names = {}

    def waits():
        inside.set()
        go.wait(60)
        return torch.ones(2).sum()

    def outer():
        tracer.run("cpu", waits, (), {})
        names["outer"] = tracer.name
        tracer.run("cpu", lambda: torch.ones(2).sum(), (), {})
        names["alone"] = tracer.name

    tracer.start()
    thread = threading.Thread(target=outer)
    thread.start()
    assert inside.wait(60)
    tracer.run("cpu", lambda: torch.ones(2).cumsum(0), (), {})
    names["inner"] = tracer.name
    go.set()
    thread.join()
    tracer.stop()
    assert (names["outer"], names["inner"]) == ("", "")
    assert "aten::sum" in names["alone"]


def test_parts_of_an_accelerators_kernels():
    ran = ["Memcpy HtoD (Pageable -> Device)", "sm80_xmma_gemm_f32", "Memset (Device)", "splitKreduce_kernel"]
    assert accelerator_parts("cuda", ran) == ["cuda sm80_xmma_gemm_f32", "cuda splitKreduce_kernel"]


def test_bad_option():
    with pytest.raises(shadowrun.UsageError, match="kernels=2: use True or False"):
        shadowrun.record("a.shadowrec", kernels=2)
