"""A program that does not name the simulated device sees no more accelerators than without it."""

import subprocess
import sys

import pytest

from shadowrun.sim import named_in_program

pytestmark = pytest.mark.usefixtures("forked_processes")

ASKS = """
import warnings, torch
def asked(f):
    try:
        return str(f())
    except Exception as e:
        return f"{type(e).__name__}: {e}"
def loaded():
    data = torch.utils.data.TensorDataset(torch.arange(4.0))
    return [b[0].tolist() for b in torch.utils.data.DataLoader(data, 2, pin_memory=True)]
def seen():
    warnings.simplefilter("ignore")
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    return [asked(f) for f in (
        torch.accelerator.is_available, torch.accelerator.current_accelerator, torch.accelerator.device_count,
        lambda: torch.ones(2, device=device).device, lambda: torch.ones(2).pin_memory(), loaded,
        lambda: torch.empty(2, pin_memory=True), lambda: torch.device(0), torch.Event, torch.Stream,
        torch.get_device_module, lambda: hasattr(torch, "sim"), torch._C._get_privateuse1_backend_name,
    )]
"""


def run(code, *arguments):
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_comparison_with_sim_leaves_the_accelerators_as_they_are(new_processes):
    out = run(
        ASKS + "import shadowrun\n"
        "plain = seen()\n"
        "with shadowrun.compare('sim', slow_ratio=1e9) as run:\n    inside = seen()\n"
        "after = seen()\n"
        "assert run.counts()[shadowrun.Status.MATCH] > 0 and not run.findings(), run.findings()\n"
        "for rows in zip(plain, inside, after):\n    assert len(set(rows)) == 1, rows\n"
        "print(str(run.describe()), run.info.target_fingerprint['device'])"
    )
    assert out == "sim against cpu sim\n"


def test_it_is_named_later():
    run(
        "import torch, shadowrun; from shadowrun import sim\n"
        "with shadowrun.compare('sim') as first:\n    torch.ones(2) + 1\n"
        "assert not sim.is_named()\n"
        "sim.enable(flaws=['maximum-drops-nan'])\n"
        "with shadowrun.compare('sim') as run:\n    x = torch.ones(2, device='sim'); y = x + 1\n"
        "    torch.maximum(torch.tensor([float('nan')]), torch.ones(1))\n"
        "assert y.device.type == 'sim' and torch.sim.is_available() and y.sim().is_sim\n"
        "assert [f.op for f in run.findings()] == ['aten::maximum'], run.findings()"
    )


def test_a_comparison_of_a_program_that_names_it(tmp_path):
    script = tmp_path / "named.py"
    script.write_text(
        "import torch, shadowrun\n"
        "with shadowrun.compare('sim'):\n    x = torch.ones(2).to('sim') + 1\n"
        "print(x.device, torch.accelerator.is_available())"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout == "sim:0 True\n"


NAMED = (
    "x.to('sim')",
    "torch.device('sim:0')",
    "DEVICE = 'sim' if wanted else 'cpu'",
    "def main(device='sim'): pass",
    "torch.sim.synchronize()",
    "x.sim()",
    "parser.add_argument('--device', default='sim')",
    "for dev in ('cpu', 'sim'): pass",
    "config = {'device': 'sim'}",
    "train(['sim'])",
    "def f(*, a, dev: str = 'sim'): pass",
    "device: str = 'sim'",
)
NOT_NAMED = (
    "with shadowrun.compare('sim', ref='cpu'): x.to('cpu')",
    "with compare(target='sim'): pass",
    "TARGET = 'sim'",
    "parser.add_argument('--target', default='sim')",
    "hasattr(torch, 'sim')",
    "kind == 'sim'",
    "from shadowrun import sim",
    "import shadowrun.sim",
    "text = 'a sim of things'",
    "x.to('simulation')",
    "x.to('similar'); sim = 3; sim.to(2)",
    "%broken",
)


@pytest.mark.parametrize("source", NAMED)
def test_named(source):
    assert named_in_program.is_named_in_source(source, "sim")


@pytest.mark.parametrize("source", NOT_NAMED)
def test_not_named(source):
    assert not named_in_program.is_named_in_source(source, "sim")


def test_arguments():
    assert all(
        named_in_program.is_named_in_arguments([text], "sim") for text in ("sim", "--device=sim", "device=sim:0")
    )
    assert not any(
        named_in_program.is_named_in_arguments([text], "sim") for text in ("simple", "--similar", "a/sim.txt", "nosim")
    )
