"""Private torch APIs of torch.compile, seen on 2.11 and 2.13.

What Dynamo takes for `nn.Module.__call__`, Inductor's threads, and when code runs that Inductor has generated.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
from typing import TYPE_CHECKING, Any, Final

from shadowrun.intercept.user_call import on_one_line
from shadowrun.torch_versions import need

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import CodeType, ModuleType

__all__ = [
    "GeneratedCode",
    "compiling_threads",
    "drop_frames_of",
    "replace_module_call",
    "restore_module_call",
    "skip_compilation_of",
]


def skip_compilation_of(module: str) -> None:
    """Keep Dynamo from compiling shadowrun's handlers when the program runs eagerly under a compile callback."""
    need("torch._dynamo.trace_rules.add")
    from torch._dynamo import trace_rules

    trace_rules.add(module)


def replace_module_call(wrapper: Any, original: Any) -> None:
    """Have Dynamo take a wrapper of `nn.Module.__call__` for the original, from which it makes the same graphs.

    Seen on 2.11 and 2.13. Dynamo reduces a module without hooks to its `forward` if `__call__` is torch's own. It
    compiles any other `__call__`, and must not compile code of shadowrun: without this, each module inside a compiled
    one breaks the graph, and `fullgraph=True` raises.
    """
    code = original.__code__
    # One frame of shadowrun is left in tracebacks; it looks like the original's.
    line = max((line for _, _, line in code.co_lines() if line is not None), default=code.co_firstlineno)
    wrapper.__code__ = on_one_line(wrapper.__code__, code.co_name).replace(
        co_filename=code.co_filename, co_firstlineno=line
    )
    _replace_in_dynamo(original, wrapper)


def drop_frames_of(error: BaseException, code: CodeType) -> None:
    """Remove the frames of a code object from an exception's traceback, but for the first, which still runs."""
    entry = error.__traceback__
    while entry is not None:
        if entry.tb_next is not None and entry.tb_next.tb_frame.f_code is code:
            entry.tb_next = entry.tb_next.tb_next
        else:
            entry = entry.tb_next


def restore_module_call(wrapper: Any, original: Any) -> None:
    """Undo `replace_module_call`, also if Dynamo was loaded in between and took the wrapper for torch's own."""
    _replace_in_dynamo(wrapper, original)


def _replace_in_dynamo(before: Any, after: Any) -> None:
    for name in ("torch._dynamo.utils", "torch._dynamo.variables.nn_module"):
        module = sys.modules.get(name)
        if getattr(module, "unpatched_nn_module_call", None) is before:
            setattr(module, "unpatched_nn_module_call", after)  # noqa: B010 - mypy knows no such name


def compiling_threads() -> set[threading.Thread]:
    """Threads in which Inductor compiles. They stay alive, and call no operators of the program.

    Seen on 2.11 and 2.13. Without ``AsyncCompile.pool`` they are reported like other threads that ran before.
    """
    compiler = getattr(sys.modules.get("torch._inductor.async_compile"), "AsyncCompile", None)
    pool = getattr(compiler, "pool", None)
    made = getattr(pool, "cache_info", None)
    # To ask for the pool would start its threads in a program that compiles nothing.
    if pool is None or made is None or not made().currsize:
        return set()
    return set(getattr(pool(), "_threads", ()))


# Code that Inductor has generated: its kernels write to memory, and no operator is called. A recording replaces the
# `__call__` of the classes of compiled code. Without them, it counts as running once Inductor has been imported.

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
