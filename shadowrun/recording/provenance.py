"""Provenance of a recording: digests of all that a program's results follow from but the machine.

Two recordings whose provenances are equal ran the same program on the same data; what differs then is the platform's.
"""

from __future__ import annotations

import hashlib
import sys
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.platforms.device import resolve
from shadowrun.platforms.fingerprint import versions
from shadowrun.recording.digests.pending_digests import packed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import nn

    from shadowrun.recording.digests.pending_digests import PendingDigest
    from shadowrun.recording.digests.tensor_digest import Packed

__all__ = ["Provenance", "at_start"]

_MAX_INPUTS: Final = 256
_MAX_TEXT: Final = 500
_SHOWN: Final = 16  # digits of a digest


def at_start() -> dict[str, str]:
    """What is known before the program's first call: script, arguments, versions."""
    # Without the path of the script, which differs between machines; its content comes next.
    found = {"argv": _text("\0".join(sys.argv[1:]))}
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is not None and Path(script).is_file():
        found["script"] = hashlib.sha256(Path(script).read_bytes()).hexdigest()[:_SHOWN]
    known = versions()
    # With a prefix: another version is no other program, and `diff` reports it apart.
    found |= {f"version:{name}": known[name] for name in ("numpy", "python", "torch")}
    return found


class Provenance:
    """Names and digests of the tensors that the program brought, and of the states of generators.

    Attributes:
        changed: Whether there are new ones since this was last set to False.
    """

    def __init__(self) -> None:
        self._digests: dict[str, str] = {}
        self.changed = False
        # Digests of leaves, in their order, by name; None for those whose hashes are one.
        self._waiting: list[tuple[str | None, Packed | PendingDigest | None]] = []
        self._names: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}
        self._seen: set[int] = set()
        self._drawn_from: set[torch.device] = set()
        self._n_inputs = 0
        self._more = hashlib.sha256()

    def add(
        self,
        t: torch.Tensor,
        digest: Packed | PendingDigest | None,
        modules: Iterable[tuple[str, nn.Module]],
        *,
        only_named: bool = False,
    ) -> None:
        """Note a leaf.

        Args:
            t: The leaf.
            digest: Of its values; None where it has none.
            modules: All modules that the program called, with their paths.
            only_named: It counts if it is a parameter or buffer: any other may be a result that was not recorded.
        """
        name = self._name(t, modules)
        if only_named and not name:
            return
        if not name and self._n_inputs < _MAX_INPUTS:
            name = f"input:{self._n_inputs}"
            self._n_inputs += 1
        if not name:  # a program of many steps brings a batch in each
            self._waiting.append((None, digest))
        elif name not in self._digests:
            self._digests[name] = ""
            self._waiting.append((name, digest))
        self.changed = True

    @property
    def digests(self) -> dict[str, str]:
        """By name; waits for those of an accelerator."""
        waiting, self._waiting = self._waiting, []
        for name, digest in waiting:
            try:
                known = packed(digest)
            except RuntimeError:  # the device failed
                known = None
            # Rung 0 of the ladder: a hash of all bits.
            value = "" if known is None else f"{int.from_bytes(known[1][:8], sys.byteorder):016x}"
            if name is not None:
                self._digests[name] = value
            else:
                self._more.update(value.encode())
                self._digests["input:more"] = self._more.hexdigest()[:_SHOWN]
        return self._digests

    def has_draw(self, device: torch.device) -> bool:
        """Whether `add_draw` was called for a device."""
        return device in self._drawn_from

    def add_draw(self, device: torch.device) -> None:
        """Note the state of a device's default generator before the first draw from it.

        Not at the start: a program seeds its generators itself, and one that draws nothing depends on no state.
        """
        if device in self._drawn_from:
            return
        self._drawn_from.add(device)
        platform = resolve(str(device))
        # Torch seeds its default generator at random in each process: at the start, the states of any two recordings
        # differ.
        name, state = f"generator:{platform.device}", platform.rng_state()
        # `cuda` and `cuda:0` are one device.
        if state is not None and name not in self._digests:
            self._digests[name] = hashlib.sha256(state.numpy().tobytes()).hexdigest()[:_SHOWN]
            self.changed = True

    def add_placement(self, t: torch.Tensor, text: str, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Note mesh and placements of a DTensor: by name of parameters, and those that there are of all others."""
        name = self._name(t, modules) if isinstance(t, torch.nn.Parameter) else ""
        key = f"placement:{name or 'input'}"
        known = self._digests.get(key)
        if name or known is None:
            self.changed |= known != text
            self._digests[key] = text
        elif text not in known.split("; ") and len(known) < _MAX_TEXT:
            self._digests[key] = "; ".join(sorted([*known.split("; "), text]))
            self.changed = True

    def _name(self, t: torch.Tensor, modules: Iterable[tuple[str, nn.Module]]) -> str:
        """``parameter:`` or ``buffer:`` with the name, empty for any other tensor."""
        if id(t) not in self._names:
            self._look_at(modules)
        known = self._names.get(id(t))
        # An id may belong to a new tensor at the address of an old one: the weak reference decides.
        return known[1] if known is not None and known[0]() is t else ""

    def _look_at(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        """Name the parameters and buffers of modules that were not there before."""
        for path, module in modules:
            if id(module) in self._seen:
                continue
            self._seen.add(id(module))
            prefix = f"{path}." if path else ""
            kinds: tuple[tuple[str, Any], ...] = (
                ("parameter", module.named_parameters(recurse=False)),
                ("buffer", module.named_buffers(recurse=False)),
            )
            for kind, tensors in kinds:
                for name, t in tensors:
                    # A tied weight has several names, and keeps the first.
                    self._names.setdefault(id(t), (weakref.ref(t), f"{kind}:{prefix}{name}"))


def _text(text: str) -> str:
    # Arguments of a command line need not be UTF-8.
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:_SHOWN]
