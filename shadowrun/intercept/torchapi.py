"""Private torch APIs of dispatch: modes, profilers, autograd, storages. Interception and replay call them here only.

Each comment names the versions on which it was seen, and the effect of its absence. `torch_private` has attributes of
tensors and operators, `torch_operators` has kernels, `torch_compiler` has torch.compile; `platforms/torchplatform.py`
and `sim/device.py` have what only they need.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _python_dispatch as _modes

from shadowrun.platforms.torchplatform import below_autograd
from shadowrun.torch_versions import need, optional

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "FUTURE_CALLBACKS",
    "DispatchMode",
    "Future",
    "StorageWatch",
    "VerboseLevels",
    "as_in_handler",
    "autograd_node",
    "autograd_node_number",
    "has_function_mode",
    "hidden_from_profiler",
    "hidden_from_program",
    "in_infra_mode",
    "inner_operators",
    "live_storage",
    "modes",
    "n_modes_below",
    "next_sequence_number",
    "on_top",
    "pop_mode",
    "profiling",
    "push_mode",
    "shares_memory",
    "storage_key",
    "top_mode",
    "with_isolated_warnings",
    "without_function_modes",
    "without_lower_modes",
    "without_modes",
]
need(
    "torch.UntypedStorage._cdata",
    *("torch._C._autograd._get_sequence_nr", "torch._C._current_autograd_node"),
    *("torch._C._functions.AccumulateGrad._sequence_nr", "torch._C._functorch.peek_interpreter_stack"),
    *("torch._C._len_torch_dispatch_stack", "torch._C._get_dispatch_mode"),
    *("torch._C._TorchDispatchModeKey.FAKE", "torch._C._TorchDispatchModeKey.PROXY"),
    *("torch._C._is_torch_function_mode_enabled", "torch._C.DisableTorchFunction", "torch._C._DisableAutocast"),
    *("torch.utils._python_dispatch.TorchDispatchMode", "torch.utils._python_dispatch._get_current_dispatch_mode"),
    "torch.utils._python_dispatch._get_current_dispatch_mode_stack",
    *("torch.utils._python_dispatch._pop_mode", "torch.utils._python_dispatch._push_mode"),
    *("torch._C._push_on_torch_function_stack", "torch._C._pop_torch_function_stack"),
    *("torch._C._len_torch_function_stack", "torch._C._get_function_stack_at"),
)


# Seen on 2.11 and 2.13: the sequence number that the next autograd node of this thread gets (0.08 µs).
# Without it, backward operators cannot be given the module and line of their forward call.
next_sequence_number = torch._C._autograd._get_sequence_nr


# Seen on 2.11 and 2.13: the autograd node that is being executed on this thread, None outside backward.
# Without it, the phase of a call is not known.
autograd_node: Callable[[], Any] = torch._C._current_autograd_node

# Seen on 2.11 and 2.13. How many modes lie below ours while our handler runs.
n_modes_below = torch._C._len_torch_dispatch_stack

# Seen on 2.11 and 2.13. Whether a `TorchFunctionMode` is on: torch calls it where the program calls torch and takes it
# off during the call, so that in a handler one is on only where C++ called (TorchScript, `from_numpy`).
has_function_mode: Callable[[], bool] = torch._C._is_torch_function_mode_enabled

FunctionMode: Any = torch.overrides.TorchFunctionMode


# Seen on 2.13. Only `api=True` uses these.
def push_function_mode(mode: Any) -> None:
    """Put a function mode on top of the stack of this thread."""
    torch._C._push_on_torch_function_stack(mode)


def is_top_function_mode(mode: Any) -> bool:
    """Whether a function mode is on top of the stack of this thread."""
    n = torch._C._len_torch_function_stack()
    return n > 0 and torch._C._get_function_stack_at(n - 1) is mode


def remove_function_mode(mode: Any) -> None:
    """Take a function mode off the stack of this thread, wherever it lies."""
    above = []
    while torch._C._len_torch_function_stack():
        top = torch._C._pop_torch_function_stack()
        if top is mode:
            break
        above.append(top)
    for other in reversed(above):
        torch._C._push_on_torch_function_stack(other)


# Seen on 2.11 and 2.13: no function mode is called inside. Without it, such a mode sees replays.
without_function_modes: Callable[[], Any] = torch._C.DisableTorchFunction

# Seen on 2.11 and 2.13: whether a profiler of the program records this thread (27 ns).
profiling: Callable[[], bool] = optional(
    "torch._C._autograd._profiler_enabled", lambda: False, "the program's own profiler counts replays"
)
_have_recorded: Callable[[bool], None] = optional(
    "torch._C._autograd._enable_record_function", lambda _: None, "the program's own profiler counts replays"
)

# Seen on 2.11 to 2.15: the profiler of the time before Kineto. It belongs to the thread, and prints nothing.
_WITHOUT_LEGACY = "kernels of a recording have no names of operators inside of a call"
_start_legacy_profiler: Callable[[Any], None] | None = optional(
    "torch._C._autograd._enable_profiler_legacy", None, _WITHOUT_LEGACY
)
_stop_legacy_profiler: Callable[[], Any] | None = optional(
    "torch._C._autograd._disable_profiler_legacy", None, _WITHOUT_LEGACY
)
_ProfilerConfig: Any = optional("torch._C._profiler.ProfilerConfig", None, _WITHOUT_LEGACY)
_ProfilerState: Any = optional("torch._C._profiler.ProfilerState", None, _WITHOUT_LEGACY)
_ExperimentalConfig: Any = optional("torch._C._profiler._ExperimentalConfig", None, _WITHOUT_LEGACY)


@functools.cache
def _legacy_config() -> Any:
    return _ProfilerConfig(_ProfilerState.CPU, False, False, False, False, False, _ExperimentalConfig())


@contextlib.contextmanager
def inner_operators(found: list[str], skipped: frozenset[str]) -> Iterator[None]:
    """While inside, add the innermost operators that run on this thread, in their order, without overload names.

    Args:
        found: Is added to.
        skipped: Operators that do not count, nor hide the one that calls them.
    """
    if _start_legacy_profiler is None or _stop_legacy_profiler is None:
        yield
        return
    try:
        _start_legacy_profiler(_legacy_config())
    except (RuntimeError, TypeError, AttributeError):  # another profiler has this thread, or its API changed
        yield
        return
    try:
        yield
    finally:
        events = [event for of_thread in _stop_legacy_profiler() for event in of_thread]
    running: list[tuple[str, int]] = []
    for event in events:
        if event.kind() == "push":
            running.append((event.name(), len(found)))
        elif event.kind() == "pop" and running:
            name, n_before = running.pop()
            # Nothing was added since it began: it is an innermost one.
            if len(found) == n_before and "::" in name and name not in skipped:
                found.append(name)


_WITHOUT_VERBOSE = "kernels of a recording have no names of oneDNN's and MKL's"
_set_onednn_verbose: Callable[[int], Any] | None = optional(
    "torch._C._verbose.mkldnn_set_verbose", None, _WITHOUT_VERBOSE
)
_set_mkl_verbose: Callable[[int], Any] | None = optional("torch._C._verbose.mkl_set_verbose", None, _WITHOUT_VERBOSE)


class VerboseLevels:
    """Has oneDNN and MKL print what they run, for the time of a call.

    Seen on 2.11 to 2.15. Neither library says which level it has, so that the program's own use of
    `torch.backends.mkldnn.verbose` and `torch.backends.mkl.verbose` is noted, and restored after each call.
    """

    def __init__(self) -> None:
        both = {"mkldnn_set_verbose": _set_onednn_verbose, "mkl_set_verbose": _set_mkl_verbose}
        self._set = {name: original for name, original in both.items() if original is not None}
        self._noted = dict.fromkeys(self._set, 0)
        for name in self._set:
            setattr(torch._C._verbose, name, functools.partial(self._note, name))

    @property
    def of_program(self) -> bool:
        """Whether the program has them print."""
        return any(self._noted.values())

    def _note(self, name: str, level: int) -> Any:
        self._noted[name] = level
        return self._set[name](level)

    @contextlib.contextmanager
    def raised(self) -> Iterator[None]:
        """Have them print."""
        for original in self._set.values():
            original(1)
        try:
            yield
        finally:
            for name, original in self._set.items():
                original(self._noted[name])

    def close(self) -> None:
        """Note no more."""
        for name, original in self._set.items():
            setattr(torch._C._verbose, name, original)


_INFRA_KEYS = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)
_infra_mode = torch._C._get_dispatch_mode


def autograd_node_number(node: Any) -> int:
    """Sequence number of a node, shared with the forward call that made it."""
    return int(node._sequence_nr())


def in_infra_mode() -> bool:
    """Whether tensors are fake or being traced (FakeTensorMode, make_fx, export): nothing to compare."""
    return n_modes_below() > 0 and any(_infra_mode(key) is not None for key in _INFRA_KEYS)


class _Once:
    """Calls an operator under the modes given, the first time; without any from then on."""

    __slots__ = ("_modes", "_run")

    def __init__(self, run: Callable[..., Any], modes: list[Any]) -> None:
        self._run = run
        self._modes = modes

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        modes, self._modes = self._modes, []
        for mode in reversed(modes):
            _modes._push_mode(mode)
        try:
            return self._run(*args, **kwargs)
        finally:
            for _ in modes:
                _modes._pop_mode()


@contextlib.contextmanager
def without_lower_modes(run: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Take the modes below ours away: they shall see the user's own call, once, and nothing of ours.

    Seen on 2.11 and 2.13. Switching Python dispatch off for our part would leave no way to switch it on
    again for the user's call.

    Yields:
        `run`, whose first call goes by the user's modes.
    """
    modes = [_modes._pop_mode() for _ in range(n_modes_below())]
    try:
        yield _Once(run, modes)
    finally:
        for mode in reversed(modes):
            _modes._push_mode(mode)


class _FirstRecorded:
    """Calls an operator, the first time as profilers see it."""

    __slots__ = ("_called", "_run")

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run, self._called = run, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._called:
            return self._run(*args, **kwargs)
        self._called = True
        _have_recorded(True)
        try:
            return self._run(*args, **kwargs)
        finally:
            _have_recorded(False)


@contextlib.contextmanager
def hidden_from_profiler(run: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """Have the program's profiler see its own call, and no replay.

    Seen on 2.11 and 2.13. Memory that a replay allocates is counted all the same.

    Yields:
        `run`, whose first call is the program's own.
    """
    _have_recorded(False)
    try:
        yield _FirstRecorded(run)
    finally:
        _have_recorded(True)


@contextlib.contextmanager
def as_in_handler() -> Iterator[None]:
    """What a mode's handler finds: no modes, and nothing between an operator and its kernel.

    For work of ours that is done where the program calls us (`step`), under modes of its own and of ours. Seen on 2.11
    and 2.13 (`_DisableAutocast`); without it, operators would be recorded as the program's.
    """
    modes = [_modes._pop_mode() for _ in range(n_modes_below())]
    try:
        with torch._C.DisableTorchFunction(), torch._C._DisableAutocast(), below_autograd():
            yield
    finally:
        for mode in reversed(modes):
            _modes._push_mode(mode)


# Seen on 2.11 and 2.13. Entering a mode by `with` also sets flags of the whole process, which threads that come and go
# in another order would leave set.
push_mode: Callable[[Any], None] = _modes._push_mode


top_mode: Callable[[], Any] = _modes._get_current_dispatch_mode

# Seen on 2.11 and 2.13: what torch.futures.Future is made of and what `Work.get_future` returns. Without its methods,
# operators of a callback that a thread of C++ runs (gloo's, for the communication hooks of DDP) are not seen.
Future: type = optional("torch._C.Future", type("NoFuture", (), {}), "operators in callbacks of futures are not seen")
FUTURE_CALLBACKS = tuple(name for name in ("then", "add_done_callback") if name in vars(Future))

# Seen on 2.11 and 2.13: the modes of this thread.
modes: Callable[[], list[Any]] = _modes._get_current_dispatch_mode_stack


def pop_mode(mode: Any) -> None:
    """Take a mode off this thread's stack, if it is the top one."""
    if top_mode() is mode:
        _modes._pop_mode()


@contextlib.contextmanager
def on_top(mode: Any) -> Iterator[None]:
    """Have a mode of this thread's stack on top of it: those that the program has entered since are put back."""
    above = []
    if mode in modes():
        while (top := top_mode()) is not mode:
            above.append(top)
            _modes._pop_mode()
    try:
        yield
    finally:
        for other in reversed(above):
            _modes._push_mode(other)


def _merely_called(run: Callable[..., Any], _types: Any, args: tuple[Any, ...], kwargs: Any = None) -> Any:
    return run(*args, **(kwargs or {}))


# Seen on 2.11 and 2.13. `with_isolated_warnings(run, (), args, kwargs)` calls `run`, and the warnings that C++
# code emits in it come at the line of this call. Without it, torch collects them with those of the user's own call and
# emits them at the user's line, twice. (Its purpose is to switch `__torch_function__` off, which a handler has no use
# for. 0.17 µs.)
with_isolated_warnings: Callable[..., Any] = optional(
    "torch._C._disabled_torch_function_impl", _merely_called, "warnings of replays may come with the program's own"
)


def hidden_from_program(function: Callable[..., Any], *args: Any) -> Any:
    """Call operators of ours: unseen by modes and by the program's profiler, their warnings apart."""
    not_recorded = hidden_from_profiler(function) if profiling() else contextlib.nullcontext()
    with as_in_handler(), not_recorded:
        return with_isolated_warnings(function, (), args, None)


# Seen on 2.11 and 2.13: no mode and no subclass is handed the calls inside. Without it, subclasses of tensors cannot
# be constructed by their old constructor under a mode.
without_modes: Callable[[], Any] = optional(
    "torch._C._DisableTorchDispatch", contextlib.nullcontext, "T([1.0]) of a tensor subclass T raises"
)


def storage_key(t: torch.Tensor) -> int:
    """Identity of the tensor's storage while that lives (0.45 µs). Seen on 2.11 and 2.13."""
    return int(t.untyped_storage()._cdata)


def _have_one_key(left: torch.Tensor, right: torch.Tensor) -> bool:
    return storage_key(left) == storage_key(right)


# Seen on 2.11 and 2.13: whether two tensors lie on one storage (0.2 µs; by their keys it takes 1 µs).
shares_memory: Callable[[torch.Tensor, torch.Tensor], bool] = optional(
    "torch._C._is_alias_of", _have_one_key, "a quick answer to whether tensors share memory"
)


class _Unwatched:
    """Stands for a weak reference where torch has none: the storage counts as freed, so no copy is kept."""

    def __init__(self, _storage: object) -> None:
        pass

    def expired(self) -> bool:
        return True


_storage_reference: Callable[[Any], Any] = optional(
    "torch.multiprocessing.reductions.StorageWeakRef", _Unwatched, "copies serve one call only"
)


class StorageWatch:
    """Knows whether a storage has been freed; while it is held, no other storage gets the same `storage_key`.

    Seen on 2.11 and 2.13 (`torch.multiprocessing.reductions.StorageWeakRef`, as CUDA graph trees use it). Without it,
    no copy serves a second call.
    """

    __slots__ = ("_reference",)

    def __init__(self, t: torch.Tensor) -> None:
        self._reference = _storage_reference(t.untyped_storage())

    @property
    def freed(self) -> bool:
        """Whether no tensor uses it any more."""
        return bool(self._reference.expired())


def _no_storage(_key: int) -> None:
    return None


live_storage: Callable[[int], torch.UntypedStorage | None] = optional(
    "torch.UntypedStorage._new_with_weak_ptr", _no_storage, "results of a step's last call are not kept"
)
"""The storage with a `storage_key`, while a `StorageWatch` holds it; None if it was freed. Seen on 2.13 and 2.15."""


def in_transform() -> bool:
    """Whether a functorch transform (vmap, grad) is active. Seen on 2.11 and 2.13."""
    return torch._C._functorch.peek_interpreter_stack() is not None


class DispatchMode(_modes.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """TorchDispatchMode with the three private switches that shadowrun needs."""

    # Seen on 2.11 and 2.13. Without it, a call of cond or flex_attention under the mode raises.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile work under the mode; without it, compiled functions silently run eagerly."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leave the handler unwrapped: 1.6 µs less per call and no import of Dynamo (2.1 s)."""
        return False
