"""The tools that the benchmarks compare: shadowrun with several options, and other tools."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import tempfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import shadowrun
from shadowrun.judge.cause.hypotheses import ROUNDED_INPUTS
from shadowrun.report.formatting import verified_share

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Hooks", "Tool", "make_tools"]

_LOOKED_AT, _MIN_SHARE = 2000, 0.2
"""Calls of the first steps: new ones take another way than those that came before."""
_FINE = (shadowrun.Status.MATCH, shadowrun.Status.SKIPPED)


@dataclass(frozen=True)
class Hooks:
    """Calls that a tool needs while it is on.

    Attributes:
        end_step: Ends a training step, as a user's loop would.
        after: What it puts off and must have done before the clock stops.
    """

    end_step: Callable[[], object] | None = None
    after: Callable[[], object] | None = None

    def step_of(self, step: Callable[[], object], *, trains: bool) -> Callable[[], object]:
        """The step as a user of the tool would write it."""
        end_step = self.end_step
        if not trains or end_step is None:
            return step

        def run() -> None:
            step()
            end_step()

        return run


_STEADY = 16
"""Steps before the clock runs where results differ: each line is judged in full the 1st, 2nd, 4th, 8th, 16th time."""


@dataclass(frozen=True)
class Tool:
    """A context to run steps in.

    Attributes:
        name: In tables.
        enter: A context manager around a block of steps.
        ours: It is shadowrun.
        warm_up: Steps before the clock runs.
        longer: Blocks are longer by this factor.
        starts_anew: The first step of each block does what a long run does once. It is timed by itself.
        by_mean: Only the mean over many steps means something: some are left alone, others pay. It gets more rounds.
        problems: What makes its figures invalid, or an empty string.
        share: Of the program's calls that it compared; None where it compares all.
    """

    name: str
    enter: Callable[[], contextlib.AbstractContextManager[Hooks]]
    ours: bool = False
    warm_up: int = 2
    longer: int = 1
    starts_anew: bool = False
    by_mean: bool = False
    problems: Callable[[], str] | None = None
    share: Callable[[], float] | None = None


class Empty(TorchDispatchMode):
    """The floor of any tool: a mode that does nothing, by the same switches as ours."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


class Naive(TorchDispatchMode):
    """What one writes in ten lines: clone the inputs, run again, `assert_close`."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        before = pytree.tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
        out = func(*args, **kwargs)
        skipped = torch.Tag.nondeterministic_seeded in func.tags or "empty" in func.name() or func.is_view
        if not skipped and func.namespace == "aten":
            again = func(*before[0], **before[1])
            torch.testing.assert_close(again, out, equal_nan=True)
        return out


@contextlib.contextmanager
def _mode(make: Callable[[], Any]) -> Iterator[Hooks]:
    with make():
        yield Hooks()


@contextlib.contextmanager
def _debug_mode() -> Iterator[Hooks]:
    from torch.utils._debug_mode import DebugMode

    with DebugMode(), DebugMode.log_tensor_hashes():
        yield Hooks()


@contextlib.contextmanager
def _flops() -> Iterator[Hooks]:
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False):
        yield Hooks()


class _Ours:
    """One comparison that is started again for each block, as a user's would run on.

    Args:
        platform: To compare with; a process of its own is not in the processor time.
        options: Of the comparison.
    """

    def __init__(self, platform: str = "cpu", **options: Any) -> None:
        self._platform = platform
        self._options = options
        self._run: shadowrun.Comparison | None = None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[Hooks]:
        if self._run is None:
            self._run = shadowrun.compare(self._platform, **self._options)
        with self._run as run:
            # Records are written every thousand or so: those of the last steps are paid for, too.
            yield Hooks(run.step, run._recorder.flush)

    def verified_share(self) -> float:
        """Share of the program's calls that were compared."""
        assert self._run is not None
        return verified_share(self._run.info.budget)

    def not_matched(self) -> str:
        """Calls that were found wrong where both platforms are right."""
        counts = {} if self._run is None else self._run.counts()
        wrong = {str(s): counts[s] for s in (shadowrun.Status.MISMATCH, shadowrun.Status.ERROR) if counts.get(s)}
        return f"not all results matched: {wrong}" if wrong else ""

    def wrong_causes(self, *, few: bool = False) -> str:
        """That mismatches have another cause than the rounding of inputs to one dtype, or that there are none."""
        assert self._run is not None
        causes = {r.verdict.explanation for r in self._run.records() if r.verdict.status is shadowrun.Status.MISMATCH}
        if few and not causes:
            return ""
        if len(causes) == 1 and causes.pop().startswith(ROUNDED_INPUTS):
            return ""
        return f"mismatches were explained by {sorted(causes)}"

    def not_equal(self) -> str:
        """Calls that did not end as they should where both platforms are one."""
        counts = {} if self._run is None else self._run.counts()
        wrong = {str(status): n for status, n in counts.items() if n and status not in _FINE}
        return f"not all results were equal: {wrong}" if wrong else ""


class _Digests:
    """One recording that is started again for each block: it takes all that is alive for new, and digests it."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._run = shadowrun.record(f"{self._folder.name}/benchmark.shadowrec")

    @contextlib.contextmanager
    def __call__(self) -> Iterator[Hooks]:
        with self._run as run:
            yield Hooks(run.step, run._recorder.flush)


class _Reduced(_Ours):
    """As on another device whose products, or convolutions too, round their inputs: the program runs on the reference.

    Args:
        round_: Rounds a tensor of float32.
        operators: Operator to the position of its first factor, and how many there are.
    """

    def __init__(self, round_: Callable[[torch.Tensor], torch.Tensor], operators: dict[str, tuple[int, int]]) -> None:
        super().__init__()
        self._round, self._operators = round_, operators
        self._factors: dict[int, tuple[int, int]] = {}

    @contextlib.contextmanager
    def __call__(self) -> Iterator[Hooks]:
        from shadowrun.intercept import dispatch
        from shadowrun.replay.paths import native_handler, same_device

        with_isolated_warnings, make_plan = same_device.with_isolated_warnings, dispatch.make_plan
        if self._run is None:
            self._run = _on_reference(shadowrun.compare("cpu"))
            self._round_reruns(self._run._replayer._context.target)

        def noted(func: Any, index: int) -> Any:
            plan = make_plan(func, index)
            if plan.name in self._operators:
                self._factors[id(plan.run)] = self._operators[plan.name]
            return plan

        def rounded(function: Any, modes: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
            return with_isolated_warnings(function, modes, self._rounded(function, args), kwargs or {})

        native_handler.with_isolated_warnings = same_device.with_isolated_warnings = rounded
        dispatch.make_plan = noted
        try:
            with super().__call__() as hooks:
                yield hooks
        finally:
            native_handler.with_isolated_warnings = same_device.with_isolated_warnings = with_isolated_warnings
            dispatch.make_plan = make_plan

    def _rounded(self, function: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        found = self._factors.get(id(function))
        if found is None:
            return args
        first, n = found
        factors = [self._round(a) if isinstance(a, torch.Tensor) else a for a in args[first : first + n]]
        return (*args[:first], *factors, *args[first + n :])

    def _round_reruns(self, target: Any) -> None:
        """The judge runs the target again to find causes."""
        run = target.run

        def run_rounded(plan: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return run(plan, self._rounded(plan.run, args), kwargs)

        target.run = run_rounded


def _on_reference(run: shadowrun.Comparison) -> shadowrun.Comparison:
    """Have the program's own calls taken for the reference's, and the replays for the target's."""
    replayer = run._replayer
    roles, handler = replayer._roles, replayer.native_handler
    cpu = dataclasses.replace(roles.cpu, on_target=False, on_ref=True)
    roles.cpu = roles._by_device[cpu.device] = replayer._handler._role = cpu
    if handler is not None:
        handler.on_target = False
    return run


def _to_bf16(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.bfloat16).to(torch.float32)


def _to_tf32(value: torch.Tensor) -> torch.Tensor:
    return ((value.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)


_PRODUCTS = {"aten::mm": (0, 2), "aten::addmm": (1, 2), "aten::bmm": (0, 2), "aten::baddbmm": (1, 2)}
_CONVOLUTIONS = {"aten::convolution": (0, 2), "aten::convolution_backward": (0, 3)}


class _Rounded(_Ours):
    """As on another device: each result of a replay differs by one unit in the last place, but for exact operators.

    Args:
        oracle: Ask the float64 oracle in every case, also where a bound on rounding would do.
        options: Of the comparison.
    """

    def __init__(self, *, oracle: bool, **options: Any) -> None:
        super().__init__(**options)
        self._oracle = oracle
        self._exact: dict[int, bool] = {}

    @contextlib.contextmanager
    def __call__(self) -> Iterator[Hooks]:
        from shadowrun.intercept import dispatch
        from shadowrun.judge import judgement
        from shadowrun.judge.remembered_bounds import RememberedBounds
        from shadowrun.operators.facts import ulp_bound
        from shadowrun.replay.paths import native_handler, same_device

        with_isolated_warnings, make_plan = same_device.with_isolated_warnings, dispatch.make_plan

        def noted(func: Any, index: int) -> Any:
            plan = make_plan(func, index)
            self._exact[id(plan.run)] = ulp_bound(plan.name, [torch.float32]) == 0
            return plan

        def rounded(function: Any, modes: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
            out = with_isolated_warnings(function, modes, args, kwargs or {})
            if self._exact.get(id(function)) is False:
                _add_one_ulp(args[0] if out is None and args else out)
            return out

        native_handler.with_isolated_warnings = same_device.with_isolated_warnings = rounded
        dispatch.make_plan = noted
        close, learn = judgement.ClosenessCheck.verdict, RememberedBounds.learn
        if self._oracle:
            judgement.ulp_bound, judgement.ClosenessCheck.verdict = lambda *_: None, lambda *_: None
            RememberedBounds.learn = lambda *_: None
        try:
            with super().__call__() as hooks:
                yield hooks
        finally:
            native_handler.with_isolated_warnings = same_device.with_isolated_warnings = with_isolated_warnings
            dispatch.make_plan, judgement.ulp_bound, judgement.ClosenessCheck.verdict = make_plan, ulp_bound, close
            RememberedBounds.learn = learn

    def few_differed(self) -> str:
        """That the differences did not get into the comparison."""
        assert self._run is not None
        differed = [bool(record.diffs) for record in itertools.islice(self._run.records(), _LOOKED_AT)]
        share = sum(differed) / len(differed) if differed else 0.0
        return f"only {share:.0%} of the calls differed" if share < _MIN_SHARE else ""


def _add_one_ulp(values: Any) -> None:
    """To the results of a replay, which nothing else refers to."""
    for value in values if isinstance(values, (list, tuple)) else (values,):
        if isinstance(value, torch.Tensor) and value.dtype is torch.float32 and value.is_contiguous():
            value.view(torch.int32).bitwise_xor_(1)


def _has_bf16_products() -> bool:
    """Whether oneDNN has products in bf16 on this processor, as with AMX: a device that is really another one."""
    precision, x = torch.backends.mkldnn.matmul, torch.full((64, 64), 1 + 2.0**-12)
    before, exact = precision.fp32_precision, x @ x
    precision.fp32_precision = "bf16"
    try:
        return not torch.equal(x @ x, exact)
    finally:
        precision.fp32_precision = before


def make_tools() -> tuple[Tool, ...]:
    """All tools, with no state of an earlier workload."""
    counting, recording = _Ours(ops=["none::*"]), _Ours(replay=False)
    limited, isolated, drift = _Ours(budget=1.2), _Ours(), _Ours(drift=True)
    rounded, oracle, within_budget = _Rounded(oracle=False), _Rounded(oracle=True), _Rounded(oracle=False, budget=1.2)
    other_isa = _Ours("cpu[isa=default,threads=1]")
    medium = _Ours("cpu[float32_matmul_precision=medium]")
    bf16, tf32 = _Reduced(_to_bf16, _PRODUCTS), _Reduced(_to_tf32, _PRODUCTS | _CONVOLUTIONS)
    return (
        Tool("empty mode (floor)", lambda: _mode(Empty)),
        Tool("count only", counting, ours=True),
        Tool("record only", recording, ours=True),
        Tool("record digests", _Digests(), ours=True, starts_anew=True),
        # Counted from its first step on, which costs most and is paid for by those that follow.
        Tool("budget 1.2", limited, ours=True, warm_up=0, longer=4, by_mean=True, share=limited.verified_share),
        Tool("isolated", isolated, ours=True, problems=isolated.not_equal),
        Tool("drift", drift, ours=True, problems=drift.not_equal),
        Tool("every result 1 ULP off", rounded, ours=True, warm_up=_STEADY, problems=rounded.few_differed),
        Tool(
            "1 ULP off, budget 1.2",
            within_budget,
            ours=True,
            warm_up=0,
            longer=4,
            by_mean=True,
            share=within_budget.verified_share,
        ),
        Tool("another instruction set", other_isa, ours=True, warm_up=_STEADY, problems=other_isa.not_matched),
        Tool("products in bf16", bf16, ours=True, warm_up=_STEADY, problems=bf16.wrong_causes),
        *(
            (
                Tool(
                    "products in bf16 by the processor",
                    medium,
                    ours=True,
                    warm_up=_STEADY,
                    # Small products are not rounded: none of a micro MLP is.
                    problems=functools.partial(medium.wrong_causes, few=True),
                ),
            )
            if _has_bf16_products()
            else ()
        ),
        Tool("products and convolutions in tf32", tf32, ours=True, warm_up=_STEADY, problems=tf32.wrong_causes),
        Tool("oracle for every result", oracle, ours=True, problems=oracle.few_differed),
        Tool("flop_counter", _flops),
        Tool("DebugMode + hashes", _debug_mode),
        Tool("naive: clone, rerun, assert_close", lambda: _mode(Naive)),
    )
