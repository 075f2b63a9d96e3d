"""Which calls are compared."""

import pytest
import torch
from torch.profiler import ProfilerAction

from shadowrun.config import Config
from shadowrun.intercept.plan import make_plan
from shadowrun.schedule.selection import Selection
from shadowrun.types import Phase

ADD = make_plan(torch.ops.aten.add.Tensor, 0)
MM = make_plan(torch.ops.aten.mm.default, 1)


def reason(selection, plan=ADD, module=""):
    return selection.reason_to_skip(plan, (module, Phase.FORWARD, "a.py:1 in f"))


def selected_steps(n=10, **options):
    selection = Selection(Config.from_options(**options))
    chosen = []
    for step in range(n):
        selection.begin_step(step)
        if not reason(selection):
            chosen.append(step)
    return chosen


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({}, range(10)),
        ({"steps": 3}, [3]),
        ({"steps": range(2, 9, 3)}, [2, 5, 8]),
        ({"steps": []}, []),
        ({"schedule": torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2)}, [2, 3, 6, 7]),
        ({"schedule": torch.profiler.schedule(skip_first=2, wait=0, warmup=1, active=1, repeat=1)}, [3]),
        ({"schedule": lambda step: step % 4 == 1}, [1, 5, 9]),
        ({"schedule": lambda _: ProfilerAction.WARMUP}, []),
        ({"schedule": lambda _: ProfilerAction.RECORD_AND_SAVE}, range(10)),
        ({"schedule": lambda step: step > 3, "steps": range(6)}, [4, 5]),
    ],
)
def test_steps(options, steps):
    assert selected_steps(**options) == list(steps)


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("aten::add.Tensor", True),
        ("aten::add", True),
        ("add.Tensor", True),
        ("add", True),
        ("aten::*", True),
        ("*add*", True),
        ("aten::ADD", False),
        ("aten::mm", False),
        ("aten::add.Scalar", False),
        ("dd", False),
    ],
)
def test_operators(pattern, found):
    selection = Selection(Config.from_options(ops=pattern))
    assert reason(selection) == ("" if found else "operator not selected")
    assert reason(selection) == reason(selection), "also the second time"


def test_one_operator_s_answer_is_not_another_s():
    selection = Selection(Config.from_options(ops=["aten::mm", "nothing"]))
    assert reason(selection, MM) == ""
    assert reason(selection, ADD) == "operator not selected"
    assert reason(selection, MM) == ""


def test_modules():
    selection = Selection(Config.from_options(modules=["Net.features.*", "*.head"]))
    assert reason(selection, module="Net.features.0") == ""
    assert reason(selection, module="Net.head") == ""
    for module in ("Net.features", "Net", "", "Net.head.0"):
        assert reason(selection, module=module) == "module not selected"


def test_all_must_hold():
    selection = Selection(Config.from_options(modules="Net.*", ops="aten::mm", steps=1))
    assert reason(selection, MM, "Net.a") == "step not selected"
    selection.begin_step(1)
    assert reason(selection, MM, "Net.a") == ""
    assert reason(selection, ADD, "Net.a") == "operator not selected"
    assert reason(selection, MM, "Other") == "module not selected"


def test_whether_anything_is_left_out():
    selection = Selection(Config.from_options())
    assert selection.everything
    for options in ({"ops": "a"}, {"modules": "a"}, {"steps": 1}, {"schedule": lambda _: False}):
        assert not Selection(Config.from_options(**options)).everything
