"""Generated code is followed, whenever its classes are imported, and left as it was."""

from __future__ import annotations

import importlib
import sys

import pytest

from shadowrun.intercept import torch_compiler
from shadowrun.intercept.torch_compiler import GeneratedCode

CLASS = """
class Code:
    def __call__(self, inputs):
        if not inputs:
            raise ValueError("empty")
        total = sum(inputs)
        inputs.clear()
        return total
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Name of a module with a class that stands for Inductor's."""
    name = "module_of_generated_code"
    (tmp_path / f"{name}.py").write_text(CLASS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(torch_compiler, "_CALLED", {name: ("Code", "Absent")})
    yield name
    sys.modules.pop(name, None)


@pytest.mark.parametrize("imported", ["before", "meanwhile"])
def test_calls_are_followed(module, imported):
    seen = []
    code = GeneratedCode(lambda args: seen.append(list(args[0])), seen.append)
    if imported == "before":
        importlib.import_module(module)
    finders = list(sys.meta_path)
    code.start()
    kind = importlib.import_module(module).Code
    assert kind()([1, 2]) == 3
    with pytest.raises(ValueError, match="empty"):
        kind()([])
    assert seen == [[1, 2], 3, [], None]
    code.stop()
    assert kind()([1]) == 1
    assert (len(seen), sys.meta_path) == (4, finders)
    assert "exec_module" not in vars(sys.modules[module].__loader__)
    code.start()
    kind()([1])
    code.stop()
    assert len(seen) == 6


def test_what_other_code_has_replaced_stays(module):
    code = GeneratedCode(lambda args: None, lambda out: None)
    code.start()
    kind = importlib.import_module(module).Code
    kind.__call__ = lambda self, inputs: "theirs"
    code.stop()
    assert kind()([1]) == "theirs"


def test_without_the_class_it_runs_from_the_import_on(module, monkeypatch):
    monkeypatch.setattr(torch_compiler, "_NEEDED", (module, "Absent"))
    entered, left = [], []
    code = GeneratedCode(entered.append, left.append)
    code.start()
    assert entered == []
    importlib.import_module(module)
    code.stop()
    assert (entered, left) == ([()], [])
