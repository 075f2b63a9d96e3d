"""Torch's tables of kernels: read right, and never claiming what they cannot know."""

import functools
import re
from pathlib import Path

import pytest
import torch
import torchgen

from shadowrun.errors import PlatformError
from shadowrun.platforms import torchplatform
from shadowrun.studies.static import coverage as module
from shadowrun.studies.static.coverage import Kernels, declared, kernels


@pytest.fixture(scope="module")
def by_list():
    """The CPU as a device that is not here would be looked up."""
    own = functools.partial(module._is_declared, declared(), "CPU")
    return Kernels("cpu", "CPU", "list", declared(), own, "absent", torchplatform.has_kernel)


def test_list_and_dispatcher_agree_on_every_operator_of_the_cpu(by_list):
    here = kernels("cpu")
    assert here.source == "dispatcher"
    differing = [(op, by_list.state(op), here.state(op)) for op in declared() if by_list.state(op) != here.state(op)]
    assert differing == []
    assert len(declared()) > 2500


def test_an_operator_with_a_kernel_on_the_cpu_does_run_there():
    assert kernels("cpu").state("aten::add.Tensor") == "kernel"  # through add.out
    assert kernels("cpu").state("aten::cudnn_convolution") == "absent"
    with pytest.raises(NotImplementedError):
        torch.ops.aten.cudnn_convolution(
            torch.ones(1, 1, 3, 3), torch.ones(1, 1, 1, 1), [0, 0], [1, 1], [1, 1], 1, False, False, False
        )


def lists(signature, key):
    """Whether torch's own list names a kernel of an operator for a dispatch key."""
    text = (Path(torchgen.__file__).parent / "packaged/ATen/native/native_functions.yaml").read_text(encoding="utf-8")
    entry = text.partition(f"- func: {signature}")[2].partition("- func:")[0]
    return any(key in keys.replace(" ", "").split(",") for keys in re.findall(r"^    ([\w, ]+):", entry, re.MULTILINE))


def test_devices_that_are_not_here():
    mps, cuda, xpu = kernels("mps"), kernels("CUDA"), kernels("xpu")
    assert (mps.key, mps.source) == ("MPS", "native_functions.yaml")
    assert mps.state("aten::relu") == cuda.state("aten::relu") == "kernel"
    assert mps.state("aten::linalg_eig") == "absent"
    assert cuda.state("aten::linalg_eig") == "kernel"
    assert cuda.state("aten::convolution") == "generic"
    assert cuda.state("aten::linear_backward") in ("absent", "kernel")
    assert xpu.source.endswith("in part")
    assert xpu.state("aten::relu") == ("kernel" if lists("relu(Tensor self)", "XPU") else "unknown")  # since torch 2.14


def test_a_device_of_this_process_is_looked_up_in_the_dispatcher(clean_sim):
    sim = kernels("sim")
    assert (sim.key, sim.source) == ("PrivateUse1", "dispatcher")
    assert sim.state("aten::mm") == "kernel"
    assert sim.state("aten::_cudnn_rnn") == "absent"


def test_an_operator_that_no_table_has():
    assert kernels("mps").state("absent::operator") == "absent"
    assert kernels("xpu").state("absent::operator") == "unknown"


def test_a_custom_operator_made_of_others():
    library = torch.library.Library("shadowrun_static", "DEF")
    library.define("twice(Tensor x) -> Tensor")
    library.impl("twice", lambda x: x + x, "CompositeExplicitAutograd")
    assert kernels("mps").state("shadowrun_static::twice") == "generic"


@pytest.mark.parametrize("name", ["abacus", "npu"])
def test_a_device_that_torch_does_not_know(name):
    with pytest.raises(PlatformError, match=name):
        kernels(name)


def test_without_pyyaml(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    with pytest.raises(PlatformError, match=r"shadowrun\[static\]"):
        declared.__wrapped__()
