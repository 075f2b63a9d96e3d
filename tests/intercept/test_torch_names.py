"""A torch that lacks a private name: a comparison without what that served, or one clean error. Untested versions."""

from __future__ import annotations

import ast
import functools
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import shadowrun
from shadowrun import native, torch_versions
from shadowrun.cli.main import main

ROOT = Path(__file__).parents[2]
PLACES = {
    "torch_private.py": "cpu[threads=1]",
    "intercept/torchapi.py": "cpu[threads=1]",
    "intercept/torch_operators.py": "cpu[threads=1]",
    "intercept/torch_compiler.py": "cpu[threads=1]",
    "platforms/torchplatform.py": "cpu[threads=1]",
    "sim/device.py": "sim",
    "compiled/torchcompile.py": "compiled",
    "compiled/regions/torchregions.py": "compiled",
}
"""Modules that ask for what they cannot do without, and a platform on which a comparison imports them: ``compiled`` is
``cpu[threads=1]`` with ``compiled=True``."""

FOR_LAZY = {"torch._is_functional_tensor", "torch._functionalize_sync", "torch._from_functional_tensor"}


def tree_of(place):
    return ast.parse((ROOT / "shadowrun" / place).read_text(encoding="utf-8"))


@functools.cache
def aliases(place):
    """What names of a module stand for that it imports from torch, for types only too."""
    found = {}
    for node in ast.walk(tree_of(place)):
        if isinstance(node, ast.Import):
            found |= {a.asname: a.name for a in node.names if a.asname}
        if isinstance(node, ast.ImportFrom):
            found |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return {name: path for name, path in found.items() if path.startswith("torch.")}


def dotted(place, node):
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([aliases(place).get(node.id, node.id), *reversed(names)])


def asked_for(place):
    """Names that a module gives to `need` and `optional`, or asks for with ``getattr``."""
    found = set()
    for node in ast.walk(tree_of(place)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("torch."):
            found.add(node.value)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            owner, name = dotted(place, node.args[0]), node.args[1]
            if owner.startswith("torch.") and isinstance(name, ast.Constant):
                found.add(f"{owner}.{name.value}")
    return {name for name in found if " " not in name}


def used(place):
    """Private names of torch that a module's code reads, as attributes or by a name that it imported."""
    annotations = {id(n) for f in ast.walk(tree_of(place)) for n in [getattr(f, "annotation", None)] if n}
    read = [
        n for n in ast.walk(tree_of(place)) if isinstance(n, (ast.Attribute, ast.Name)) and id(n) not in annotations
    ]
    chains = {dotted(place, n).removesuffix(".__call__") for n in read}  # which every class has
    private = {c for c in chains if c.startswith("torch.") and any(p.startswith("_") for p in c.split("."))}
    return {c for c in private if not any(other.startswith(c + ".") for other in private)}


@pytest.mark.parametrize("place", PLACES)
def test_what_a_module_uses_it_asks_for(place):
    known = set().union(*(asked_for(p) for p in PLACES))
    assert {name for name in used(place) - known if not any(k.startswith(name + ".") for k in known)} == set()


def optional(place):
    """The names among them that it can do without."""
    calls = [n for n in ast.walk(tree_of(place)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    return {call.args[0].value for call in calls if call.func.id == "optional"}


def platform_for(place, name):
    return "lazy" if name in FOR_LAZY or "_lazy" in name else PLACES[place]


@functools.cache
def outcomes(platform):
    """What becomes of each name that is tried on a platform, those of all places in one process."""
    asked = {name for place in PLACES for name in asked_for(place) if platform_for(place, name) == platform}
    names = sorted(asked)
    command = [sys.executable, "-m", "tests.intercept.without_names", platform, *names]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment)
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [t["name"] for t in found] == names
    return {t["name"]: t for t in found}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each name is deleted in a forked process")
@pytest.mark.parametrize(("place", "name"), [(place, name) for place in PLACES for name in sorted(asked_for(place))])
def test_without_a_name(place, name):
    outcome = outcomes(platform_for(place, name))[name]
    if not outcome["deleted"]:
        pytest.skip("a name of a C type stays, or this torch has none")
    if "error" in outcome:
        assert outcome["error"] == "PlatformError", outcome
        assert outcome["slug"] in ("torch-lacks", "absent-device")
        assert outcome["slug"] == "absent-device" or name in outcome["message"]
        assert (
            outcome["slug"] == "absent-device"
            or f"{torch_versions.OLDEST} to {torch_versions.NEWEST}" in outcome["message"]
        )
        assert name not in optional(place)
        return
    assert outcome["failures"] == []
    assert set(outcome["statuses"]) <= {"match", "skipped"}
    assert len(outcome["warned"]) == 1
    assert all(what in outcome["warned"][0] for what in outcome["off"])
    assert outcome["off"] or name not in optional(place)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="each name is deleted in a forked process")
def test_most_names_can_be_deleted():
    found = [t for platform in dict.fromkeys(PLACES.values()) for t in outcomes(platform).values()]
    assert sum(t["deleted"] for t in found) > 0.8 * len(found)
    assert sum("statuses" in t for t in found) >= 5
    assert sum("error" in t for t in found) >= 30


@pytest.mark.parametrize("version", ["2.11.0", "2.13.0+cu130", "2.15.3"])
def test_versions_that_were_tested(version, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    assert torch_versions.untested() == ""


@pytest.mark.parametrize("version", ["2.16.0a0+git1", "3.0.0", "2.10.0", "unknown"])
def test_a_version_that_was_not_is_outcome_of_once(version, monkeypatch):
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.setattr(torch_versions, "_warned", False)
    monkeypatch.setitem(torch_versions._off, "torch._C._x", "something")
    with pytest.warns(shadowrun.ShadowrunWarning) as caught:
        shadowrun.compare("cpu")
    assert [w.filename for w in caught] == [__file__]
    assert f"this is torch {version}. Switched off" in str(caught[0].message)
    assert "something (no torch._C._x)" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shadowrun.compare("cpu")


def test_the_versions_say_what_is_off(monkeypatch, capsys):
    monkeypatch.setattr(native, "why_not", "")
    monkeypatch.setattr(native, "lacks", ["torch's C shim"])
    assert native.state() == "partial (torch's C shim)"
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.endswith("native partial (torch's C shim)\n")
    assert main(["platforms"]) == 0
    assert "native partial (torch's C shim), " in capsys.readouterr().out
