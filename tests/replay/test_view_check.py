"""Views: their form is checked, their values are not."""

import pytest
import torch

import shadowrun
from shadowrun import Cause, Status
from shadowrun.intercept.plan import make_plan
from shadowrun.replay.call import Call, Role
from shadowrun.replay.paths.view_check import ViewCheck, view_on_meta
from shadowrun.types import Phase

aten = torch.ops.aten
ORIGIN = ("", Phase.FORWARD, "a.py:1 in f")
ROLE = Role(torch.device("cpu"), on_target=True, on_ref=False, shared=False)


class Recorded:
    def __init__(self):
        self.verdicts = []

    def context(self, *_):
        return 0

    def verdict(self, _, verdict):
        self.verdicts.append(verdict)


def checked(func, args, out, *, strides=True, times=1):
    recorded = Recorded()
    check = ViewCheck(recorded, strides=strides)
    for _ in range(times):
        check.check(Call(make_plan(func, 0), args, {}, ROLE, ORIGIN), out)
    return [v.evidence for v in recorded.verdicts]


BASE = torch.arange(24.0).view(4, 6)

VIEWS = [
    (aten.t.default, (BASE,)),
    (aten.view.default, (BASE, [2, 12])),
    (aten.slice.Tensor, (BASE.t(), 0, 1, 5, 2)),
    (aten.expand.default, (BASE[:1], [5, 6])),
    (aten.select.int, (BASE[1:], 0, 1)),
    (aten.split.Tensor, (BASE, 3)),
    (aten.unbind.int, (BASE,)),
    (aten.as_strided.default, (BASE, [2, 2], [1, 1], 3)),
    (aten.diagonal.default, (BASE,)),
    (aten.squeeze.dim, (BASE[:, :1], 1)),
    (aten.view.dtype, (BASE, torch.int32)),
    (aten.slice.Tensor, (BASE, 0, 4)),
    (aten.detach.default, (torch.tensor(1.0),)),
    (aten._unsafe_view.default, (BASE, [24])),
    (aten.alias.default, (BASE[:0],)),
]


@pytest.mark.parametrize("i", range(len(VIEWS)))
def test_right_views_are_nothing_to_record(i):
    func, args = VIEWS[i]
    assert checked(func, args, func(*args), times=2) == []
    on_meta = view_on_meta(make_plan(func, 0), args, {})
    for m, t in zip(*([x] if isinstance(x, torch.Tensor) else x for x in (on_meta, func(*args))), strict=True):
        assert (m.shape, m.stride(), m.dtype, m.storage_offset()) == (t.shape, t.stride(), t.dtype, t.storage_offset())


@pytest.mark.parametrize(
    ("func", "args", "out", "text"),
    [
        (aten.t.default, (BASE,), BASE, r"shape (4, 6) instead of (6, 4)"),
        (aten.t.default, (BASE,), BASE.t().contiguous(), r"stride (4, 1) instead of (1, 6)"),
        (aten.detach.default, (BASE,), BASE.double(), "dtype torch.float64 instead of torch.float32"),
        (aten.split.Tensor, (BASE, 2), [BASE[:2], BASE[2:3]], "output 1 of a view has shape (1, 6) instead of (2, 6)"),
        (aten.split.Tensor, (BASE, 2), [BASE[:2]], "1 views instead of 2"),
    ],
)
def test_wrong_forms_are_recorded_each_time(func, args, out, text):
    found = checked(func, args, out, times=2)
    assert len(found) == 2
    assert text in found[0]


def test_strides_that_address_nothing_and_devices_without_strides():
    one = torch.ones(1, 6)
    assert checked(aten.detach.default, (one,), one.as_strided((1, 6), (99, 1))) == []
    assert checked(aten.t.default, (BASE,), BASE.t().contiguous(), strides=False) == []


def test_what_cannot_be_derived_is_left_alone():
    sparse = torch.eye(2).to_sparse()
    assert checked(aten.detach.default, (sparse,), sparse) == []
    assert checked(aten.t_.default, (BASE.clone(),), BASE) == []


def test_a_wrong_view_of_a_device_is_a_mismatch(clean_sim, monkeypatch):
    from shadowrun.replay.paths import view_check

    monkeypatch.setattr(view_check, "view_on_meta", lambda plan, args, kwargs: torch.empty(9, device="meta"))
    with shadowrun.compare("sim") as run:
        torch.ones(2, 3).to("sim").t()
    (record,) = run.records(status=Status.MISMATCH)
    assert record.call.op == "aten::t"
    assert record.verdict.cause is Cause.METADATA
