"""The old constructor of tensor subclasses works under a comparison, as it does under no other dispatch mode."""

import os
import subprocess
import sys
import threading

import pytest
import torch

import shadowrun
from shadowrun import Status


class Plain(torch.Tensor):
    pass


class Named(torch.Tensor):
    def __new__(cls, data, name):
        made = super().__new__(cls, data)
        made.label = name
        return made


PROGRAMS = [
    lambda: Plain([1.0, 2.0]),
    lambda: Plain(2, 3).zero_(),
    lambda: Plain(torch.arange(3.0)),
    Plain,
    lambda: Plain([[1.0], [2.0]]) + 1,
    lambda: Named([1.0, 2.0], "mine"),
    lambda: torch.Tensor([1.0, 2.0]),
]


@pytest.mark.parametrize("target", ["cpu", "sim"])
@pytest.mark.parametrize("options", [{}, {"replay": False}], ids=str)
@pytest.mark.parametrize("program", PROGRAMS)
def test_it_gives_what_it_gives_plainly(clean_sim, target, options, program):
    plain = program()
    with shadowrun.compare(target, **options) as run:
        found = program()
    assert type(found) is type(plain)
    assert vars(found) == vars(plain)
    assert torch.equal(found.as_subclass(torch.Tensor), plain.as_subclass(torch.Tensor))
    assert not run.findings()
    assert "__new__" not in vars(torch.Tensor)


def test_threads_and_what_is_counted():
    with shadowrun.compare("cpu") as run:
        made = []
        thread = threading.Thread(target=lambda: made.append(Plain([1.0])))
        thread.start()
        thread.join()
    assert type(made[0]) is Plain
    assert run.counts()[Status.SKIPPED] == 1
    assert type(Plain([2.0])) is Plain


@pytest.mark.parametrize("options", ["", ", replay=False", ", drift=True"])
def test_dynamo_imported_meanwhile_sees_torchs_own(options):
    program = f"""
import sys, torch, shadowrun
plain, finders = torch.Tensor.__new__, list(sys.meta_path)
class Plain(torch.Tensor): pass
with shadowrun.compare("cpu"{options}) as run:
    assert "torch._dynamo" not in sys.modules
    compiled = torch.compile(lambda x: x.sin() + 1, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(3)), torch.ones(3).sin() + 1)
    assert type(Plain([1.0])) is Plain
assert torch.Tensor.__new__ is plain and sys.meta_path[-len(finders):] == finders
assert not any(type(f).__module__.startswith("shadowrun") for f in sys.meta_path)
from torch._dynamo.polyfills import tensor
assert "exec_module" not in vars(tensor.__spec__.loader)
if hasattr(tensor, "tensor_pynew"):
    from torch._dynamo.variables import PolyfilledFunctionVariable
    assert plain in PolyfilledFunctionVariable._get_polyfill_handlers()
print("same")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={**os.environ})
    assert done.stdout == "same\n", done.stderr
