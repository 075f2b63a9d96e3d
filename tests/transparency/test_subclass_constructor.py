"""The old constructor of tensor subclasses works under a comparison, as it does under no other dispatch mode."""

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


def test_a_constructor_that_the_program_kept_works_afterwards():
    with shadowrun.compare("cpu"):
        kept = Plain.__new__
        assert type(kept(Plain, [1.0])) is Plain
    assert type(kept(Plain, [1.0])) is Plain


DYNAMO = """
import sys, torch, shadowrun
class T(torch.Tensor):
    pass
assert "torch._dynamo.polyfills.tensor" not in sys.modules
plain = torch.Tensor.__new__
with shadowrun.compare("cpu"):
    assert torch.Tensor.__new__ is plain and T([1.0]).item() == 1
    import torch._dynamo.polyfills.tensor as polyfills
    assert torch.Tensor([1.0]).item() == 1
from torch._dynamo.variables import PolyfilledFunctionVariable
assert torch.Tensor.__new__ is plain
if hasattr(polyfills, "tensor_pynew"):  # since torch 2.13
    assert plain in PolyfilledFunctionVariable._get_polyfill_handlers()
"""


def test_what_torch_reads_of_the_constructor_meanwhile_is_its_own():
    """Dynamo, which `import transformers` loads, keeps what it knows of the constructor by the function itself."""
    done = subprocess.run([sys.executable, "-c", DYNAMO], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
