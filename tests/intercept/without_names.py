"""Deletes private names of torch, each in a forked process of its own, and tells what a comparison there does.

``python -m tests.intercept.without_names PLATFORM NAME …`` writes one line of JSON for each name: what became of it.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings

import torch


def delete(path: str) -> bool:
    """Whether there was such a name that can be deleted (those of C types cannot)."""
    *owners, name = path.split(".")
    found = sys.modules[owners[0]]
    for i, owner in enumerate(owners[1:], 2):
        inner = getattr(found, owner, None)
        found = importlib.import_module(".".join(owners[:i])) if inner is None else inner
    try:
        delattr(found, name)
    except (AttributeError, TypeError):
        return False
    return not hasattr(found, name)


def program(device: str) -> float:
    x = torch.arange(12.0, device=device).reshape(3, 4).requires_grad_()
    y = (x @ x.t()).relu().mul(2).add_(1)
    torch.cat([y, torch.rand(3, 3, device=device)]).sum().backward()
    with torch.inference_mode():
        return float(torch.nn.functional.linear(x, x).sum()) + float(x.grad.sum())


def outcome(path: str, platform: str) -> dict[str, object]:
    if not delete(path):
        return {"name": path, "deleted": False}
    told: dict[str, object] = {"name": path, "deleted": True}
    try:
        import shadowrun
        from shadowrun import native
        from shadowrun.platforms import torchnames

        torch.__version__ = "2.99.0"
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run = shadowrun.compare(platform, ref="cpu")
            shadowrun.compare(platform, ref="cpu")
            with run:
                program(platform.partition("[")[0])
        told |= {
            "statuses": sorted({r.verdict.status.value for r in run.records()}),
            "failures": [str(f) for f in run.own_failures()],
            "warned": [str(w.message) for w in caught if issubclass(w.category, shadowrun.ShadowrunWarning)],
            "off": torchnames.switched_off(),
            "native": native.state(),
        }
    except Exception as error:
        told |= {"error": type(error).__name__, "slug": getattr(error, "slug", ""), "message": str(error)}
    return told


def main() -> None:
    platform, *paths = sys.argv[1:]
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
