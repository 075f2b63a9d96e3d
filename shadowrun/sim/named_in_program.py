"""Whether a program names the simulated device.

torch counts a renamed private-use device among its accelerators: `torch.accelerator`, `torch.Event`, `torch.device(0)`
and pinned memory then belong to it until the process ends. A program on the CPU that is only compared with the
simulated device must not see that, so the device gets its name only where the program's source asks for it.
"""

from __future__ import annotations

import ast
import linecache
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["is_named_by_callers", "is_named_in_arguments", "is_named_in_source"]

_OWN_FOLDER = str(Path(__file__).parent.parent)
# Functions whose arguments are platforms or plain text, not devices of torch.
_NOT_DEVICE_CALLS = frozenset(
    {"compare", "compile_check", "TrainerCallback", "Callback", "resolve", "parse", "hasattr", "getattr", "print"}
)
_PLATFORMS = ("target", "ref")
_MAX_FRAMES = 100


def is_named_by_callers(name: str) -> bool:
    """Whether the source of a function that is being called, or the rest of its file, names the device."""
    files = set()
    frame = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        files.add(frame.f_code.co_filename)
        if frame.f_back is None:
            break
        frame = frame.f_back
    return any(is_named_in_source("".join(linecache.getlines(file)), name) for file in files if not _is_library(file))


def is_named_in_arguments(arguments: Iterable[str], name: str) -> bool:
    """Whether arguments of a command line name the device: ``--device sim``, ``device=sim:0``."""
    return any(re.search(rf"(?:^|[=,:]){re.escape(name)}(?::\d+)?(?:$|,)", argument) for argument in arguments)


def is_named_in_source(source: str, name: str) -> bool:
    """Whether Python code names the device where a device is meant.

    As an argument (``x.to("sim")``), as the value of what is called a device (``DEVICE = "sim"``), or as an attribute
    (``torch.sim``, ``x.sim()``); not as a platform (``compare("sim")``).
    """
    # Most files do not have the name at all, and need no parsing.
    if not re.search(rf"""["']{re.escape(name)}["':]|\.{re.escape(name)}\b""", source):
        return False
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):  # IPython's own syntax, say
        return True
    return any(_names(node, name) for node in ast.walk(tree))


def _names(node: ast.AST, name: str) -> bool:
    match node:
        # `shadowrun.sim` is this package's module, and no device.
        case ast.Attribute(value=ast.Name("shadowrun")):
            return False
        case ast.Attribute(attr=attribute):
            return attribute == name
        case ast.Call():
            return _in_call(node, name)
        case ast.Assign(targets=targets, value=value):
            return any(_is_device(t) for t in targets) and _has(value, name)
        case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.For(target=target, iter=value):
            # `for device in ("cpu", "sim")` names it as an assignment does.
            return _is_device(target) and _has(value, name)
        case ast.arguments():
            places = [*node.posonlyargs, *node.args]
            pairs = [*zip(places[len(places) - len(node.defaults) :], node.defaults, strict=True)]
            pairs += [(a, d) for a, d in zip(node.kwonlyargs, node.kw_defaults, strict=True) if d is not None]
            return any(_is_device(a) and _has(d, name) for a, d in pairs)
        case ast.Dict(keys=keys, values=values):
            return any(k is not None and _is_device(k) and _has(v, name) for k, v in zip(keys, values, strict=True))
    return False


def _in_call(call: ast.Call, name: str) -> bool:
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    # `compare("sim")` names a platform: the program itself stays on the CPU.
    if function in _NOT_DEVICE_CALLS:
        return False
    # `add_argument("--device", default="sim")` names it; of `--platform` it may be the target of a comparison.
    if function == "add_argument" and not any(_is_device(a) for a in call.args):
        return False
    given = [*call.args, *(k.value for k in call.keywords if k.arg not in _PLATFORMS)]
    return any(_has(value, name) for value in given)


def _is_device(node: ast.AST) -> bool:
    """Whether a name, an argument or a text is called a device: ``device``, ``self.dev``, ``--device``."""
    words = (getattr(node, part, None) for part in ("id", "attr", "arg", "value"))
    return any(isinstance(word, str) and "dev" in word.lower() for word in words)


def _has(value: ast.AST, name: str) -> bool:
    return any(isinstance(c, ast.Constant) and _is_name(c.value, name) for c in _outside_calls(value))


def _outside_calls(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of an expression, but for those of calls, which are looked at by themselves, and of comparisons."""
    if isinstance(node, (ast.Call, ast.Compare, ast.Lambda)):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        yield from _outside_calls(child)


def _is_name(value: object, name: str) -> bool:
    return isinstance(value, str) and (value == name or value.startswith(f"{name}:"))


def _is_library(file: str) -> bool:
    return file.startswith((_OWN_FOLDER, "<frozen")) or "site-packages" in file
