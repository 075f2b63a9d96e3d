"""A program that must not notice a comparison, and what is held against it.

`tensor_programs` and `feature_programs` hold the programs, `test_tensors` and `test_features` run them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

import shadowrun
from shadowrun import Cause, Status
from tests.transparency.cases import Case
from tests.transparency.checking import IdleMode, classify
from tests.transparency.sweep import shown_always

if TYPE_CHECKING:
    from collections.abc import Callable

SETUPS = {
    # where the program runs, target, options
    "program on the CPU, one thread": ("cpu", "cpu[threads=1]", {}),
    "program on the reference": ("cpu", "sim", {}),
    "program on the target": ("sim", "sim", {}),
    "functions of torch": ("cpu", "cpu[threads=1]", {"api": True}),
    "drift": ("cpu", "cpu[threads=1]", {"drift": True}),
    "drift on the reference": ("cpu", "sim", {"drift": True}),
    "drift on the target": ("sim", "sim", {"drift": True}),
}
HANDED_OVER = "random: drawn values handed over to the reference"


@dataclass(frozen=True)
class Program:
    """User code with a name; all that it returns must stay.

    Attributes:
        run: Takes the device and returns nested results.
        not_on_sim: Why it does not run on the simulated device, which then may lack operators, or empty.
        uncompared: Why none of its calls can be compared, or empty.
        by_torch: What torch itself changes in it under any mode, or empty.
        unverified: Explanations that some of its calls may have in addition to random numbers that were handed over.
    """

    run: Callable[[str], Any]
    not_on_sim: str = ""
    uncompared: str = ""
    by_torch: str = ""
    unverified: frozenset[str] = field(default_factory=frozenset)


class Collection(dict[str, Program]):
    """Programs by name; its call is a decorator that adds one."""

    def __call__(self, name: str, **marks: Any) -> Callable[[Any], Any]:
        def add(function: Callable[[str], Any]) -> Callable[[str], Any]:
            assert name not in self
            self[name] = Program(function, **marks)
            return function

        return add


def case(program: Program, device: str, name: str = "") -> Case:
    """The program in the form that the sweep checks."""

    def prepare() -> Any:
        def run(state: dict[str, Any]) -> None:
            state["out"] = program.run(device)

        return None, run

    return Case(name, prepare)


def check(program: Program, setup: str, name: str = "") -> None:
    """Run a program plainly and compared; everything it can see is the same, and nothing is reported."""
    device, target, options = SETUPS[setup]
    run = shadowrun.compare(target, ref="cpu", **options)
    made = case(program, device, name)
    with shown_always():
        kind, found = classify(made, run)
    # Not on every device does torch change anything.
    assert kind == "identical" or (kind == "by_torch" and program.by_torch), found
    missing = {"unsupported", "error"} if target == "sim" and program.not_on_sim else set()
    assert [(f.kind, f.op, f.evidence) for f in run.findings() if f.kind not in {"slow", *missing}] == []
    wrong = run.records(status=[Status.MISMATCH, Status.ERROR, Status.UNSUPPORTED, Status.FALLBACK])
    assert [(r.call.op, r.verdict) for r in wrong if r.verdict.status not in missing] == []
    reasons = {r.verdict.explanation for r in run.records(status=Status.UNVERIFIED)}
    assert reasons - program.unverified <= {HANDED_OVER}
    assert not [r for r in run.records() if r.verdict.cause is Cause.HARNESS]
    counts = run.counts()
    assert bool(counts[Status.MATCH]) is not bool(program.uncompared), counts
    assert sum(counts.values()) >= n_calls(made), "an operator passed unseen"


def n_calls(made: Case) -> int:
    """Operator calls that a mode which does nothing sees in the program."""
    mode = Counting()
    _, program = made.prepare()
    torch.manual_seed(0)
    try:
        with mode:
            program({})
    except Exception:  # the program's own, compared elsewhere
        pass
    return mode.n


class Counting(IdleMode):
    """Counts the calls that end with it."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.n += result is not NotImplemented
        return result
