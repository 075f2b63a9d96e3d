"""`log_to` on real comparisons, with loggers of each form, and with loggers that fail."""

import types
import warnings

import pytest
import torch
from torch import nn

import shadowrun
from shadowrun import sim
from shadowrun.integrations import log_to


class Kept:
    def __init__(self):
        self.rows = []

    def log(self, values, step=None):
        self.rows.append((step, values))


def train(n=4, device="cpu"):
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=False)
    for _ in range(n):
        optimizer.zero_grad()
        model(torch.randn(2, 4, device=device)).sum().backward()
        optimizer.step()


def logged(logger, n=4, **options):
    run = shadowrun.compare("cpu[mkldnn=off]")
    log_to(run, logger, **options)
    with run:
        train(n)
    return run


def test_log_gets_the_figures_of_the_run():
    kept = Kept()
    run = logged(kept)
    step, values = kept.rows[-1]
    assert step == 4
    assert values["shadowrun/findings"] == len(run.findings())
    assert values["shadowrun/mismatches"] == 0
    counts = run.counts()
    assert values["shadowrun/calls"] == sum(n for status, n in counts.items() if status is not shadowrun.Status.SKIPPED)
    assert values["shadowrun/overhead"] > 1
    assert [step for step, _ in kept.rows] == sorted({step for step, _ in kept.rows})


def test_mismatches_and_unsupported_calls_are_counted():
    sim.enable("sim", flaws=["missing-lerp", "relu-backward-leaks"])
    kept = Kept()
    run = shadowrun.compare("sim")
    log_to(run, kept)
    with run:
        train(2, "sim")
    values = kept.rows[-1][1]
    counts = run.counts()
    assert values["shadowrun/mismatches"] == counts[shadowrun.Status.MISMATCH] > 0
    assert values["shadowrun/unsupported"] == counts[shadowrun.Status.UNSUPPORTED] > 0
    assert values["shadowrun/findings"] == len(run.findings()) > 0


def test_every_leaves_steps_out_but_not_the_last():
    kept = Kept()
    logged(kept, n=5, every=4)
    steps = [step for step, _ in kept.rows]
    assert steps[-1] == 5
    assert set(steps) <= {4, 5}


def forms_of_loggers():
    rows = []
    writer = types.SimpleNamespace(add_scalar=lambda name, value, step: rows.append((name, value, step)))
    metrics = types.SimpleNamespace(
        log_metrics=lambda values, step: rows.extend((k, v, step) for k, v in values.items())
    )
    plain = types.SimpleNamespace(log=lambda values: rows.extend((k, v, None) for k, v in values.items()))
    module = types.SimpleNamespace(
        log_dict=lambda values: rows.extend((k, v, None) for k, v in values.items()), log=lambda name, value: 1 / 0
    )
    trainer = types.SimpleNamespace(  # as that of transformers
        log=lambda values, start_time=None: plain.log(values), log_metrics=lambda split, metrics: 1 / 0
    )
    return rows, {"trainer": trainer, "add_scalar": writer, "log_metrics": metrics, "log": plain, "log_dict": module}


@pytest.mark.parametrize("form", ["add_scalar", "log_metrics", "log", "log_dict", "trainer"])
def test_forms_of_loggers(form):
    rows, loggers = forms_of_loggers()
    logged(loggers[form], n=1)
    assert {name for name, _, _ in rows} >= {"shadowrun/findings", "shadowrun/mismatches", "shadowrun/unsupported"}
    assert {step for _, _, step in rows} == ({1} if form in ("add_scalar", "log_metrics") else {None})


def test_a_logger_that_raises_is_one_warning_and_the_program_goes_on():
    class Broken:
        n = 0

        def log(self, values, step):
            self.n += 1
            raise OSError("disk full")

    broken = Broken()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run = logged(broken, n=3)
    assert [str(w.message) for w in seen if w.category is shadowrun.ShadowrunWarning] == [
        "shadowrun: the logger raised OSError: 'disk full'. Your program was not affected."
    ]
    assert broken.n >= 1
    assert run.counts()[shadowrun.Status.MATCH] > 0


def test_a_warning_that_is_an_error_does_not_reach_the_program():
    class Broken:
        def log(self, values, step):
            raise OSError("disk full")

    logged(Broken(), n=2)  # pytest makes warnings errors here


@pytest.mark.parametrize("wrong", [3, object(), "wandb"])
def test_what_is_no_logger_is_refused(wrong):
    with pytest.raises(shadowrun.UsageError, match="is no logger: give an object with log"):
        log_to(shadowrun.compare("cpu"), wrong)


@pytest.mark.parametrize("every", [0, True, 1.5])
def test_every_must_be_a_number_of_steps(every):
    with pytest.raises(shadowrun.UsageError, match="use a whole number of steps"):
        log_to(shadowrun.compare("cpu"), Kept(), every)


def test_only_rank_0_logs(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    kept = Kept()
    logged(kept)
    assert kept.rows == []


def test_tensorboard(tmp_path):
    pytest.importorskip("tensorboard", reason="needs tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        logged(writer, n=2)
    events = EventAccumulator(str(tmp_path)).Reload()
    assert events.Scalars("shadowrun/mismatches")[-1].step == 2
