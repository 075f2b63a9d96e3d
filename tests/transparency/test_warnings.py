"""What C++ and Python code warns of in the program's calls comes as without us: message, line, how often, error."""

from __future__ import annotations

import contextlib
import traceback
import warnings

import pytest
import torch

import shadowrun
from tests.native.both_ways import in_python

OPTIONS = {
    "compared": {},
    "settings": {"target": "cpu[threads=1]"},
    "recorded": {"replay": False},
    "drift": {"drift": True},
    "budget": {"budget": 2.0},
    "selected": {"ops": ["aten::exp"]},
}


@pytest.fixture(params=["compiled", "python"])
def way(request):
    with contextlib.nullcontext() if request.param == "compiled" else in_python():
        yield


@pytest.fixture(scope="module")
def told():
    """A custom operator whose kernel is Python code that warns."""

    @torch.library.custom_op("shadowrun_warnings::told", mutates_args=())
    def told(x: torch.Tensor) -> torch.Tensor:
        warnings.warn("told by Python", FutureWarning, stacklevel=1)
        return x + 1

    return told


def program(told):
    x, z = torch.ones(1), torch.complex(torch.ones(2), torch.ones(2)).requires_grad_()
    for _ in range(3):
        x.std()
        x.exp().sum()
        x.var().add_(1)
        told(x)
        z.to(torch.float32).sum().backward()
        torch.var_mean(x)
        torch.add(torch.ones(2), 1, out=torch.zeros(3))
    torch.ops.aten.std.default(x)
    with torch.inference_mode():
        x.std()
    return torch.std(x)


def seen(told, prepare):
    """(category, message, file, line) of each warning that is shown."""
    with warnings.catch_warnings(record=True) as caught:
        prepare()
        program(told)
        program(told)
    return [(w.category, str(w.message), w.filename, w.lineno) for w in caught]


def always():
    warnings.simplefilter("always")


def once_for_each_line():
    warnings.simplefilter("default")
    globals().get("__warningregistry__", {}).clear()


def in_this_module():
    """As Python itself shows deprecations: those of one module, and no others."""
    warnings.simplefilter("ignore")
    warnings.filterwarnings("always", module=__name__.replace(".", r"\."))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("prepare", [always, once_for_each_line, in_this_module])
@pytest.mark.usefixtures("way")
def test_warnings_come_as_without(options, prepare, told):
    seen(told, always)  # some come once for each process
    plain = seen(told, prepare)
    with shadowrun.compare(**{"target": "cpu", **options}) as run:
        compared = seen(told, prepare)
    assert len({line for _, _, file, line in plain if file == __file__}) >= 7
    assert compared == plain
    assert run.internal_failures() == []


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.usefixtures("way")
def test_a_warning_as_an_error_comes_from_the_programs_line(options):
    x = torch.ones(1)

    def fail():
        with pytest.raises(UserWarning, match="degrees of freedom") as caught:
            x.std()
        return traceback.extract_tb(caught.tb)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (plain,) = fail()
        with shadowrun.compare(**{"target": "cpu", **options}):
            tracebacks = [fail(), fail(), fail()]
    for entries in tracebacks:
        assert [(e.filename, e.lineno) for e in (entries[0], entries[-1])] == [(plain.filename, plain.lineno)] * 2
