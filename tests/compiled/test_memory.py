"""Peak memory of a run on the CPU."""

import os

import pytest
import torch

from shadowrun.compiled.full_program import peak_on_cpu

MIB = 2**20


def test_the_peak_is_what_lives_at_a_time():
    x = torch.ones(MIB // 4)

    def chain():
        y = x + 1  # 1 MiB
        z = y + 1  # 2
        del y
        return (z + 1).sum()  # 2 again, and a number

    assert 2 * MIB <= peak_on_cpu(chain) < 2.1 * MIB


def test_what_was_there_before_is_not_counted():
    x = torch.ones(4 * MIB)
    assert peak_on_cpu(lambda: x.mul_(2)) < MIB


def test_memory_that_is_freed_and_taken_again_counts_once():
    x = torch.ones(MIB // 4)
    assert peak_on_cpu(lambda: [(x + 1).sum() for _ in range(5)]) < 1.1 * MIB


def test_the_run_s_exception_is_its_own():
    with pytest.raises(ZeroDivisionError):
        peak_on_cpu(lambda: 1 / 0)


def test_nothing_is_written_to_stderr_and_it_is_there_afterwards(capfd):
    peak_on_cpu(lambda: torch.ones(3) + 1)
    os.write(2, b"still there")
    assert capfd.readouterr().err == "still there"


def test_a_profiler_of_the_user_s_own_goes_on():
    # With `acc_events`, since torch 2.11 warns without it.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], acc_events=True) as theirs:
        peak_on_cpu(lambda: torch.ones(3) + 1)
        torch.ones(3).exp()
    assert "aten::exp" in {e.key for e in theirs.key_averages()}
