"""NaN payloads: copies keep them, and what changes one is reported; in arithmetic and conversions any is right."""

import math

import pytest
import torch

from shadowrun.judge.judge import Judge
from shadowrun.studies.sweep.cases import Kind
from shadowrun.studies.sweep.sweep_findings import finding_of_row
from shadowrun.types import Cause, Status

ATEN = torch.ops.aten
PAYLOAD = (torch.full((4,), math.nan).view(torch.int32) | 5).view(torch.float32)
INDEX = torch.tensor([3, 0])


def canonical(op):
    """The operator on a device that returns the same NaN for every NaN."""

    def run(*args, **kwargs):
        out = op(*args, **kwargs)
        return torch.where(out.isnan(), torch.tensor(math.nan, dtype=out.dtype), out)

    return run


def judged(make_case, op, target, *args, **kwargs):
    return Judge()(make_case(op, target, *args, **kwargs))[0]


@pytest.mark.parametrize(
    ("op", "args"),
    [
        (ATEN.clone.default, (PAYLOAD,)),
        (ATEN.index_select.default, (PAYLOAD, 0, INDEX)),
        (ATEN.cat.default, ([PAYLOAD, torch.ones(2)],)),
        (ATEN.where.self, (torch.tensor([True, False, True, True]), PAYLOAD, torch.zeros(4))),
        (ATEN.flip.default, (PAYLOAD, [0])),
    ],
)
def test_a_copy_that_changes_a_payload_is_told_and_matches(make_case, op, args):
    verdict = judged(make_case, op, canonical(op), *args)
    assert (verdict.status, verdict.cause) == (Status.MATCH, Cause.EXCEPTIONAL_VALUES)
    assert verdict.explanation == "a copy changed the payload of NaN"
    row = (0, op.name(), "forward", verdict.status, verdict.cause, verdict.explanation, "", verdict.evidence, "")
    shown = finding_of_row(row)
    assert (shown.kind, shown.explanation) == (Kind.PASS, verdict.explanation)
    assert judged(make_case, op, op, *args) == judged(make_case, op, op, *args)
    assert judged(make_case, op, op, *args).cause is None


@pytest.mark.parametrize(
    ("op", "args", "kwargs"),
    [
        (ATEN.mul.Tensor, (PAYLOAD, torch.ones(4)), {}),
        (ATEN.maximum.default, (PAYLOAD, torch.ones(4)), {}),
        (ATEN._to_copy.default, (PAYLOAD,), {"dtype": torch.float64}),
    ],
)
def test_elsewhere_a_payload_means_nothing(make_case, op, args, kwargs):
    def target(*args, **kwargs):
        out = op(*args, **kwargs)
        return torch.full_like(out, math.nan)

    verdict = judged(make_case, op, target, *args, **kwargs)
    assert verdict.status is Status.MATCH
    assert verdict.cause in (None, Cause.ROUNDING)


def test_a_class_that_changes_is_a_mismatch_all_the_same(make_case):
    verdict = judged(make_case, ATEN.clone.default, torch.zeros_like, PAYLOAD)
    assert verdict.status is Status.MISMATCH
