"""A part of what `real_platforms` measures: the true bugs that it distinguishes from false alarms, without it."""

import json
import os
import subprocess
import sys

import pytest
import torch

from shadowrun.platforms import torchplatform
from tests.ground_truth import layouts, real_cases, real_platforms
from tests.ground_truth.real_cases import Case, run_cases
from tests.ground_truth.real_platforms import SETUPS, summary

pytestmark = pytest.mark.usefixtures("forked_processes")

NAMES = ("group-norm-cnn-1", "half-products-1", "layouts-2")
OPERATORS = ("conv2d", "batch_norm", "interpolate bicubic")
CASES = [*map(Case, NAMES), *(Case(f"operator {n}", operator=True) for n in OPERATORS)]


@pytest.mark.parametrize(
    "name", ["cpu[threads=1]", "cpu[mkldnn=off]", "plainest kernels, channels last", "channels last against contiguous"]
)
def test_real_numerics_differ_by_rounding_only(name):
    begun = []
    found = summary(list(run_cases(SETUPS[name], CASES, begun.append)))
    assert begun == CASES
    assert found["false_alarms"] == found["true_bugs"] == []
    assert found["could_not_run"] == {}
    assert found["equal"] + found["rounding"] == found["counts"]["match"] > 20
    if name != "cpu[threads=1]":
        assert found["rounding"] >= 1
        assert found["max_ulp"] >= 1


def test_a_wrong_layout_would_be_found(monkeypatch):
    plain = layouts._results

    def wrong(func, args, kwargs):
        found = plain(func, args, kwargs)
        images = any(isinstance(a, torch.Tensor) and a.dim() == 4 and not a.is_contiguous() for a in args)
        return tuple(v * 1.001 for v in found) if images else found

    monkeypatch.setattr(layouts, "_results", wrong)
    rows = list(
        run_cases(
            SETUPS["channels last against contiguous"],
            [Case("operator interpolate bicubic", operator=True)],
            lambda _: None,
        )
    )
    assert summary(rows)["false_alarms"]


def test_the_run_can_be_stopped_and_goes_on(tmp_path, capsys):
    output = tmp_path / "out.json"
    arguments = ["--platform", "channels last against*", "--case", "*[ct]a*-[01]", "--output", str(output)]
    with pytest.raises(SystemExit) as ended:
        real_platforms.main(arguments)
    assert ended.value.code == 0
    assert "| channels last against contiguous | " in capsys.readouterr().out
    rows = output.with_suffix(".rows").read_text().splitlines()
    output.with_suffix(".rows").write_text("\n".join(rows[:3]) + "\n")
    with pytest.raises(SystemExit):
        real_platforms.main(arguments)
    again = output.with_suffix(".rows").read_text().splitlines()
    assert again[:3] == rows[:3]
    assert sorted(json.loads(r)["case"] for r in again) == sorted(json.loads(r)["case"] for r in rows)


def test_the_vector_kernels_of_this_cpu_overflow_early():
    """SLEEF documents it: sinhf and coshf may return infinity from 88.5 on; the greatest float32 is cosh(89.4)."""
    assert ("aten::cosh", "cpu", "reference") in real_cases.KNOWN_BUGS
    true = torch.full((64,), 89.0, dtype=torch.float64).cosh()
    assert true.max() < torch.finfo(torch.float32).max
    kernels = [torch.full((n,), 89.0).cosh() for n in (1, 64)]
    if not kernels[1].isinf().all():
        pytest.skip("the kernels of this CPU do not overflow")


@pytest.mark.skipif(not torchplatform.lazy_available(), reason="this torch was built without lazy tensors")
def test_what_is_called_a_bug_of_lazy_is_one_without_shadowrun():
    script = """
import json, torch
from shadowrun.platforms.device import resolve
resolve("lazy")
from torch.nn import functional as F
image = torch.arange(1.0, 145.0).view(1, 16, 3, 3)
shuffled = F.pixel_shuffle(image.to("lazy"), 2).cpu()
x, mean, var = torch.arange(48.0).view(2, 3, 2, 4), torch.zeros(3), torch.ones(3)
there = [t.to("lazy") for t in (x, mean, var)]
F.batch_norm(*there, training=True)
F.batch_norm(x, mean, var, training=True)
try:
    distance = torch.cdist(torch.randn(40, 20).to("lazy"), torch.randn(50, 20).to("lazy")).cpu() is None
except RuntimeError as error:
    distance = str(error)
parts = []
for split in (torch.unbind, lambda t: t.split(1)):
    try:
        parts.append((split(torch.ones(2, 3).to("lazy"))[0] * torch.ones(3).to("lazy")).tolist())
    except RuntimeError as error:
        parts.append(str(error))
a, b = torch.tensor([1.0]).to("lazy"), torch.tensor([10.0]).to("lazy")
u = a - b
sums = [(u + a).item(), (u + b).item()]
written = []
for read in (False, True):
    buffers = [t.to("lazy") for t in (x, torch.zeros(3), torch.ones(3))]
    y = F.batch_norm(*buffers, training=True)
    if read:
        buffers[1].cpu()
    (y * 2).cpu()
    written.append(buffers[1].tolist())
print(json.dumps([bool(torch.isin(shuffled, image).all()), torch.equal(there[1].cpu(), mean), distance, parts, sums,
    written]))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    moved, written, distance, parts, sums, by_reading = json.loads(done.stdout.splitlines()[-1])
    assert not moved
    assert not written
    assert "as_strided" in distance
    assert all(real_cases.LEFT_THE_DEVICE in p for p in parts), parts
    # Its cache does not tell apart graphs in which an operator reads another input of the same form.
    assert sums != [-8.0, 1.0]
    # What a buffer holds in the end depends on whether it was read on the way.
    assert by_reading[0] != by_reading[1]


@pytest.mark.skipif(not torchplatform.lazy_available(), reason="this torch was built without lazy tensors")
def test_programs_on_lazy_do_not_notice(tmp_path, capsys):
    output = tmp_path / "out.json"
    with pytest.raises(SystemExit) as ended:
        real_platforms.main(["--platform", "lazy, program on it", "--case", "*r*s*[pne]-0", "--output", str(output)])
    found = json.loads(output.read_text())["lazy, program on it"]
    assert found["cases"] == 4
    assert found["false_alarms"] == []
    # `pixel_shuffle` gives it uninitialised memory.
    assert found["not_repeatable"] == ["super-resolution-0"]
    assert {f["op"] for f in found["true_bugs"]} == {"aten::native_batch_norm", "aten::pixel_shuffle"}
    assert ended.value.code == 0
    assert "plain runs of super-resolution-0 differ among themselves" in capsys.readouterr().out
