"""`pause`, `running`, `step_number` and `after_step` of a comparison."""

import torch

import shadowrun
from shadowrun import Status


def test_nothing_is_compared_in_a_pause():
    run = shadowrun.compare("cpu[mkldnn=off]")
    run.start()
    torch.sin(torch.ones(2))
    run.pause()
    assert not run.running
    torch.cos(torch.ones(2))
    run.start()
    assert run.running
    torch.tan(torch.ones(2))
    run.stop()
    assert {record.call.op for record in run.records()} >= {"aten::sin", "aten::tan"}
    assert not list(run.records(op="aten::cos"))


def test_a_worker_process_waits_in_a_pause_and_ends_at_the_stop():
    run = shadowrun.compare("cpu[isa=default]")
    remote = run._target.remote
    run.start()
    torch.sin(torch.ones(2))
    process = remote._process
    run.pause()
    assert remote._process is process is not None
    run.start()
    torch.sin(torch.ones(2))
    assert remote._process is process
    run.pause()
    run.stop()
    assert remote._process is None
    assert run.counts()[Status.MATCH] >= 4


def test_functions_after_a_step():
    seen = []
    run = shadowrun.compare("cpu[mkldnn=off]")
    run.after_step(lambda r: seen.append((r.step_number, r.running)))
    run.after_step(lambda _: 1 / 0)  # must not reach the program
    with run:
        for _ in range(2):
            torch.sin(torch.ones(2))
            run.step()
    assert seen == [(1, True), (2, True), (2, False)]
