"""What operators do to memory, their results apart: found on guarded copies, and only where the reference does not."""

import pytest
import torch

import shadowrun
from shadowrun import Cause, Status
from shadowrun.intercept.plan import make_plan
from shadowrun.platforms.device import resolve
from shadowrun.replay.executor import Executor
from shadowrun.replay.memory_effects import MemoryEffects, look_for_effects

TARGET = "cpu[threads=1]"


def odd():
    """Whether the call runs on the target: the process has two threads."""
    return torch.get_num_threads() == 1


def overwrites(x):
    y = x * 2
    if odd():
        x.add_(1)
    return y


def aliases(x):
    return x.view_as(x) if odd() else x.clone()


def writes_after_the_end(x):
    x.mul_(2)
    if odd():
        behind = x.storage_offset() + x.stride(0) * (x.shape[0] - 1) + 1
        if 4 * (behind + 1) <= x.untyped_storage().nbytes():
            x.as_strided((1,), (1,), behind).zero_()
    return x


def share(x):
    y = x * 2
    return (y, y.view_as(y)) if odd() else (y, y.clone())


def interleaved(x):
    both = torch.stack([x, x + 1], -1)
    return both[..., 0], both[..., 1]


def elsewhere(x):
    x.mul_(2)
    return x.clone() if odd() else x


OPERATORS = {
    "overwrites": ("(Tensor x) -> Tensor", overwrites),
    "aliases": ("(Tensor x) -> Tensor", aliases),
    "writes_after_the_end": ("(Tensor(a!) x) -> Tensor(a!)", writes_after_the_end),
    "share": ("(Tensor x) -> (Tensor, Tensor)", share),
    "interleaved": ("(Tensor x) -> (Tensor, Tensor)", interleaved),
    "elsewhere": ("(Tensor(a!) x) -> Tensor(a!)", elsewhere),
    "always_overwrites": ("(Tensor x) -> Tensor", lambda x: x.add_(1) * 2),
    "always_aliases": ("(Tensor x) -> Tensor", lambda x: x),
}


@pytest.fixture(autouse=True)
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", autouse=True)
def operators():
    library = torch.library.Library("memtest", "DEF")
    for name, (schema, kernel) in OPERATORS.items():
        library.define(name + schema)
        library.impl(name, kernel, "CPU")
    yield
    library._destroy()


def compared(name, x, n=1):
    op = getattr(torch.ops.memtest, name)
    with shadowrun.compare(TARGET, ops="*") as run:
        for _ in range(n):
            op(x)
    return run


@pytest.mark.parametrize(
    ("name", "explanation", "evidence"),
    [
        ("overwrites", "input overwritten", "x is not mutated by the schema, and its bytes 0 to 47 changed"),
        ("aliases", "result shares memory with an input", "output 0 lies in the memory of x (its bytes 0 to 47)"),
        ("share", "results share memory", "output 0 and output 1 share 48 bytes of memory"),
        ("elsewhere", "argument not returned", "the schema says that output 0 is x, and it lies in other memory"),
    ],
)
def test_each_promise_that_is_broken_is_a_mismatch(name, explanation, evidence):
    run = compared(name, torch.full((6,), 1 / 3, dtype=torch.float64))
    found = [f for f in run.findings() if f.kind == "mismatch"]
    assert [(f.op, f.cause, f.explanation) for f in found] == [(f"memtest::{name}", Cause.MEMORY_EFFECTS, explanation)]
    assert found[0].evidence == evidence


@pytest.mark.parametrize("step", [1, 2])
def test_a_write_outside_a_view_is_found_on_copies_whether_or_not_the_program_has_memory_there(step):
    x = torch.randn(12)[: 6 * step : step]
    run = compared("writes_after_the_end", x)
    found = [f for f in run.findings() if f.kind == "mismatch"]
    assert [(f.cause, f.explanation) for f in found] == [(Cause.MEMORY_EFFECTS, "memory outside the argument written")]
    first = 4 * (5 * step + 1)
    assert f"{first} to {first + 3} from its first one" in found[0].evidence


@pytest.mark.parametrize("name", ["interleaved", "always_overwrites", "always_aliases"])
def test_what_the_reference_does_too_is_no_finding(name):
    target, ref = Executor(resolve(TARGET)), Executor(resolve("cpu"))
    plan = make_plan(getattr(torch.ops.memtest, name).default, 0)
    assert look_for_effects(plan, ((torch.randn(6),), {}), target, ref, 1 << 20) is None


def test_values_and_memory_of_the_program_stay_its_own():
    x = torch.randn(6)
    before = x.clone()
    compared("writes_after_the_end", x[:3])
    assert torch.equal(x, torch.cat([before[:3] * 2, before[3:]]))  # the program runs on the reference


def test_a_program_on_the_target_keeps_what_the_target_does():
    x = torch.randn(6)
    before = x.clone()
    torch.set_num_threads(1)
    with shadowrun.compare("cpu", ref="cpu[threads=2]", ops="*") as run:
        y = torch.ops.memtest.aliases(x)
    assert y.data_ptr() == x.data_ptr()
    assert torch.equal(x, before)
    assert [f.explanation for f in run.findings()] == ["result shares memory with an input"]


def test_plain_operators_are_looked_at_too_by_the_short_ways(monkeypatch):
    looked = []
    monkeypatch.setattr(MemoryEffects, "next_due", lambda self: None)  # which depends on the time
    monkeypatch.setattr(MemoryEffects, "check", lambda self, plan, pristine: looked.append(plan.name))
    x, y = torch.randn(4), torch.randn(4)
    with shadowrun.compare(TARGET, slow_ratio=1e9):  # a slow call is compared again, with a look of its own
        for _ in range(5):
            x.mul_(2)
            x.add(y)
            torch.var_mean(x)
    assert sorted(looked) == ["aten::add.Tensor", "aten::mul_.Tensor", "aten::var_mean.correction"]


def test_an_operator_that_is_due_is_looked_at_again(monkeypatch):
    looked, next_due = [], MemoryEffects.next_due
    monkeypatch.setattr(MemoryEffects, "next_due", lambda self: None)  # which depends on the time
    monkeypatch.setattr(MemoryEffects, "check", lambda self, plan, pristine: looked.append(plan.name))
    x = torch.randn(4)
    with shadowrun.compare(TARGET) as run:

        def often(n):
            for _ in range(n):
                x.add(1)

        often(10)
        assert len(looked) == 1
        comparator = run._replayer._context.comparator
        monkeypatch.setattr(MemoryEffects, "next_due", next_due)
        comparator.effects._next_at = 0.0
        comparator.every_second()
        monkeypatch.setattr(MemoryEffects, "next_due", lambda self: None)
        often(10)
    assert looked == ["aten::add.Tensor"] * 2
    assert run.counts()[Status.MATCH] == 20


def test_the_first_calls_of_a_signature_are_looked_at_and_later_ones_more_seldom():
    here = Executor(resolve("cpu"))
    effects, plan = MemoryEffects(here, here, 1 << 30), make_plan(torch.ops.aten.exp.default, 0)
    x = torch.randn(4)
    wanted = [n for n in range(1, 600) if effects.is_due(plan, 7, (x,), {})]
    assert wanted == [1, 2, 8, 64, 512]
    assert [effects.is_due(plan, c, (x,), {}) for c in (8, 9)] == [False, False]  # the same form at other lines
    assert effects.is_due(plan, 10, (x[1:],), {})  # another place in memory is another form


def test_under_a_budget_the_first_comparison_of_a_call_is_not_looked_at():
    here = Executor(resolve("cpu"))
    effects = MemoryEffects(here, here, 1 << 30, spares_first=True)
    plan, x = make_plan(torch.ops.aten.exp.default, 0), torch.randn(4)
    assert [n for n in range(1, 600) if effects.is_due(plan, 7, (x,), {})] == [2, 3, 9, 65, 513]
    assert effects.may_be_due(plan, 8)
    assert not effects.is_due(plan, 8, (x[1:],), {})
    assert effects.may_be_due(plan, 8)  # no shortcut passes the second comparison by
    assert effects.is_due(plan, 8, (x[1:],), {})
    assert not effects.may_be_due(plan, 8)


def test_an_overwritten_argument_is_found_under_a_budget():
    x = torch.ones(8)
    with shadowrun.compare(TARGET, ops="*", budget=1e6) as run:
        for _ in range(100):
            torch.ops.memtest.overwrites(x)
            run.step()
    found = [r for r in run.records() if r.verdict.cause is Cause.MEMORY_EFFECTS]
    assert found
    assert found[0].call.step > 0


def test_copies_stay_within_their_bound():
    here, plan = Executor(resolve("cpu")), make_plan(torch.ops.memtest.overwrites.default, 0)
    torch.set_num_threads(1)
    other = Executor(resolve("cpu[threads=2]"))
    x = torch.ones(1000)
    assert look_for_effects(plan, ((x,), {}), here, other, 10_000) is None
    found = look_for_effects(plan, ((x,), {}), here, other, 100_000)
    assert found is not None
    assert found[1][0].n_different == 1000
    assert bool((x == 1).all())
