"""Running an operator on a platform: settings, device rules, fallback detection, time; and its warnings kept apart.

Torch collects the warnings of C++ code and emits them when one of its functions returns, at the Python line that runs
then. Replays run inside `torchapi.with_isolated_warnings`, which is such a function, so their warnings come at lines of
this package and are dropped. The program's own come at the program's lines (see `shadowrun.intercept.user_call`).
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import torch

from shadowrun.errors import ShadowrunWarning
from shadowrun.intercept import torch_operators, torchapi
from shadowrun.intercept.plan import Action, OpPlan
from shadowrun.intercept.user_call import is_own_call, own_call
from shadowrun.operators.cpu_only_ops import EQUIVALENTS
from shadowrun.platforms.backends import FUNCTIONALIZING
from shadowrun.platforms.fallback import FallbackDetector
from shadowrun.replay.call import CallRun, argument, run_own
from shadowrun.replay.copies import Arguments, kept_on_cpu, mirror, move, tensors_in, without_strides, written_to
from shadowrun.replay.recompute import WideCompute
from shadowrun.types import Cause

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from shadowrun.operators.case import Value
    from shadowrun.platforms.device import Platform
    from shadowrun.platforms.worker.client import Question

__all__ = ["CallRunner", "Executor", "WarningFilter", "inputs_to_cpu", "result_on_other_device", "to_cpu"]


_PACKAGE = Path(__file__).parents[1]
# A replay is called from one of these folders.
_HERE = tuple(str(_PACKAGE / folder) + os.sep for folder in ("replay", "judge", "operators", "recording"))


class WarningFilter:
    """In place while a comparison runs. It looks only at warnings that are shown: calls without any pay nothing."""

    def __init__(self) -> None:
        self._original: Callable[[warnings.WarningMessage], None] | None = None
        self._patched: Callable[[warnings.WarningMessage], None] | None = None

    def start(self) -> None:
        """Take over what Python calls for each warning that passes the user's filters."""
        original = warnings._showwarnmsg  # type: ignore[attr-defined]

        def show(message: warnings.WarningMessage) -> None:
            # The frames decide: Python code of the program may run inside its own call and inside a replay.
            if issubclass(message.category, ShadowrunWarning) or not _in_replay(sys._getframe(1)):
                original(message)
                return
            # Filters that show a text once remember it now: the user's own warning is still to come.
            once: dict[Any, Any] = warnings.onceregistry  # type: ignore[attr-defined]
            once.pop((str(message.message), message.category), None)

        # `_showwarnmsg` gets what passed the filters: filters, registries and a `showwarning` of the user stay as they
        # are.
        self._original, self._patched = original, show
        warnings._showwarnmsg = show  # type: ignore[attr-defined]

    def stop(self) -> None:
        """Restore it, unless other code has replaced it since (then this function only passes warnings on)."""
        if self._original is not None and warnings._showwarnmsg is self._patched:  # type: ignore[attr-defined]
            warnings._showwarnmsg = self._original  # type: ignore[attr-defined]
        self._original = None


def _in_replay(frame: FrameType | None) -> bool:
    """Whether shadowrun called what runs there, and no call of the program lies between."""
    # The program's own call is made from these folders too: its frame ends the search.
    while frame is not None and not is_own_call(frame.f_code):
        if frame.f_code.co_filename.startswith(_HERE):
            return True
        frame = frame.f_back
    return False


_CPU = torch.device("cpu")
_UNDEFINED = object()
_clock = time.perf_counter_ns
_T = TypeVar("_T")


class _Begun(NamedTuple):
    """A call that the platform's own process was asked for."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    question: Question
    written: list[tuple[str, int]]
    asked: int


class CallRunner(Protocol):
    """What runs the calls that a comparison asks for: an `Executor`, or one that lives on another thread.

    Attributes:
        platform: The platform.
        device: Its device.
    """

    platform: Platform
    device: torch.device

    def run(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallRun:
        """See `Executor.run`."""
        ...

    def run_mirrored(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], max_bytes: int) -> CallRun:
        """See `Executor.run_mirrored`."""
        ...

    def to_device(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, max_bytes: int
    ) -> Arguments:
        """See `Executor.to_device`."""
        ...

    def values(self, plan: OpPlan, ran: CallRun) -> list[Value]:
        """See `Executor.values`."""
        ...

    def on_own_thread(self, question: Callable[[Executor], _T]) -> _T:
        """See `Executor.on_own_thread`."""
        ...


class Executor:
    """Runs calls on one platform.

    Args:
        platform: The platform.
        fallback_detector: Another executor's, where the two watch the same calls.
        copy_inputs: Copies the inputs of a call to a device, as `to_device` does.
        max_bytes: Memory that inputs may take which are widened for the setting ``compute``.

    Attributes:
        plain: Calls need nothing around them: the process's own settings, no functionalization.
    """

    def __init__(
        self,
        platform: Platform,
        fallback_detector: FallbackDetector | None = None,
        copy_inputs: Callable[..., Arguments] | None = None,
        *,
        max_bytes: int = 1 << 30,
    ) -> None:
        self.platform = platform
        self.device = platform.device
        self.fallback_detector = fallback_detector or FallbackDetector(platform.dispatch_key, platform.device.type)
        # Entering a context manager for nothing costs more than the test.
        self.plain = platform.has_program_settings and not platform.functionalizes
        self._copy_inputs = copy_inputs
        self._is_cpu = platform.device.type == "cpu"
        self._remote = platform.remote
        self._begun: _Begun | None = None
        self._has_autograd_kernel: dict[int, bool] = {}
        dtype = platform.compute_dtype
        self._wide = None if dtype is None else WideCompute(dtype, max_bytes)

    def run(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallRun:
        """Replay a call on tensors that lie on this platform's device, and that it may write to."""
        # A worker computes on copies: what it wrote has to be written to the inputs here.
        if self._remote is not None:
            done: CallRun = torchapi.with_isolated_warnings(self._run_remote, (), (plan, args, kwargs))
            _write_back(plan, args, kwargs, done)
            return CallRun(args, kwargs, done.out, done.ns, None, done.began)
        if self.fallback_detector.active:
            key = _watch_key(plan, args)
            # Muted: the warning of a replay is evidence, but the program has not caused it.
            with self.fallback_detector.watch(key, plan.name, mute=True) as found:
                ran: CallRun = torchapi.with_isolated_warnings(self._run, (), (plan, args, kwargs))
            if found:
                ran.fallback = found[0]
            return ran
        unwatched: CallRun = torchapi.with_isolated_warnings(self._run, (), (plan, args, kwargs))
        return unwatched

    def on_own_thread(self, question: Callable[[Executor], _T]) -> _T:
        """Answer a question that runs calls on this platform, on the thread that may run them."""
        return question(self)

    def call(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator that needs no watching, under this platform's settings."""
        if self.plain:
            return torchapi.with_isolated_warnings(plan.run, (), args, kwargs)
        with self.platform.context():
            if self._wide is not None:
                return torchapi.with_isolated_warnings(self._wide, (), (plan, args, kwargs))
            return torchapi.with_isolated_warnings(plan.run, (), args, kwargs)

    def _run(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallRun:
        func = plan.run
        if self.plain:
            start = _clock()
            out = func(*args, **kwargs)
            return CallRun(args, kwargs, out, _clock() - start, None, start)
        # The settings are in force for this run only: the program would compute under them.
        with self.platform.context():
            start = _clock()
            if self.platform.functionalizes:
                # A handler runs with Functionalize excluded: each view would raise on lazy and XLA.
                with torch_operators.functionalize_included(autograd=self._is_autograd_kernel(plan)):
                    out = func(*args, **kwargs)
                if plan.action is Action.RANDOM:  # draw now: each reading runs the graph anew, and would draw anew
                    self.platform.compute_now(list(tensors_in([out])))
            elif self._wide is not None:
                out = self._wide(plan, args, kwargs)
            else:
                out = func(*args, **kwargs)
            return CallRun(args, kwargs, out, _clock() - start, None, start)

    def _is_autograd_kernel(self, plan: OpPlan) -> bool:
        """Whether a program on this platform's device never reaches a kernel of the backend below autograd."""
        known = self._has_autograd_kernel.get(plan.index)
        if known is None:
            known = torch_operators.has_autograd_kernel(plan.name, self.platform.dispatch_key)
            self._has_autograd_kernel[plan.index] = known
        return known

    def begin_remote(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Have the platform's own process begin a call; `run_mirrored` with these very inputs waits for its end."""
        if self._remote is not None:
            # The program's call comes next and must be made: what fails here fails again where it is recorded.
            with contextlib.suppress(Exception):
                self._begun = torchapi.with_isolated_warnings(self._ask, (), (plan, args, kwargs))

    def forget_begun(self) -> None:
        """Keep nothing of a call that was begun; its answer is read and dropped before the next one is sent."""
        self._begun = None

    def _ask(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Begun:
        assert self._remote is not None
        written = [(a.name, -1 if a.kwarg_only or a.position >= len(args) else a.position) for a in plan.mutated]
        # The worker's generator is another one: it gets the state, so that it draws the same numbers.
        rng = torch.get_rng_state() if plan.action is Action.RANDOM else None
        wanted = plan.fresh if plan.n_returns == 1 else tuple(i for i in plan.fresh if i not in plan.uninitialised)
        asked = _clock()  # when the worker began is on its own clock
        question = self._remote.ask(plan.name, args, kwargs, (plan.n_returns, wanted), written, rng)
        return _Begun(args, kwargs, question, written, asked)

    def _run_remote(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallRun:
        """Run a call in the platform's own process; the inputs stay as they are, the run has what became of them."""
        assert self._remote is not None
        begun, self._begun = self._begun, None
        # By identity: another call with equal inputs was not begun.
        if begun is None or begun.args is not args or begun.kwargs is not kwargs:
            begun = self._ask(plan, args, kwargs)
        written, asked = begun.written, begun.asked
        fresh, mutated, ns = self._remote.answer(begun.question)
        after, named = list(args), dict(kwargs)
        for (name, position), value in zip(written, mutated, strict=True):
            if position >= 0:
                after[position] = value
            elif name in named:
                named[name] = value
        out = fresh[0] if plan.n_returns == 1 else tuple(fresh)
        return CallRun(tuple(after), named, out, ns, None, asked)

    def run_user(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any]) -> CallRun:
        """Run the user's own call: nothing is changed around it, it is only watched."""
        if not self.fallback_detector.active:
            return run_own(plan, args, kwargs)
        key = _watch_key(plan, args)
        with self.fallback_detector.watch(key, plan.name, mute=False) as found:
            start = _clock()
            given = tensors_in((*args, *kwargs.values()))
            if self.platform.functionalizes and not any(t.device.type != "cpu" for t in given):
                # A factory, or a copy from the CPU: the device wraps its result for Functionalize.
                with torch_operators.functionalize_included():
                    out = own_call(plan.run, args, kwargs)
            else:
                # Functionalize comes before the mode: these are the tensors that it unwrapped.
                out = own_call(plan.run, args, kwargs)
            ran = CallRun(args, kwargs, out, _clock() - start, None, start)
        if found:
            ran.fallback = found[0]
        return ran

    def needs_warning_probe(self, plan: OpPlan, args: tuple[Any, ...]) -> bool:
        """Whether `probe_warnings` has something to do after this call."""
        return self.fallback_detector.active and self.fallback_detector.needs_warning_probe(_watch_key(plan, args))

    def probe_warnings(self, plan: OpPlan, ran: CallRun, pristine: Arguments | None, max_bytes: int) -> None:
        """Run the user's call once more if what C++ code warned of in it could not be heard; once for each kind.

        Args:
            plan: The operator.
            ran: The user's own run, which gets the evidence.
            pristine: Inputs as before the call, on the CPU; None where they were not copied.
            max_bytes: Bound of the copies.
        """
        if not self.fallback_detector.active or not self.fallback_detector.begin_warning_probe(
            _watch_key(plan, ran.args)
        ):
            return
        if isinstance(ran.kwargs.get("generator"), torch.Generator) or (pristine is None and plan.mutated):
            return
        # A second run of a random call would move the program's stream.
        state, cpu_state = self.platform.rng_state(), torch.get_rng_state()
        try:
            if pristine is None:
                again = self.run(plan, ran.args, ran.kwargs)
            else:
                again = self.run_mirrored(plan, *pristine, max_bytes)
            # Only the warning is new here: other evidence was seen in the program's own run.
            if again.fallback is not None and again.fallback[0] is Cause.WARNED_FALLBACK:
                ran.fallback = again.fallback
        except Exception:  # noqa: S110 - the user's own run went well, and is judged with what is known of it
            pass
        finally:
            self.platform.set_rng_state(state)
            torch.set_rng_state(cpu_state)

    def run_mirrored(self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], max_bytes: int) -> CallRun:
        """Run a call whose inputs lie on the CPU, on copies of them on this platform's device."""
        if self._remote is not None:
            done: CallRun = torchapi.with_isolated_warnings(self._run_remote, (), (plan, args, kwargs))
            return done
        here_args, here_kwargs = torchapi.with_isolated_warnings(
            self.to_device, (), (plan, args, kwargs, self.device, max_bytes)
        )
        # Attention becomes an operator that only the CPU has: other devices run the public API call.
        equivalent = None if self._is_cpu else EQUIVALENTS.get(plan.name)
        if equivalent is None:
            return self.run(plan, here_args, here_kwargs)
        key = _watch_key(plan, args)
        with self.fallback_detector.watch(key, plan.name, mute=True) as found, self.platform.context():
            start = _clock()
            if self.platform.functionalizes:
                with torch_operators.functionalize_included():
                    out = torchapi.with_isolated_warnings(equivalent, (), here_args, here_kwargs)
            else:
                out = torchapi.with_isolated_warnings(equivalent, (), here_args, here_kwargs)
            ran = CallRun(here_args, here_kwargs, out, _clock() - start, None, start)
        if found:
            ran.fallback = found[0]
        return ran

    def to_device(
        self, plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, max_bytes: int
    ) -> Arguments:
        """Copy inputs to a device, this platform being one end of the way."""
        # The asynchronous path brings copies that need no host sync.
        if self._copy_inputs is not None:
            copied: Arguments = self._copy_inputs(plan, args, kwargs, device, max_bytes)
            return copied
        kept = kept_on_cpu(plan, args, kwargs)
        if not self.platform.functionalizes:
            return mirror(args, kwargs, device, max_bytes, written=written_to(plan, args, kwargs), kept=kept)
        with torch_operators.functionalize_included():
            # Lazy and XLA tensors have no strides that a copy could keep.
            return mirror(args, kwargs, device, max_bytes, without_strides, kept=kept)

    def values(self, plan: OpPlan, ran: CallRun) -> list[Value]:
        """Results of a run, on the CPU; a list with fewer entries than the operator gives for an equivalent."""
        found = ran.out if isinstance(ran.out, list) and plan.name in EQUIVALENTS else None
        if found is None:
            found = ran.values(plan)
        if self._is_cpu:
            return list(found)
        if self.platform.functionalizes:
            with torch_operators.functionalize_included():
                return [v for v in map(_defined_on_cpu, found) if v is not _UNDEFINED]
        return [to_cpu(v) for v in found]

    def read(self, tensors: list[torch.Tensor]) -> list[torch.Tensor | None]:
        """Copies of a run's tensors on the CPU, where this platform functionalizes; None for those without values."""
        read: list[torch.Tensor | None] = []
        with torch_operators.functionalize_included():
            for t in tensors:
                try:
                    read.append(move(torch_operators.unwrapped(t), _CPU, strided=False))
                except RuntimeError:  # a wrapper that holds no tensor; read a second time, it gives another error
                    read.append(None)
        return read


def _write_back(plan: OpPlan, args: tuple[Any, ...], kwargs: dict[str, Any], done: CallRun) -> None:
    for a in plan.mutated:
        written, computed = argument(a, args, kwargs), argument(a, done.args, done.kwargs)
        pairs = zip(written, computed, strict=True) if isinstance(written, (list, tuple)) else ((written, computed),)
        for to, by in pairs:
            if isinstance(to, torch.Tensor):
                if to.shape != by.shape:
                    # Out arguments grow with the result.
                    to.resize_(by.shape)
                to.copy_(by)


def _watch_key(plan: OpPlan, args: tuple[Any, ...]) -> object:
    """Operator and dtypes: what a vendor warns about once."""
    return (plan.index, *[t.dtype for t in args if isinstance(t, torch.Tensor)])


def to_cpu(value: Value) -> Value:
    """A value's copy on the CPU; what lies there is returned as it is."""
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        return move(value, _CPU, strided=value.device.type not in FUNCTIONALIZING)
    return value


def inputs_to_cpu(pristine: Arguments) -> Arguments:
    """Copies of a call's inputs on the CPU; what lies there is returned as it is."""
    args, kwargs = pristine
    return tuple([_each_to_cpu(a) for a in args]), {k: _each_to_cpu(v) for k, v in kwargs.items()}


def _each_to_cpu(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [to_cpu(v) for v in value]
    return to_cpu(value)


def result_on_other_device(plan: OpPlan, out: Any, device: torch.device) -> tuple[Cause, str] | None:
    """Evidence of a fallback in where a result lies; None where it lies on the device, or may lie elsewhere."""
    # A `device=` argument may name another device, and a written argument lies where the program put it.
    if plan.has_device or plan.mutated:
        return None
    first = out[0] if isinstance(out, (tuple, list)) and out else out
    if isinstance(first, torch.Tensor) and first.device.type != device.type:
        return Cause.SILENT_FALLBACK, f"the result lies on {first.device}, not on {device}"
    return None


def _defined_on_cpu(value: Value) -> Any:
    try:
        # What fell back and stayed on the CPU may still be wrapped, and a wrapper has no memory.
        return to_cpu(torch_operators.unwrapped(value) if isinstance(value, torch.Tensor) else value)
    except RuntimeError as error:
        if not torch_operators.is_undefined_error(error):
            raise
        return _UNDEFINED
