"""Detection of CPU fallback on the target, without the backend's cooperation.

1. `aten::_to_cpu`: PyTorch's `cpu_fallback` moves all its tensor inputs with this operator, even if there are none
   (`tril_indices`). The override counts its calls; a plain ``.cpu()`` does not use it.
2. Warnings: Python warnings, and text on file descriptor 2, where torch_npu writes its own. Vendors warn once per
   operator and process, so an operator that warned once counts from then on. torch delivers the warnings of C++ code in
   the user's own call only when its outermost function returns, which is too late: the first call of each kind is
   replayed once to collect them (`begin_warning_probe`).
3. Fallback counters that the backend keeps (XLA, lazy): the one named after the operator increases.
4. The result lies on another device (checked by the replayer, not here).

The dispatch table is read too, but only to confirm: alone it is unreliable.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import threading
import warnings
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.platforms import torchplatform
from shadowrun.platforms.backends import backend_of
from shadowrun.torch_private import destroy_library
from shadowrun.types import Cause

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Evidence", "FallbackDetector", "counter_reader", "increased"]

_PREFIX = "aten::"


def counter_reader(device_type: str) -> Callable[[], dict[str, int]] | None:
    """A function that reads a backend's fallback counters by operator; None where it keeps none."""
    module = backend_of(device_type).fallback_counters
    if not module:
        return None

    def read() -> dict[str, int]:
        # Loading the backend here would start a device that the program never asked for.
        metrics = sys.modules.get(module)  # not imported: a backend that is not loaded has counted nothing
        if metrics is None:
            return {}
        return {name: int(metrics.counter_value(name)) for name in metrics.counter_names() if name.startswith(_PREFIX)}

    return read


def increased(before: dict[str, int], after: dict[str, int]) -> list[str]:
    """Operators whose counters increased."""
    return [name for name, n in after.items() if n > before.get(name, 0)]


# Vendors word this warning differently.
# torch_npu: "is not currently supported on the NPU backend and will fall back to run on the CPU"; XPU: "Aten Op
# fallback from XPU to CPU happends." (its spelling); MPS has torch_npu's words.
_WARNING = re.compile(
    r"(?:fall(?:ing|s)?[ -]?back(?:s|ed)? (?:to|on)\b.*\bCPU|fallback from \w+ to CPU|will be executed on CPU)",
    re.IGNORECASE | re.DOTALL,
)
_NAMED = re.compile(r"'((?:aten::)?\w+(?:\.\w+)?)'|\b(aten::\w+(?:\.\w+)?)")

_ALWAYS = ("always", None, Warning, None, 0)

Evidence = tuple[Cause, str]
"""Which kind of fallback, and how it was seen."""


class FallbackDetector:
    """Watches calls on one target device.

    Args:
        dispatch_key: The target's key, ``PrivateUse1``; None (the CPU) watches nothing.
        device_type: ``lazy``: chooses the counters.
    """

    def __init__(self, dispatch_key: str | None, device_type: str = "") -> None:
        # A fallback from the CPU to the CPU does not exist.
        self._key = dispatch_key if dispatch_key not in (None, "CPU") else None
        # By thread: Python's warnings come on the thread that called.
        self._local = threading.local()
        self._hits = 0
        self._counters = counter_reader(device_type)
        self._library: torch.library.Library | None = None
        # A vendor warns once per operator and process: the first evidence counts for all later calls.
        self._known: dict[object, Evidence] = {}
        self._seen: set[object] = set()
        self._needs_probe: set[object] = set()
        self._warned_of: set[str] = set()
        self._show: Callable[..., Any] | None = None

    @property
    def active(self) -> bool:
        """Whether there is anything to watch."""
        return self._key is not None

    def start(self) -> None:
        """Put the hooks in place."""
        if self._key is None:
            return
        local = self._local

        # `cpu_fallback` sends all its tensors through this operator; `.cpu()` of a program does not use it.
        def to_cpu(tensors: list[Any]) -> list[torch.Tensor]:
            self._hits += 1  # on any thread: attention is replayed on a separate one
            return [t.cpu() if isinstance(t, torch.Tensor) else torchplatform.wrapped_number(t) for t in tensors]

        # `_showwarnmsg` is what C code calls for each warning that passed the filters; replacing it
        # leaves filters, registries and the user's own `showwarning` as they are.
        self._show = original = warnings._showwarnmsg  # type: ignore[attr-defined]

        def show(message: warnings.WarningMessage) -> None:
            caught = getattr(local, "caught", None)
            # Only this thread's call is watched: other threads' warnings are not evidence for it.
            if caught is not None:
                caught.append(str(message.message))
                if local.mute:
                    return
            original(message)

        self._patched = show
        warnings._showwarnmsg = show  # type: ignore[attr-defined]
        with self._collecting_warnings([], mute=True):  # torch warns of the override
            self._library = _override(to_cpu, self._key)

    def stop(self) -> None:
        """Take the hooks away."""
        if self._library is not None:
            destroy_library(self._library)
            self._library = None
        if self._show is not None:
            # A hook that another library has put over this one stays in place.
            if warnings._showwarnmsg is self._patched:  # type: ignore[attr-defined]
                warnings._showwarnmsg = self._show  # type: ignore[attr-defined]
            self._show = None

    @contextlib.contextmanager
    def watch(self, key: object, name: str, *, mute: bool) -> Iterator[list[Evidence]]:
        """Watch one call on the target.

        Args:
            key: Operator and dtypes, about which a vendor warns once.
            name: The operator, ``aten::fmax``.
            mute: The call is a replay: its warnings must not reach the user.

        Yields:
            A list that holds the evidence after the call, if there is any.
        """
        found: list[Evidence] = []
        # Differences before and after the call are compared, so a fallback elsewhere in the program does not count.
        hits = self._hits
        counted = self._counters() if self._counters is not None else {}
        caught: list[str] = []
        first = key not in self._seen
        self._seen.add(key)
        text = ""
        try:
            with self._collecting_warnings(caught, mute=mute):
                if first:  # capturing a descriptor costs several system calls, so only where a vendor would warn
                    # Some vendors write to the descriptor from C++, which Python's warnings never see.
                    with _stderr_captured(forward=not mute) as captured:
                        yield found
                    text = captured[0]
                else:
                    yield found
        finally:
            increases = increased(counted, self._counters()) if self._counters is not None else []
            evidence = self._evidence(name, self._hits - hits, caught, text, increases)
            # A vendor that warned once for this key is silent from now on, and still falls back.
            if evidence is not None and evidence[0] is Cause.WARNED_FALLBACK:
                self._known[key] = evidence
            else:
                if first and not mute:
                    # Torch delivers C++ warnings of the program's call after this block.
                    self._needs_probe.add(key)
                evidence = self._known.get(key) or evidence
            if evidence is not None:
                found.append(evidence)

    def needs_warning_probe(self, key: object) -> bool:
        """What `begin_warning_probe` would return."""
        return key in self._needs_probe

    def begin_warning_probe(self, key: object) -> bool:
        """Whether a call of this kind ran for the user only, so that a replay has to collect C++ code's warnings.

        The answer is True once. torch delivers such warnings when the outermost of its Python functions returns; only
        those of a replay come earlier.
        """
        if key in self._needs_probe:
            self._needs_probe.remove(key)
            return True
        return False

    @contextlib.contextmanager
    def _collecting_warnings(self, caught: list[str], *, mute: bool) -> Iterator[None]:
        """Collect this thread's warnings; if muted, all of them, whatever the user's filters are, and never raised."""
        local = self._local
        local.caught, local.mute = caught, mute
        if not mute:
            try:
                yield
            finally:
                local.caught = None
            return
        # Without `_filters_mutated`: that would let the user's own warnings show again. An "always" leaves no trace
        # in the registries. `set_warn_always`: C++ code that warns once per process must still warn in the user's call.
        filters, always = warnings.filters, torch.is_warn_always_enabled()
        filters.insert(0, _ALWAYS)  # type: ignore[attr-defined]
        # A replay must not use up a warning that comes once per process.
        torch.set_warn_always(True)
        try:
            yield
        finally:
            torch.set_warn_always(always)
            local.caught = None
            with contextlib.suppress(ValueError):
                filters.remove(_ALWAYS)  # type: ignore[attr-defined]

    def _evidence(self, op: str, hits: int, caught: list[str], text: str, increases: list[str]) -> Evidence | None:
        for message, where in (*((h, "Python warning") for h in caught), (text, "warning on stderr")):
            if _WARNING.search(message):
                name = _NAMED.search(message)
                what = (name.group(1) or name.group(2)) if name else message.strip().split("\n", 1)[0][:120]
                self._warned_of.add(_base(what))
                return Cause.WARNED_FALLBACK, f"{where}: {what} falls back to the CPU"
        # The vendor warned for this kernel under another operator's name.
        if hits and _base(op) in self._warned_of:
            return Cause.WARNED_FALLBACK, f"{op} falls back to the CPU; a warning said so once in this process"
        seen = []
        if hits:
            seen.append(f"aten::_to_cpu was called {hits} time{'s' if hits > 1 else ''} during the call")
        if increases:
            seen.append(f"the backend's own counter of {', '.join(increases[:3])} rose")
        if not seen:
            return None
        # The table alone proves nothing: a backend may handle the operator under another key.
        if torchplatform.kernel_route(op, self._key or "") == "backend fallback":
            seen.append("the dispatch table sends it to the backend's fallback")
        return Cause.SILENT_FALLBACK, "; ".join(seen)


def _base(name: str) -> str:
    """``fmax`` for ``aten::fmax.out``, ``add`` for ``aten::add_.Tensor``: vendors warn of the kernel, often another."""
    base = name.removeprefix("aten::").partition(".")[0]
    return base if base.endswith("__") else base.removesuffix("_")


def _override(to_cpu: Callable[[list[Any]], list[torch.Tensor]], key: str) -> torch.library.Library | None:
    """Take over `aten::_to_cpu` for a device's key, and for calls without any tensor of the device."""
    # The latter reach the kernel for all keys: an operator without tensor inputs moves an empty list.
    torchplatform.prepare_wrapped_numbers()
    # Seen on a device in C++ (104 times in four models), dlprim and lazy: their fallbacks call it, and `.cpu()` does
    # not.
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        for k in (key, "CompositeImplicitAutograd"):
            # torch 2.11 overrides a Python kernel only with `allow_override`; 2.13 does so by default.
            # Factories have no tensor, so their call reaches the composite key.
            library.impl("_to_cpu", to_cpu, k, allow_override=True)  # type: ignore[no-untyped-call]
    except RuntimeError:
        destroy_library(library)
        return None
    return library


@contextlib.contextmanager
def _stderr_captured(*, forward: bool) -> Iterator[list[str]]:
    """Capture what native code writes to file descriptor 2 during one call, and forward it afterwards."""
    captured = [""]
    with contextlib.ExitStack() as stack:
        saved = -1
        with contextlib.suppress(OSError):  # no descriptor 2, or no room for a file: this evidence is missing
            sink = stack.enter_context(tempfile.TemporaryFile())
            saved = os.dup(2)
        if saved < 0:
            yield captured
            return
        # A file and no pipe: a long text would fill a pipe that no one reads, and block the call.
        os.dup2(sink.fileno(), 2)
        try:
            yield captured
        finally:
            os.dup2(saved, 2)
            os.close(saved)
            sink.seek(0)
            data = sink.read()
            if data:
                captured[0] = data.decode(errors="replace")
                if forward or not _WARNING.search(captured[0]):
                    # Other text of a replay is passed on: it may not come a second time.
                    os.write(2, data)
