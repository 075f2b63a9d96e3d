"""Which devices this machine has, and what a resolved platform does."""

import subprocess
import sys
import types

import pytest
import torch

from shadowrun.errors import PlatformError
from shadowrun.platforms import available, devices, plugins, resolve
from shadowrun.platforms import device as device_module


def absent(spec):
    with pytest.raises(PlatformError) as caught:
        resolve(spec)
    assert caught.value.slug == "absent-device"
    return str(caught.value)


def test_cpu():
    cpu = resolve("cpu")
    assert (cpu.device, cpu.dispatch_key, cpu.functionalizes, cpu.has_program_settings) == (
        torch.device("cpu"),
        "CPU",
        False,
        True,
    )
    assert str(cpu) == "cpu"
    cpu.synchronize()


def test_no_settings_no_context():
    assert resolve("cpu").context() is resolve("cpu").context()
    assert resolve("cpu[threads=1]").context() is not resolve("cpu[threads=1]").context()


def test_lazy_is_started_and_computes():
    lazy = resolve("lazy")
    assert (lazy.device, lazy.dispatch_key, lazy.functionalizes) == (torch.device("lazy:0"), "Lazy", True)
    x = torch.ones(3, device="lazy") + 1
    lazy.synchronize()
    assert x.cpu().tolist() == [2.0, 2.0, 2.0]
    assert lazy.rng_state() is None
    lazy.set_rng_state(None)
    assert resolve("lazy") == lazy


def test_same_device_ignores_settings_and_a_missing_index():
    cpu, one, lazy = resolve("cpu"), resolve("cpu[threads=1]"), resolve("lazy")
    assert cpu.same_device(one)
    assert not cpu.same_device(lazy)
    assert lazy.same_device(torch.device("lazy"))
    assert not lazy.same_device(torch.device("lazy", 1))


def test_cpu_rng_round_trip():
    cpu = resolve("cpu")
    state = cpu.rng_state()
    first = torch.rand(4)
    cpu.set_rng_state(state)
    assert torch.equal(first, torch.rand(4))


def test_absent_device_says_why_and_what_there_is():
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    message = absent("cuda:1")
    assert "Platform 'cuda:1' is absent on this machine: torch finds no such hardware" in message
    assert "Present: cpu, lazy" in message


def test_absent_plugin_names_its_package():
    assert "the package torch_musa is not installed" in absent("musa")
    assert "the package habana_frameworks.torch is not installed" in absent("hpu")


def test_plugin_that_fails_to_start(monkeypatch):
    spec = types.SimpleNamespace()
    monkeypatch.setattr(device_module.importlib.util, "find_spec", lambda _: spec)

    def broken(name):
        raise OSError("libascend.so: cannot open\nsecond line")

    monkeypatch.setattr(device_module.importlib, "import_module", broken)
    assert "its package failed to start: OSError: libascend.so: cannot open. Present" in absent("npu")


def test_index_beyond_the_last():
    assert "there is 1 of them, counted from 0" in absent("lazy:1")
    assert "there is 1 of them" in absent("cpu:1")


def brought(monkeypatch, entry):
    group = device_module.ENTRY_POINT_GROUP
    monkeypatch.setattr(plugins, "entry_points", lambda asked: [entry] if asked == group else [])


def test_device_of_another_package(monkeypatch):
    started = []

    class Entry:
        name = "hip"

        def load(self):
            return lambda: started.append(self.name)

    monkeypatch.setattr(
        plugins, "entry_points", lambda group: [Entry()] if group == device_module.ENTRY_POINT_GROUP else []
    )
    assert "hip" in available()
    platform = resolve("hip")
    assert started == ["hip"]
    assert platform.device == torch.device("hip", 0)


def test_entry_point_that_starts_nothing(monkeypatch):
    class Entry:
        name = "nothere"

        def load(self):
            return lambda: None

    monkeypatch.setattr(
        plugins, "entry_points", lambda group: [Entry()] if group == device_module.ENTRY_POINT_GROUP else []
    )
    assert "torch still has no device of this name" in absent("nothere")


def test_device_module_signatures(monkeypatch):
    """torch.cuda's functions take a device, torch.mps's take none."""
    calls = []
    with_device = types.SimpleNamespace(
        synchronize=lambda device=None: calls.append(("sync", device)),
        get_rng_state=lambda device="x": device,
        set_rng_state=lambda state, device="x": calls.append((state, device)),
    )
    without = types.SimpleNamespace(
        synchronize=lambda: calls.append("sync"),
        get_rng_state=lambda: "state",
        set_rng_state=lambda state: calls.append(state),  # noqa: PLW0108 - one parameter, as torch.mps has it
    )
    platform = device_module.Platform(device_module.parse("xpu:1"), torch.device("xpu", 1), "XPU")
    for module in (with_device, without):
        monkeypatch.setattr(device_module, "_module", lambda _, module=module: module)
        platform.synchronize()
        platform.set_rng_state(platform.rng_state())
    device = torch.device("xpu", 1)
    assert calls == [("sync", device), (device, device), "sync", "state"]


def test_available_and_absent_differ():
    listed = {d.device_type: d for d in devices()}
    assert listed["cpu"].available
    assert listed["lazy"].available
    assert "threads" in listed["cpu"].detail
    assert not listed["musa"].available
    order = [d.available for d in devices()]
    assert order == sorted(order, reverse=True)
    assert available()[0] == "cpu"


def test_listing_starts_no_device():
    code = (
        "import torch, shadowrun.platforms as p; p.devices();"
        "assert torch._C._get_privateuse1_backend_name() == 'privateuseone'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
