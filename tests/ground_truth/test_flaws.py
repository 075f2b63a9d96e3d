"""Every flaw of the simulated device is found, on the right operator, with the right cause, and nothing else is.

python -m tests.ground_truth.test_flaws        prints the table
"""

import contextlib
import sys
import warnings

import pytest
import torch

import shadowrun
from shadowrun import Cause, Status
from shadowrun.sim import CATALOGUE
from tests.ground_truth.timing import timed

RAISING = ("unsupported", "error")


def found(sim, name, device="sim"):
    """Findings and records of a flaw's own trigger, run three times (a slow one more often) with only this flaw."""
    flaw = CATALOGUE[name]
    torch.manual_seed(0)
    with timed(flaw) as times, sim.flaws(name), warnings.catch_warnings(), shadowrun.compare("sim") as run:
        warnings.simplefilter("always")
        for _ in range(3 * times):
            with contextlib.nullcontext() if not set(flaw.statuses) & set(RAISING) else contextlib.suppress(Exception):
                sim.trigger(name)(device)
    return run


def verdicts(run, flaw):
    """(operator, status, cause) of what was recorded on the flaw's operators, slow ones included."""
    seen = {
        (r.call.op, str(r.verdict.status), r.verdict.cause, r.verdict.explanation)
        for r in run.records()
        if r.call.op in flaw.operators and (r.verdict.status is not Status.MATCH or r.verdict.cause is not None)
    }
    seen |= {
        (f.op, "match", f.cause, f.explanation) for f in run.findings() if f.kind == "slow" and f.op in flaw.operators
    }
    return seen


def right(flaw, seen):
    causes = {flaw.cause, *flaw.accepted} if flaw.cause is not None else set(Cause)
    return [s for s in seen if s[1] in flaw.statuses and s[2] in causes]


def elsewhere(run, flaw):
    """Findings on operators that the flaw has nothing to do with."""
    return [(f.kind, f.op, f.evidence) for f in untimed(run) if f.op not in flaw.operators]


def untimed(run):
    """Findings that do not depend on how busy this machine is: on a shared one, any operator may once be slow."""
    return [f for f in run.findings() if f.kind != "slow"]


def check_found(sim, name):
    """The flaw gets its verdict on its operators, and nothing else is found."""
    flaw = CATALOGUE[name]
    run = found(sim, name)
    seen = verdicts(run, flaw)
    assert right(flaw, seen), f"expected {flaw.statuses}, {flaw.cause} on {flaw.operators}; recorded {seen}"
    assert elsewhere(run, flaw) == []


@pytest.mark.parametrize("name", CATALOGUE)
@pytest.mark.filterwarnings("ignore:The operator:UserWarning")
def test_the_flaw_is_found_where_it_is(clean_sim, name, capfd):
    check_found(clean_sim, name)


@pytest.mark.parametrize("name", CATALOGUE)
def test_without_the_flaw_nothing_is_found(clean_sim, name):
    torch.manual_seed(0)
    with shadowrun.compare("sim") as run:
        for _ in range(3):
            clean_sim.trigger(name)("sim")
    assert untimed(run) == []
    assert run.counts()[Status.ERROR] == 0


MISSING = ("missing-cumsum", "missing-lerp", "histc-not-implemented", "group-norm-no-bf16", "fft-key-error")


@pytest.mark.parametrize("name", MISSING)
def test_a_program_on_the_reference_survives_what_the_target_lacks(clean_sim, name):
    flaw = CATALOGUE[name]
    with clean_sim.flaws(name), shadowrun.compare("sim") as run:
        clean_sim.trigger(name)("cpu")
    assert [f.kind for f in run.findings()] == ["unsupported"]
    assert run.findings()[0].cause is flaw.cause


@pytest.mark.parametrize("name", MISSING)
def test_fallback_gives_the_reference_s_result_and_raise_the_device_s_own_exception(clean_sim, name):
    expected = clean_sim.trigger(name)("cpu")
    with clean_sim.flaws(name):
        with shadowrun.compare("sim"):
            answered = clean_sim.trigger(name)("sim")
        with pytest.raises(Exception) as plain:
            clean_sim.trigger(name)("sim")
        with pytest.raises(type(plain.value)) as compared, shadowrun.compare("sim", on_unsupported="raise"):
            clean_sim.trigger(name)("sim")
    assert str(compared.value) == str(plain.value)
    if isinstance(expected, torch.Tensor):
        assert answered.device.type == "sim"
        assert torch.equal(answered.cpu(), expected)


def main():
    from shadowrun import sim

    sim.enable("sim")
    print("| flaw | modelled on | expected | found | right |\n|---|---|---|---|---|")
    n_right = 0
    for name, flaw in CATALOGUE.items():
        with sim.flaws():
            run = found(sim, name)
        seen, wrong = verdicts(run, flaw), elsewhere(run, flaw)
        hits = right(flaw, seen)
        n_right += bool(hits) and not wrong
        shown = "; ".join(
            f"`{op}` {status}, {cause}{f' ({why})' if why else ''}"
            for op, status, cause, why in sorted(hits or seen)[:1]
        )
        expected = f"{'/'.join(flaw.statuses)}, {flaw.cause or 'any cause'}"
        print(
            f"| {name} | {flaw.issue} | {expected} | {shown} | {'yes' if hits and not wrong else 'NO ' + str(wrong)} |"
        )
    print(f"\n{n_right} of {len(CATALOGUE)} right")
    sys.exit(n_right != len(CATALOGUE))


if __name__ == "__main__":
    main()
