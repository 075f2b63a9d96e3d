"""Deletes private names of torch, each in a forked process of its own, and prints what a comparison there does.

``python -m tests.intercept.without_names PLATFORM NAME …`` writes one line of JSON for each name: what became of it.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import warnings
from typing import Any

import torch

USED = (
    "decimal",
    "fractions",
    "importlib.metadata",
    "numpy.typing",
    "secrets",
    "shlex",
    "sqlite3",
    "statistics",
    "tomllib",
)


def found(path: str) -> Any:
    top, *names = path.split(".")
    value: Any = sys.modules[top]
    for i, name in enumerate(names, 2):
        inner = getattr(value, name, None)
        value = importlib.import_module(".".join([top, *names][:i])) if inner is None else inner
    return value


def delete(path: str) -> bool:
    """Whether there was such a name that can be deleted (those of C types, and settings, cannot)."""
    owner, _, name = path.rpartition(".")
    of = found(owner)
    try:
        delattr(of, name)
    except (AttributeError, TypeError, KeyError):  # KeyError: of a module of settings
        return False
    return not hasattr(of, name)


def program(device: str) -> float:
    x = torch.arange(12.0, device=device).reshape(3, 4).requires_grad_()
    y = (x @ x.t()).relu().mul(2).add_(1)
    torch.cat([y, torch.rand(3, 3, device=device)]).sum().backward()
    with torch.inference_mode():
        return float(torch.nn.functional.linear(x, x).sum()) + float(x.grad.sum())


def opaque(module: Any, _inputs: Any) -> Any:
    """A backend of torch.compile, of whose code torch sees nothing."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    def run(module: Any, _inputs: Any) -> Any:
        def call(*args: Any) -> Any:
            with torch.utils._python_dispatch._disable_current_modes():
                return module(*args)

        return make_boxed_func(call)

    return aot_autograd(fw_compiler=run, bw_compiler=run)(module, _inputs)


def compiled_program() -> None:
    """Forward and backward of a compiled function with a break of its graph."""

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = x.sum() + 1
        torch._dynamo.graph_break()
        return torch.tanh(x * scale)

    x = torch.linspace(0.1, 0.5, 6).requires_grad_()
    torch.compile(function, backend=opaque)(x).sum().backward()


def outcome(path: str, platform: str) -> dict[str, object]:
    compiled = platform == "compiled"
    owner, _, name = path.rpartition(".")
    value = vars(found(owner)).get(name)
    if not delete(path):
        return {"name": path, "deleted": False}
    outcome: dict[str, object] = {"name": path, "deleted": True}
    try:
        import shadowrun
        from shadowrun import native, torch_versions

        torch.__version__ = "2.99.0"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if compiled:
                importlib.import_module("shadowrun.compiled.regions.compare_regions")
                setattr(found(owner), name, value)  # torch itself needs it
                platform = "cpu[threads=1]"
            run = shadowrun.compare(platform, ref="cpu", compiled=compiled)
            shadowrun.compare(platform, ref="cpu", compiled=compiled)
            with run:
                compiled_program() if compiled else program(platform.partition("[")[0])
        outcome |= {
            "statuses": sorted({r.verdict.status.value for r in run.records()}),
            "failures": [str(f) for f in run.internal_failures()],
            "warned": [str(w.message) for w in caught if issubclass(w.category, shadowrun.ShadowrunWarning)],
            "off": torch_versions.switched_off(),
            "native": native.state(),
        }
    except Exception as error:
        outcome |= {"error": type(error).__name__, "slug": getattr(error, "slug", ""), "message": str(error)}
    return outcome


def main() -> None:
    platform, *paths = sys.argv[1:]
    # Once for all of them: modules that shadowrun imports, but none of its own, which ask for the name that is deleted.
    also = ("torch._dynamo", "torch._inductor.compile_fx") if platform == "compiled" else ()
    for module in (*USED, *also):
        importlib.import_module(module)
    gc.disable()  # half of the time of an import
    for path in paths:
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            print(json.dumps(outcome(path, platform)), flush=True)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        if status:
            print(json.dumps({"name": path, "deleted": True, "status": status}), flush=True)


if __name__ == "__main__":
    main()
