"""Private torch APIs of torch.compile: what Dynamo takes for `nn.Module.__call__`, and Inductor's threads."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from shadowrun.intercept.user_call import on_one_line
from shadowrun.torch_versions import need

if TYPE_CHECKING:
    import threading
    from types import CodeType

__all__ = [
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
