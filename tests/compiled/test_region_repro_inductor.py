"""`shadowrun repro` of what Inductor compiled: with dropout, a buffer that is written to, options; both ways."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shadowrun
from shadowrun.repro import script
from tests.compiled import inductor_faulty
from tests.compiled.regions import compare

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]


class Dropped(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)
        self.register_buffer("n_calls", torch.zeros(()))

    def forward(self, x):
        self.n_calls += 1
        return F.dropout(self.inner(x).relu(), 0.5).sin()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch, fresh_dynamo):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))


def run_script(path, fault=None):
    """In a process of its own, with a fault planted there or without."""
    with_fault = ["-m", "tests.compiled.inductor_faulty", fault] if fault else []
    return subprocess.run(
        [sys.executable, *with_fault, str(path)], capture_output=True, text=True, check=False, cwd=ROOT,
        env=os.environ | {"TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "phase", "op"), [("relu", "forward", "aten.relu.default"), ("where", "backward", "aten.where.self")]
)
def test_the_script_shows_the_fault_and_nothing_once_it_is_mended(tmp_path, monkeypatch, fault, phase, op):
    monkeypatch.setattr(script, "run_script", lambda path, *_: run_script(path, fault))
    model, x, file = Dropped(), torch.randn(4, 6), tmp_path / "run.shadowrun"
    with inductor_faulty.planted(fault):
        with compare(file=file):
            torch.compile(model, options={"epilogue_fusion": False})(x).sum().backward()
        run = shadowrun.load(file)
        (finding,) = [f for f in run.findings() if f.phases == (phase,)]  # backward computes relu again
        for minimise in (True, False):
            made = run.repro(finding, tmp_path / str(minimise), minimise=minimise, time_limit_s=120)
            assert made.shows_fault is True, made
            text = made.script.read_text(encoding="utf-8")
            assert 'options={"epilogue_fusion": False}' in text
            assert text.startswith(f'"""{op if minimise else finding.op}, compiled with inductor, is wrong')
            assert "test_region_repro_inductor.py" in text
            mended = run_script(made.script)
            assert mended.returncode == 0, mended.stderr[-2000:]


def test_a_fault_that_an_option_brings_in_comes_with_the_script_also_from_the_cache(tmp_path):
    for name in ("compiled", "cached"):
        torch._dynamo.reset()
        with compare(file=tmp_path / name) as run:
            model = torch.compile(Dropped(), options={"cpp.inject_relu_bug_TESTING_ONLY": "accuracy"})
            with torch.no_grad():
                model(torch.randn(4, 6))
        (finding,) = run.findings()
        made = run.repro(finding, tmp_path / f"{name} script", time_limit_s=120)
        assert made.shows_fault is True, made
        assert "aten.relu.default" in made.script.read_text(encoding="utf-8")
