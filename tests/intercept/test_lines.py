"""Whose line it is: the user's where a library steps the optimizer, and the cell of a notebook."""

import sys
import types

import pytest
import torch

import shadowrun
from shadowrun.cli.commands import demo_models
from shadowrun.intercept import call_sites
from shadowrun.report.formatting import short_site

LIBRARY = """
class Wrapped:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def step(self):
        self.optimizer.step()

def twice(x):
    return x * 2
"""


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A library that wraps optimizers, as accelerate does."""
    folder = tmp_path / "site-packages" / "acc"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text(LIBRARY, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder.parent))
    import acc  # type: ignore[import-not-found]

    yield acc
    del sys.modules["acc"]


def sites(run):
    return {record.call.site for record in run.records() if record.call.phase == "optimizer"}


def test_the_user_s_line_comes_first_where_a_library_steps_the_optimizer(library):
    weight = torch.ones(3, requires_grad=True)
    weight.grad = torch.ones(3)
    optimizer = library.Wrapped(torch.optim.AdamW([weight]))
    with shadowrun.compare("cpu[threads=1]") as run:
        for _ in range(2):
            optimizer.step()
    (site,) = sites(run)
    own, _, library = site.partition(" (")
    assert own.endswith("in test_the_user_s_line_comes_first_where_a_library_steps_the_optimizer")
    assert own.partition(":")[0].endswith("test_lines.py")
    assert library.endswith("site-packages/acc/__init__.py:7 in Wrapped.step)")
    assert short_site(site) == f"{own.rpartition('/')[2]} (__init__.py:7 in Wrapped.step)"


def test_a_library_s_line_comes_with_the_user_s_line_that_called_it(library):
    with shadowrun.compare("cpu[threads=1]") as run:
        library.twice(torch.ones(3))
    (record,) = run.records(op="aten::mul*")
    line, _, own = record.call.site.removesuffix(")").partition(" (first reached from ")
    assert line.endswith("site-packages/acc/__init__.py:10 in twice")
    assert own.endswith("in test_a_library_s_line_comes_with_the_user_s_line_that_called_it")
    assert short_site(record.call.site) == f"__init__.py:10 in twice ({own.rpartition('/')[2]})"


def test_a_line_of_the_user_s_own_stays_alone():
    weight = torch.ones(3, requires_grad=True)
    weight.grad = torch.ones(3)
    optimizer = torch.optim.AdamW([weight])
    with shadowrun.compare("cpu[threads=1]") as run:
        optimizer.step()
    (site,) = sites(run)
    assert "(" not in site


def test_the_demo_s_lines_are_the_user_s_where_shadowrun_is_installed_too(monkeypatch):
    monkeypatch.setattr(call_sites, "_PACKAGES", call_sites._OWN)  # as where a wheel puts it
    images, labels = torch.ones(32, 8, 8), torch.zeros(32, dtype=torch.long)
    with shadowrun.compare("cpu[threads=1]") as run:
        list(demo_models.train_digits(images, labels, 1))
    found = {record.call.site.partition(":")[0] for record in run.records()}
    assert found == {"cli/commands/demo_models.py"}
    assert all("(" not in site for site in sites(run)), "no line of a library"


@pytest.mark.parametrize(
    ("site", "short"),
    [
        ("src/train.py:3 in step", "train.py:3 in step"),
        ("my (1)/train.py:3 in step", "train.py:3 in step"),
        ("a/train.py:3 in f (lib/o.py:7 in step)", "train.py:3 in f (o.py:7 in step)"),
        ("In [3], line 2 in <module>", "In [3], line 2 in <module>"),
        ("", ""),
    ],
)
def test_short_lines(site, short):
    assert short_site(site) == short


@pytest.mark.parametrize(
    ("filename", "shown"),
    [
        ("/tmp/ipykernel_17/2937.py", "In [3], line 2"),
        ("<ipython-input-5-0c1f>", "In [5], line 2"),
        ("/tmp/ipykernel_17/404.py", "404.py:2"),
    ],
)
def test_cells_of_a_notebook_have_their_number(monkeypatch, filename, shown):
    shell = types.SimpleNamespace(compile=types.SimpleNamespace(_filename_map={"/tmp/ipykernel_17/2937.py": 3}))
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    names = {"torch": torch}
    with shadowrun.compare("cpu[threads=1]") as run:
        exec(compile("x = torch.ones(2)\nx.exp()\n", filename, "exec"), names)
    (record,) = run.records(op="aten::exp")
    assert record.call.site.partition(" in <")[0].endswith(shown)
