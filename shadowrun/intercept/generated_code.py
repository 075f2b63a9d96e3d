"""When code runs that Inductor has generated: its kernels write to memory, and no operator is called.

Private APIs of torch, seen on 2.11 and 2.13: the classes of compiled code; a recording replaces their `__call__`.
Without them, it counts as running from when Inductor has been imported on.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

__all__ = ["GeneratedCode"]

# Classes of generated code by their modules, which `import torch` does not import.
_CALLED: Final = {
    "torch._inductor.output_code": ("CompiledFxGraph", "CompiledAOTI"),
    "torch.export.pt2_archive._package": ("AOTICompiledModel",),  # of `torch._inductor.aoti_load_package`
}

_NEEDED: Final = "torch._inductor.output_code", "CompiledFxGraph"


class GeneratedCode:
    """Follows generated code from `start` to `stop`.

    Args:
        enter: Called before the code runs, with its arguments.
        leave: Called after it, with what it returned; None where it raised. Not called where it is unknown when the
            code ends.
    """

    def __init__(self, enter: Callable[[Sequence[Any]], None], leave: Callable[[Any], None]) -> None:
        self._enter, self._leave = enter, leave
        self._replaced: list[tuple[Any, Any, Any]] = []
        self._finder = _Finder(self._replace)

    def start(self) -> None:
        """Begin, also for modules that are imported later."""
        for name in _CALLED:
            if name in sys.modules:
                self._replace(sys.modules[name])
        # Before all others: the first finder that answers decides.
        sys.meta_path.insert(0, self._finder)

    def stop(self) -> None:
        """Restore everything, unless other code has replaced it since."""
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
        for owner, original, replacement in self._replaced:
            if owner.__dict__.get("__call__") is replacement:
                owner.__call__ = original
        self._replaced.clear()

    def _replace(self, module: ModuleType) -> None:
        for name in _CALLED[module.__name__]:
            owner = getattr(module, name, None)
            original = None if owner is None else owner.__dict__.get("__call__")
            if owner is not None and original is not None:
                replacement = self._replacement(original)
                self._replaced.append((owner, original, replacement))
                owner.__call__ = replacement
            elif (module.__name__, name) == _NEEDED:
                self._enter(())

    def _replacement(self, original: Any) -> Any:
        enter, leave = self._enter, self._leave

        @functools.wraps(original)
        def call(code: Any, *args: Any, **kwargs: Any) -> Any:
            # The code empties the list of its arguments, so that their memory can be used again: nothing is held here.
            enter((*args, *kwargs.values()))
            out = None
            try:
                out = original(code, *args, **kwargs)
            finally:
                leave(out)
            return out

        return call


class _Finder:
    """Has a function called with a module of `_CALLED` when that has been imported."""

    def __init__(self, imported: Callable[[ModuleType], None]) -> None:
        self._imported = imported
        self._finding = False

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        """The module's own spec, with a loader that calls the function."""
        if name not in _CALLED or self._finding:
            return None
        self._finding = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._finding = False
        execute = None if spec is None else getattr(spec.loader, "exec_module", None)
        if spec is not None and execute is not None:
            spec.loader.exec_module = functools.partial(self._execute, execute)  # type: ignore[union-attr, method-assign]
        return spec

    def _execute(self, execute: Callable[[ModuleType], None], module: ModuleType) -> None:
        # The loader may load the module again (`importlib.reload`), after the comparison.
        vars(module.__loader__).pop("exec_module", None)
        execute(module)
        self._imported(module)
