"""Fingerprints differ between platforms, hold plain values and contain no private names."""

import getpass
import json
import os
import socket
from pathlib import Path

import pytest
import torch

from shadowrun.platforms import resolve
from shadowrun.platforms.fingerprint import fingerprint, versions


def test_holds_what_decides_about_numerics():
    facts = fingerprint(resolve("cpu"))
    assert facts["threads"] == torch.get_num_threads()
    assert facts["torch"] == torch.__version__
    assert facts["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert facts["cores"] == os.cpu_count()
    assert facts["memory_gib"] > 0
    assert facts["cpu"]
    assert {"mkl", "onednn", "torch_git", "env", "cpu_flags"} <= facts.keys()


def test_settings_show():
    plain, other = fingerprint(resolve("cpu")), fingerprint(resolve("cpu[threads=1,mkldnn=off,deterministic=on]"))
    changed = {key for key in plain if plain[key] != other[key]}
    assert {"platform", "mkldnn", "deterministic"} <= changed <= {"platform", "mkldnn", "deterministic", "threads"}
    assert other["threads"] == 1


def test_is_json():
    assert json.loads(json.dumps(fingerprint(resolve("lazy"))))["device"] == "lazy"


def test_environment_that_decides_about_numerics(monkeypatch):
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    monkeypatch.setenv("KMP_AFFINITY", "explicit,proclist=/home/someone/list")
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    env = fingerprint(resolve("cpu"))["env"]
    assert env["MKL_CBWR"] == "COMPATIBLE"
    assert env["KMP_AFFINITY"] == "(a path)"
    assert "SECRET_TOKEN" not in env


@pytest.mark.parametrize("secret", [socket.gethostname(), str(Path.home()), str(Path.cwd()), "/home", "/tmp"])
def test_has_no_private_names(secret):
    text = json.dumps(fingerprint(resolve("cpu")))
    assert secret not in text or len(secret) < 4


def test_user_name_is_no_value():
    assert getpass.getuser() not in [str(value) for value in fingerprint(resolve("cpu")).values()]


def test_versions():
    found = versions()
    assert found["torch"] == torch.__version__
    assert set(found) == {"native", "numpy", "python", "shadowrun", "torch"}
    assert all(found.values())
