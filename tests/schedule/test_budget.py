"""The overhead budget on a clock of the test's own: what is spent, and on what."""

from __future__ import annotations

import collections

import pytest

from shadowrun.schedule import overhead_clock
from shadowrun.schedule.budget import Budget

US = 1000
COLD = (1.0, 0.35, 0.24, 0.15)
"""As measured after watched steps of a small network of 0.4 ms."""


PASSED_NS = overhead_clock._PASSED_NS


@pytest.fixture(autouse=True)
def no_unseen_overhead(monkeypatch):
    """These programs are slowed by nothing that the clock does not see, unless they say so."""
    monkeypatch.setattr(overhead_clock, "_PASSED_NS", 0.0)


class Program:
    """Steps of operator calls; replaying a call takes as long as the call, noting it takes a microsecond.

    After a watched step, calls of the next ones take longer by `slower` times `COLD`.
    """

    def __init__(
        self,
        ratio: float,
        plain_us: dict[str, float],
        handing_over_us: float = 3.0,
        unseen: float = 0.0,
        slower: float = 0.0,
        looking_us: float = 1.0,
    ) -> None:
        self.budget = Budget(ratio, handing_over_us * US)
        self.plain_us = plain_us
        self.handing_over_us = handing_over_us
        self.unseen = unseen
        self.slower = slower
        self.looking_us = looking_us
        self.n_unwatched = len(COLD)
        self.now = 0.0
        self.budget.start(0)
        self.watched = True
        self.replayed: list[list[str]] = []
        self.times: list[float] = []
        self.end_steps = True

    def step(self) -> None:
        began, replayed = self.now, []
        late = self.watched or self.n_unwatched >= len(COLD)
        cold = 0.0 if late else self.slower * COLD[self.n_unwatched]
        for name, us in self.plain_us.items():
            self.now += us * US * (1 + cold)
            if not self.watched:
                continue
            self.now += self.handing_over_us * US
            entered = self.now
            if not self.budget.exhausted(int(self.now)):
                self.now += self.looking_us * US
                if self.budget.selects(name):
                    self.now += us * US
                    replayed.append(name)
                    self.budget.verified(name, int(us * US))
            own = self.now - entered
            self.now += self.unseen * own
            self.budget.spend(int(self.now), int(own))
        self.n_unwatched = 0 if self.watched else self.n_unwatched + 1
        self.replayed.append(replayed)
        self.times.append((self.now - began) / US / sum(self.plain_us.values()))
        if self.end_steps:
            self.watched = self.budget.end_step(int(self.now))

    def mean(self, last: int) -> float:
        return sum(self.times[-last:]) / last


@pytest.mark.parametrize("ratio", [1.05, 1.2, 1.5, 3.0])
def test_the_mean_step_stays_within_the_budget(ratio):
    program = Program(ratio, {f"op{k}": 40.0 + k for k in range(100)})
    for _ in range(300):
        program.step()
    assert program.mean(200) <= ratio + 0.01
    report = program.budget.report()
    assert report.achieved == pytest.approx(sum(program.times) / 300, rel=0.02)
    assert report.achieved > 1 + (ratio - 1) * 0.8 or ratio == 3.0, "the budget is used"
    assert report.n_verified == report.n_signatures == 100


def test_where_watching_is_affordable_no_single_step_exceeds_the_budget_by_more_than_a_call():
    program = Program(1.5, {f"op{k}": 100.0 for k in range(50)})
    for _ in range(100):
        program.step()
    assert max(program.times) <= 1.5 + 2 * 100 / 5000
    assert program.budget.report().n_unwatched <= 10


def test_where_watching_alone_exceeds_it_steps_are_left_out():
    # 3 µs to hand over a call of 2 µs: a watched step takes 2.5 times the plain one and more.
    program = Program(1.05, {f"op{k}": 2.0 for k in range(100)})
    for _ in range(2000):
        program.step()
    report = program.budget.report()
    assert program.mean(1500) <= 1.06
    assert report.n_unwatched > 1800
    assert report.n_verified == 100


def test_new_signatures_come_first_then_the_longest_unseen():
    program = Program(1.2, {f"op{k}": 100.0 for k in range(20)})
    for _ in range(12):
        program.step()
    first = [name for step in program.replayed for name in step][:20]
    assert sorted(first) == sorted(program.plain_us), "each once, before any comes again"
    program.plain_us["late"] = 100.0
    for _ in range(8):
        program.step()
    assert sum("late" in step for step in program.replayed[12:16]) == 1
    for _ in range(200):
        program.step()
    counts = collections.Counter(name for step in program.replayed for name in step)
    assert min(counts.values()) >= 0.8 * max(counts.values()), counts


def test_a_signature_that_never_comes_again_does_not_stop_the_rest():
    program = Program(1.3, {f"op{k}": 100.0 for k in range(10)})
    program.budget.selects("once, and never replayed")
    for _ in range(30):
        program.step()
    assert len({name for step in program.replayed[20:] for name in step}) == 10


def test_a_call_longer_than_the_allowance_is_verified_once_the_credit_is_there():
    program = Program(1.05, {"large": 10_000.0, **{f"op{k}": 10.0 for k in range(10)}}, handing_over_us=0.5)
    for _ in range(400):
        program.step()
    assert any("large" in step for step in program.replayed)
    assert program.mean(380) <= 1.055


def test_a_program_without_steps_is_verified_too():
    program = Program(1.3, {f"op{k}": 50.0 for k in range(64)})
    program.end_steps = False
    for _ in range(400):
        program.step()
    counts = collections.Counter(name for step in program.replayed for name in step)
    assert len(counts) == 64
    assert min(counts.values()) >= 2
    assert program.mean(300) <= 1.31


def test_credit_of_a_pause_is_not_spent_at_once():
    program = Program(1.2, {f"op{k}": 100.0 for k in range(50)})
    for _ in range(10):
        program.step()
    program.now += 10_000_000 * US
    program.step()
    program.step()
    assert program.times[-1] <= 1.45


@pytest.mark.parametrize("ratio", [1.1, 1.5])
def test_costs_that_its_own_clock_does_not_see_are_found_by_leaving_steps_out(ratio):
    program = Program(ratio, {f"op{k}": 40.0 for k in range(100)}, unseen=1.0)
    for _ in range(400):
        program.step()
    assert program.mean(300) <= ratio + 0.02
    assert program.budget.report().achieved == pytest.approx(program.mean(400), rel=0.02)


@pytest.mark.parametrize("ratio", [1.1, 1.5, 2.0, 4.0])
@pytest.mark.parametrize("us", [0.5, 2.0, 7.0])
def test_that_the_program_runs_slower_after_a_watched_step_is_paid_for_too(ratio, us):
    program = Program(ratio, {f"op{k}": us for k in range(60)}, unseen=0.5, slower=1.0)
    for _ in range(3000):
        program.step()
    assert program.mean(2500) <= 1 + (ratio - 1) * 1.06
    assert program.budget.report().achieved == pytest.approx(program.mean(3000), rel=0.04)


def test_what_comes_late_in_a_step_that_is_watched_on_credit_is_verified_as_often():
    program = Program(1.2, {f"op{k}": 4.0 for k in range(100)})
    for _ in range(3000):
        program.step()
    assert program.budget.report().n_unwatched > 2000
    counts = collections.Counter(name for step in program.replayed for name in step)
    assert len(counts) == 100
    assert min(counts.values()) >= 0.7 * max(counts.values()), counts
    assert program.mean(2500) <= 1.21


def test_of_steps_that_take_turns_each_kind_is_watched():
    program = Program(1.1, {})
    seen = collections.Counter()
    for n in range(4000):
        program.plain_us = {f"{n % 4} op{k}": 3.0 for k in range(50)}
        seen[n % 4] += program.watched
        program.step()
    assert min(seen.values()) >= 0.4 * max(seen.values()), seen


def test_while_in_debt_steps_pass_without_a_look_and_no_more_than_it_takes():
    """Weighing each costs as much as a tenth of a short step."""
    budget, step_ns = Budget(1.2, 1000.0), 200_000
    budget.start(0)
    now = looked_at = 0
    uncounted = []
    for _ in range(400):
        if budget.watched:
            now += step_ns + 3_000_000  # a call that costs far more than a step allows
            budget.exhausted(now)
            if budget.selects("call"):
                budget.verified("call", 3_000_000)
            budget.spend(now, 3_000_000)
        else:
            now += step_ns
        budget.end_step(now)
        looked_at += 1
        n = budget.n_unwatched_next
        if n:
            assert not budget.watched
            assert budget._clock.credit_ns < 0
            budget.add_unwatched_steps([now + k * step_ns for k in range(1, n + 1)], n * 1000)
            now += n * step_ns
            uncounted.append(n)
            assert budget._clock.credit_ns <= budget._clock.allowed_ns, "the step after is not too late"
    report = budget.report()
    assert report.n_steps == looked_at + sum(uncounted)
    assert max(uncounted) <= 64
    assert sum(uncounted) > looked_at, "most are not weighed"
    assert report.achieved <= 1.25


@pytest.mark.parametrize("step_ns", [10_000_000, 50_000_000])
def test_long_steps_are_all_weighed(step_ns):
    budget = Budget(1.2, 1000.0)
    budget.start(0)
    now = 0
    for _ in range(50):
        now += step_ns
        if budget.watched:
            budget.exhausted(now)
            budget.spend(now, step_ns)
            now += step_ns
        budget.end_step(now)
        assert budget.n_unwatched_next == 0


def costly(us: dict[str, float], ratio: float = 1.2) -> Program:
    """A program of short calls whose replays take long: a mismatch is diagnosed, or a kernel looked at first."""
    program = Program(ratio, dict.fromkeys(us, 2.0))
    budget, verified = program.budget, program.budget.verified

    def pay(name: str, cost_ns: int) -> None:
        program.now += us[name] * US
        verified(name, cost_ns + int(us[name] * US))

    budget.verified = pay
    return program


@pytest.mark.parametrize("cost_us", [100.0, 300.0, 800.0])
def test_no_step_is_longer_than_ten_plain_ones_whatever_replays_cost(cost_us):
    program = costly({f"op{k}": cost_us for k in range(100)})
    for _ in range(3500):
        program.step()
    # A first look is expected to take what others took.
    assert max(program.times) <= 10.0 + cost_us / 200 / 2
    assert program.budget.report().n_verified == 100


def test_a_call_that_alone_takes_more_is_the_only_one_of_its_step():
    program = costly({f"op{k}": 5000.0 for k in range(20)})
    for _ in range(20000):
        program.step()
    assert max(len(step) for step in program.replayed[1:]) == 1
    assert program.budget.report().n_verified == 20
    assert program.mean(20000) <= 1.25


@pytest.mark.parametrize("us", [2.0, 4.0])
def test_where_to_look_at_all_calls_takes_too_long_the_next_step_goes_on_where_one_ended(us):
    program = Program(1.2, {f"op{k}": us for k in range(200)}, looking_us=20 * us)
    for _ in range(4000):
        program.step()
    assert max(program.times) <= 10.0, "of the first step too, in which the length of one is not known"
    counts = collections.Counter(name for step in program.replayed for name in step)
    assert len(counts) == 200
    assert program.budget.report().n_passes > 1
    assert program.mean(4000) <= 1.22


def test_until_all_calls_were_looked_at_each_operator_is_verified_once():
    budget = Budget(1.2, 300_000.0)  # so that the first step is known to be long
    budget.start(0)
    first = [(f"line {k}", f"op{k % 5}") for k in range(50)]
    replayed = []
    now = 0
    for signature, operator in first:
        now += 10_000_000
        if not budget.exhausted(now) and budget.selects(signature, operator):
            replayed.append(operator)
            budget.verified(signature, 1000)
        budget.spend(now, 1000)
    assert sorted(replayed) == [f"op{k}" for k in range(5)]
    assert budget.report().n_passes == 0
    budget.end_step(now)
    assert budget.report().n_passes == 1, "then the others have their turn"


def test_calls_that_wait_are_judged_on_credit_and_no_longer_than_a_step_may_take():
    budget = Budget(1.2, 3000.0)
    budget.start(0)
    budget.watched = False
    for n in range(1, 6):
        budget.end_step(n * 1_000_000)
    budget._sparse = True
    assert 0 < budget.judging_ns <= 9 * 1_000_000
    budget.judged(6_000_000)
    budget._clock.spend_seen(6_000_000)
    assert budget.judging_ns == 0.0, "5 ms in debt"


@pytest.mark.parametrize(("first_us", "charged_us"), [(250, 100), (400, 250), (5000, 300)])
def test_what_our_clock_did_not_see_of_the_first_step_is_ours_up_to_twice_as_much(first_us, charged_us):
    clock = overhead_clock.OverheadClock(0.2)
    clock.start(0)
    now = first_us * US
    clock.advance(now)
    clock.spend(100 * US)
    clock.end_step(watched=True)
    assert clock.spent_ns == 100 * US
    for _ in range(overhead_clock.CALIBRATIONS):
        now += 150 * US
        clock.advance(now)
        clock.end_step(watched=False)
    assert clock.spent_ns == charged_us * US


def test_what_is_new_is_verified_in_consecutive_steps_up_to_a_debt_that_the_first_steps_can_pay():
    program = costly({f"op{k}": 300.0 for k in range(12)} | {f"cheap{k}": 1.0 for k in range(88)})
    for _ in range(200):
        program.step()
    assert program.budget.report().n_verified == 100, "not after 18 steps of rest for each"
    for n in range(200, 2000):
        program.step()
        # A step on credit may add up to ten plain steps.
        assert program.mean(n + 1) <= 1.2 + 0.03 + 10 / n
    assert program.mean(2000) <= 1.22


@pytest.mark.parametrize(("n_calls", "compares"), [(20, False), (600, True)])
def test_the_first_step_compares_only_what_it_can_pay(n_calls, compares):
    program = costly({f"op{k}": 500.0 for k in range(n_calls)})
    program.step()
    assert (len(program.replayed[0]) > 0) is compares


def test_calls_that_were_passed_on_unseen_are_charged():
    budget = Budget(1.2, 2000.0)
    budget.start(0)
    budget.pass_view()
    budget.spend_on_passed(10, 5000)
    assert budget._clock.spent_ns == 10 * 2000 + 5000
    assert budget.report().n_calls == 1
    assert budget._passing_ns > 2000.0


def test_what_a_step_that_is_only_counted_costs_unseen_is_paid_for(monkeypatch):
    monkeypatch.setattr(overhead_clock, "_PASSED_NS", PASSED_NS)
    budget = Budget(1.2, 1000.0)
    budget.start(0)
    for n in range(1, 9):
        budget.watched = False
        budget.end_step(n * 100_000)
    spent = budget._clock.spent_ns
    budget.add_unwatched_steps([800_000 + n * 100_000 for n in range(1, 51)], 0)
    half = budget._clock.allowed_ns / 2
    assert 0 < half < overhead_clock._PASSED_NS, (
        "no more than half of what a step allows: else none would ever be watched"
    )
    assert budget._clock.spent_ns == spent + 50 * half


@pytest.mark.parametrize("by_hook", [False, True])
def test_where_an_optimizer_s_hook_ends_the_steps_they_cost_more(by_hook, monkeypatch):
    monkeypatch.setattr(overhead_clock, "_PASSED_NS", PASSED_NS)
    budget = Budget(1.2, 1000.0)
    budget.start(0)
    for n in range(1, 9):
        budget.watched = False
        budget.end_step(n * 1_000_000)
    spent = budget._clock.spent_ns
    budget.add_unwatched_steps([8_000_000 + n * 1_000_000 for n in range(1, 51)], 0, by_hook=by_hook)
    cost = overhead_clock._PASSED_NS + by_hook * overhead_clock._PASSED_BY_HOOK_NS
    assert budget._clock.spent_ns == spent + 50 * cost


def test_an_unwatched_step_that_is_timed_is_charged_what_it_costs_unseen_too(monkeypatch):
    monkeypatch.setattr(overhead_clock, "_PASSED_NS", PASSED_NS)
    clock = overhead_clock.OverheadClock(0.2)
    clock.start(0)
    for n in range(1, 33):
        clock.advance(n * US * 1000)
        clock.end_step(watched=False)
    n_known = 32 - overhead_clock.CALIBRATIONS
    assert clock.spent_ns == n_known * PASSED_NS
    assert clock.plain_step_ns == US * 1000 - PASSED_NS


def test_steps_until_the_next_watched_one_are_counted_together_however_late_it_is():
    program = Program(1.2, {f"op{k}": 2.0 for k in range(100)})
    for _ in range(500):
        program.step()
    budget = program.budget
    while program.watched or budget.n_unwatched_next:
        program.step()
    n_asked = 0
    while not program.watched:
        program.step()
        n_asked += 1
    assert n_asked <= 3
