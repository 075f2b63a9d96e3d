"""TorchScript asks operators about its constants, which torch hands to a mode as numbers: that must go on working."""

import torch

import shadowrun


def test_traced_code_with_numbers_in_it_runs_as_without_us():
    function = torch.jit.trace(lambda x: (x + 1).relu() * 2, torch.randn(3), check_trace=False)
    x = torch.randn(3)
    alone = function(x)
    with shadowrun.compare("cpu[threads=1]") as run:
        for _ in range(3):  # the first calls optimise
            out = function(x)
    assert torch.equal(out, alone)
    assert run.gate().passed
    assert run.internal_failures() == []
