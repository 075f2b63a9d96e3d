"""Witnesses of silent CPU fallback: none of them needs the backend's cooperation.

1. `aten::_to_cpu`: PyTorch's `cpu_fallback` sends all its tensor inputs through this operator, also where there are
   none (`tril_indices`). Overridden, it counts; a plain ``.cpu()`` does not go through it.
2. Warnings: as Python warnings, and on file descriptor 2 only, where torch_npu writes its own.
   Vendors warn once per operator and process, so an operator that warned once counts from then on.
   What C++ code warns of in the user's own call comes only when torch's outermost function returns, after the watch:
   the first call of each kind is run once more to hear it (`to_be_heard`).
3. Counters that the backend keeps (XLA, lazy): one named after the operator rises.
4. The result lies on another device (seen by the replayer, not here).

The dispatch table is asked too, but only to confirm: alone it is unreliable.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import threading
import warnings
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.platforms import torchplatform
from shadowrun.platforms.counters import counter_reader, risen
from shadowrun.types import Cause

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = ["Evidence", "FallbackWitness"]

_WARNING = re.compile(
    r"(?:fall(?:ing|s)?[ -]?back(?:s|ed)? (?:to|on)\b.*\bCPU|fallback from \w+ to CPU|will be executed on CPU)",
    re.IGNORECASE | re.DOTALL,
)
_NAMED = re.compile(r"'((?:aten::)?\w+(?:\.\w+)?)'|\b(aten::\w+(?:\.\w+)?)")

_HEAR_ALL = ("always", None, Warning, None, 0)

Evidence = tuple[Cause, str]
"""Which kind of fallback, and how it was seen."""


class FallbackWitness:
    """Watches calls on one target device.

    Args:
        dispatch_key: The target's key, ``PrivateUse1``; None (the CPU) watches nothing.
        device_type: ``lazy``: chooses the counters.
    """

    def __init__(self, dispatch_key: str | None, device_type: str = "") -> None:
        self._key = dispatch_key if dispatch_key not in (None, "CPU") else None
        self._local = threading.local()
        self._hits = 0
        self._counters = counter_reader(device_type)
        self._library: torch.library.Library | None = None
        self._known: dict[object, Evidence] = {}
        self._seen: set[object] = set()
        self._unheard: set[object] = set()
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

        def to_cpu(tensors: list[Any]) -> list[torch.Tensor]:
            self._hits += 1  # on whatever thread: attention is replayed on one of its own
            return [t.cpu() if isinstance(t, torch.Tensor) else torchplatform.wrapped_number(t) for t in tensors]

        # `_showwarnmsg` is what C code calls for each warning that passed the filters; replacing it
        # leaves filters, registries and the user's own `showwarning` as they are.
        self._show = original = warnings._showwarnmsg  # type: ignore[attr-defined]

        def show(message: warnings.WarningMessage) -> None:
            heard = getattr(local, "heard", None)
            if heard is not None:
                heard.append(str(message.message))
                if local.mute:
                    return
            original(message)

        self._patched = show
        warnings._showwarnmsg = show  # type: ignore[attr-defined]
        with self._listening([], mute=True):  # torch warns of the override
            self._library = _override(to_cpu, self._key)

    def stop(self) -> None:
        """Take the hooks away."""
        if self._library is not None:
            self._library._destroy()  # type: ignore[no-untyped-call]
            self._library = None
        if self._show is not None:
            if warnings._showwarnmsg is self._patched:  # type: ignore[attr-defined]
                warnings._showwarnmsg = self._show  # type: ignore[attr-defined]
            self._show = None

    @contextlib.contextmanager
    def watch(self, key: object, name: str, *, mute: bool) -> Iterator[list[Evidence]]:
        """Watch one call on the target.

        Args:
            key: Operator and dtypes: what a vendor warns about once.
            name: The operator, ``aten::fmax``.
            mute: The call is a replay of ours: its warnings are not the user's.

        Yields:
            A list that holds the evidence after the call, if there is any.
        """
        found: list[Evidence] = []
        hits = self._hits
        counted = self._counters() if self._counters is not None else {}
        heard: list[str] = []
        first = key not in self._seen
        self._seen.add(key)
        text = ""
        try:
            with self._listening(heard, mute=mute):
                if first:
                    with _stderr_captured(forward=not mute) as captured:
                        yield found
                    text = captured[0]
                else:
                    yield found
        finally:
            rose = risen(counted, self._counters()) if self._counters is not None else []
            evidence = self._evidence(name, self._hits - hits, heard, text, rose)
            if evidence is not None and evidence[0] is Cause.WARNED_FALLBACK:
                self._known[key] = evidence
            else:
                if first and not mute:
                    self._unheard.add(key)
                evidence = self._known.get(key) or evidence
            if evidence is not None:
                found.append(evidence)

    def is_unheard(self, key: object) -> bool:
        """What `to_be_heard` is going to say."""
        return key in self._unheard

    def to_be_heard(self, key: object) -> bool:
        """Whether a call of this kind ran for the user only, and has to be run once more to hear C++ code's warnings.

        Torch collects them until the outermost of its Python functions returns; only those of a replay come before.
        """
        if key in self._unheard:
            self._unheard.remove(key)
            return True
        return False

    @contextlib.contextmanager
    def _listening(self, heard: list[str], *, mute: bool) -> Iterator[None]:
        """Collect this thread's warnings; muted, they are heard whatever the user's filters say, and never raised."""
        local = self._local
        local.heard, local.mute = heard, mute
        if not mute:
            try:
                yield
            finally:
                local.heard = None
            return
        # Without `_filters_mutated`: that would let the user's own warnings show again. An "always" leaves no trace
        # in the registries. Nor may C++ code think that it has given its one warning of the process.
        filters, always = warnings.filters, torch.is_warn_always_enabled()
        filters.insert(0, _HEAR_ALL)  # type: ignore[attr-defined]
        torch.set_warn_always(True)
        try:
            yield
        finally:
            torch.set_warn_always(always)
            local.heard = None
            with contextlib.suppress(ValueError):
                filters.remove(_HEAR_ALL)  # type: ignore[attr-defined]

    def _evidence(self, op: str, hits: int, heard: list[str], text: str, rose: list[str]) -> Evidence | None:
        for message, where in (*((h, "Python warning") for h in heard), (text, "warning on stderr")):
            if _WARNING.search(message):
                name = _NAMED.search(message)
                what = (name.group(1) or name.group(2)) if name else message.strip().split("\n", 1)[0][:120]
                self._warned_of.add(_base(what))
                return Cause.WARNED_FALLBACK, f"{where}: {what} falls back to the CPU"
        if hits and _base(op) in self._warned_of:
            return Cause.WARNED_FALLBACK, f"{op} falls back to the CPU; a warning said so once in this process"
        seen = []
        if hits:
            seen.append(f"aten::_to_cpu was called {hits} time{'s' if hits > 1 else ''} during the call")
        if rose:
            seen.append(f"the backend's own counter of {', '.join(rose[:3])} rose")
        if not seen:
            return None
        if torchplatform.kernel_route(op, self._key or "") == "backend fallback":
            seen.append("the dispatch table sends it to the backend's fallback")
        return Cause.SILENT_FALLBACK, "; ".join(seen)


def _base(name: str) -> str:
    """``fmax`` for ``aten::fmax.out``, ``add`` for ``aten::add_.Tensor``: vendors warn of the kernel, often another."""
    base = name.removeprefix("aten::").partition(".")[0]
    return base if base.endswith("__") else base.removesuffix("_")


def _override(to_cpu: Callable[[list[Any]], list[torch.Tensor]], key: str) -> torch.library.Library | None:
    """Take over `aten::_to_cpu` for a device's key, and for calls without any tensor of the device.

    Those reach the operator's own kernel for all keys: an operator without tensor inputs asks for none to be moved.
    """
    torchplatform.prepare_wrapped_numbers()
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        for k in (key, "CompositeImplicitAutograd"):
            # Torch 2.11 refuses to put aside a kernel in Python unless it is told to; 2.13 does by default.
            library.impl("_to_cpu", to_cpu, k, allow_override=True)  # type: ignore[no-untyped-call]
    except RuntimeError:
        library._destroy()  # type: ignore[no-untyped-call]
        return None
    return library


@contextlib.contextmanager
def _stderr_captured(*, forward: bool) -> Iterator[list[str]]:
    """Catch what native code writes to file descriptor 2 during one call, and pass it on afterwards."""
    captured = [""]
    with contextlib.ExitStack() as stack:
        saved = -1
        with contextlib.suppress(OSError):  # no descriptor 2, or no room for a file: a witness less
            sink = stack.enter_context(tempfile.TemporaryFile())
            saved = os.dup(2)
        if saved < 0:
            yield captured
            return
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
                    os.write(2, data)
