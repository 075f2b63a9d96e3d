"""The text of a script that runs a graph compiled and eagerly: plain torch, from these pieces."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.repro.quoting import in_docstring, literal, quoted

if TYPE_CHECKING:
    from torch import fx

    from shadowrun.compiled.how import How

__all__ = ["Script", "write"]

_BODY: Final = '''
SAVED = torch.load(Path(__file__).with_name("inputs.pt"), weights_only=True)


def run(function):
    """Results on copies of the inputs, and the inputs that the graph may write to."""
    inputs = copy.deepcopy(SAVED["inputs"])
    with torch.no_grad():
        return [*function(*inputs), *(inputs[k] for k in {written!r})]


'''
_COMPARE: Final = '''
def differs(number, actual, expected, allowed):
    """Print how a compiled result differs from eager's; whether by more than rounding explains."""
    if not isinstance(expected, torch.Tensor):
        return False
    if (actual.dtype, actual.shape) != (expected.dtype, expected.shape):
        print(f"result {number}: {actual.dtype} {tuple(actual.shape)}, eager {expected.dtype} {tuple(expected.shape)}")
        return True
    a, e = (torch.view_as_real(t.cpu()) if t.is_complex() else t.cpu() for t in (actual, expected))
    a, e = a.double(), e.double()
    allowed = allowed.reshape(a.shape) if isinstance(allowed, torch.Tensor) else torch.tensor(allowed)
    same = (a == e) | (a.isnan() & e.isnan()) | ((a - e).abs() <= allowed) | (allowed == float("inf"))
    for index in (~same).nonzero().tolist()[:3]:
        i = tuple(index)
        print(f"result {number} {index}: {a[i].item():.9g} compiled, {e[i].item():.9g} eagerly")
    print(f"result {number}: {int((~same).sum())} of {same.numel()} elements differ by more than rounding explains")
    return not bool(same.all())


expected = run(graph)
actual = run(compiled)
checks = enumerate(zip(actual, expected, SAVED["allowed"], strict=True))
sys.exit(1 if any([differs(k, *values) for k, values in checks]) else 0)
'''
_RAISES: Final = """
run(graph)
try:
    run(compiled)
except Exception as error:
    error = getattr(error, "inner_exception", None) or error
    print(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
    sys.exit(1)
print("it compiles and runs")
"""


@dataclass(frozen=True, slots=True)
class Script:
    """What a script is to do.

    Attributes:
        title: The finding in one line.
        story: Where it was seen; lines.
        module: The graph; its constants are inputs.
        how: How it is to be compiled.
        written: Positions of the inputs that the graph writes to.
        raises: It fails, rather than deviates.
    """

    title: str
    story: list[str]
    module: fx.GraphModule
    how: How
    written: tuple[int, ...] = ()
    raises: bool = False

    def versions(self) -> str:
        """The file of versions, JSON."""
        found = {"python": platform.python_version(), "torch": torch.__version__}
        for top in {self.how.module.partition(".")[0]} - {"", "torch"}:
            for name in importlib.metadata.packages_distributions().get(top, ()):
                found[name] = importlib.metadata.version(name)
        return json.dumps({"versions": found, "platform": platform.platform()}, indent=1) + "\n"


def write(script: Script) -> str:
    """The text of a script."""
    how = script.how
    lines = [f'"""{in_docstring(script.title)}', "", *map(in_docstring, script.story), '"""', ""]
    lines += ["import copy", "import sys", "from pathlib import Path", "", "import torch"]
    imported = how.module if how.module.partition(".")[0] != "torch" else ""
    if not how.is_function:
        lines += ["", f"import {imported}  # registers the backend"] if imported else []
    else:
        lines += ["", f"from {how.module} import {how.name} as backend"]
    code = script.module.graph.python_code("self")
    used = set(re.findall(r"\b[A-Za-z_]\w*", code.src))
    lines += [f"from math import {n}" for n in ("inf", "nan") if n in used]
    lines += ["from torch import device"] if "device" in used else []
    lines += [f"import {n}" for n in ("math", "operator") if n in used]
    body = _BODY.replace("{written!r}", repr(tuple(map(int, script.written))))
    if not script.written:
        body = body.replace("[*function(*inputs), *(inputs[k] for k in ())]", "list(function(*inputs))")
        body = body.replace(", and the inputs that the graph may write to.", ".")
    text = "\n".join(lines) + "\n" + body + _function(code.src) + "\n\n"
    backend = "backend" if how.is_function else quoted(how.name)
    given = [f"backend={backend}", "fullgraph=True"]
    given += [f"mode={quoted(how.mode)}"] if how.mode else []
    given += [f"options={_options(how.options)}"] if how.options and not how.mode else []  # torch takes one of both
    given += [f"dynamic={literal(how.dynamic)}"] if how.dynamic is not None else []
    return text + f"compiled = torch.compile(graph, {', '.join(given)})\n\n" + (_RAISES if script.raises else _COMPARE)


def _options(value: Any) -> str:
    """The options of a backend as code."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{quoted(k)}: {_options(v)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_options, value))}]"
    return literal(value)


def _function(source: str) -> str:
    """The graph as a function: `forward` without its object and without what only frees memory."""
    source = re.sub(r";  (?:\w+ = )+None[^\n]*", "", source)
    source = re.sub(r"def forward\(self(?:, )?", "def graph(", source)
    return "\n".join(line for line in source.strip().splitlines() if line.strip()) + "\n"
