"""Imports go one way, the hot path stays light, and private torch APIs stay in their seven places."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "shadowrun"
BASE = {"types", "errors", "settings", "config"}
MAY_IMPORT = {
    "types": set(),
    "errors": set(),
    "native": set(),
    "settings": {"errors"},
    "config": {"errors", "settings"},
    "numerics": {"types", "native"},
    "platforms": BASE | {"native"},
    "store": {"types", "errors", "native"},
    "intercept": BASE | {"platforms", "native"},
    "replay": BASE | {"native", "intercept", "numerics", "platforms", "store"},
    "analysis": {"types", "errors", "settings", "store"},
    "report": {"types", "errors", "store", "analysis", "run"},
    "repro": BASE | {"intercept", "numerics", "platforms", "store", "replay", "analysis"},
    "compiled": BASE | {"numerics", "intercept", "platforms", "store", "replay", "analysis", "repro"},
    "run": {"types", "errors", "settings", "store", "analysis", "report", "repro", "compiled"},
    "slowdown": BASE | {"intercept", "platforms", "replay", "report", "repro", "store", "sweep"},
    "sweep": BASE | {"numerics", "intercept", "platforms", "replay", "report", "repro", "store", "comparison", "run"},
    "comparison": BASE
    | {"numerics", "platforms", "store", "replay", "intercept", "analysis", "report", "run", "compiled"},
}
"""Part of the package to the parts that it may import. `cli`, `__main__` and `__init__` may import all."""

ON_TOP = {"cli", "__main__", "__init__"}
HOT = ("intercept", "replay", "numerics", "store")
PRIVATE_TORCH = (
    "intercept/torchapi.py",
    "platforms/torchplatform.py",
    "platforms/sim/",
    "compiled/torchcompile.py",
    "compiled/torchregions.py",
    "sweep/opinfo.py",
    "native/tensors.py",
)
FILES = sorted(ROOT.rglob("*.py"))


def name_of(file):
    return str(file.relative_to(ROOT))


def part_of(file):
    """Folder or module of the package that a file belongs to."""
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(tree, file):
    """Dotted names that a file imports, at the top or inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = ("shadowrun", *file.relative_to(ROOT).parts[: -node.level])
                base = ".".join((*package, base)).rstrip(".")
            yield base, node.lineno
            # `from shadowrun import analysis` names a part; `from shadowrun.types import Status` does not.
            if base == "shadowrun":
                yield from ((f"shadowrun.{alias.name}", node.lineno) for alias in node.names)


def wrong_imports(tree, file):
    part = part_of(file)
    for name, line in imported(tree, file):
        top, _, rest = name.partition(".")
        other = rest.partition(".")[0]
        if top != "shadowrun" or other == part or not other:
            continue
        if part not in ON_TOP and other not in MAY_IMPORT[part]:
            yield f"{name_of(file)}:{line} imports {name}"


def heavy_imports(tree, file):
    for name, line in imported(tree, file):
        if part_of(file) in HOT and name.partition(".")[0] in ("rich", "jinja2"):
            yield f"{name_of(file)}:{line} imports {name}"


def dotted(node):
    """``torch._C._foo`` of an attribute chain; empty for anything else."""
    names = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    return ".".join([node.id, *reversed(names)])


# Documented types and constants that have no other name.
TOLERATED = ("torch._ops.OpOverload", "torch._ops.OpOverloadPacket", "torch._mkldnn")


def private_torch(tree, file):
    if name_of(file).startswith(PRIVATE_TORCH):
        return
    uses = list(imported(tree, file))
    uses += [(dotted(node), node.lineno) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            uses += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    for name, line in uses:
        parts = name.split(".")
        private = any(part.startswith("_") and not part.startswith("__") for part in parts[1:])
        if parts[0] == "torch" and private and not any(t.startswith(name) or name.startswith(t) for t in TOLERATED):
            yield f"{name_of(file)}:{line} uses {name}"


def check(rule, files=FILES):
    return [line for file in files for line in rule(ast.parse(file.read_text(encoding="utf-8")), file)]


def test_every_part_has_a_place_in_the_order():
    assert {part_of(file) for file in FILES} <= MAY_IMPORT.keys() | ON_TOP


def test_imports_go_one_way():
    assert check(wrong_imports) == []


def test_the_order_has_no_circle_but_run_and_report():
    """A run writes reports and a report shows a run; `run` imports `report` only when asked to write."""
    done = set()
    allowed = {part: others - ({"report"} if part == "run" else set()) for part, others in MAY_IMPORT.items()}
    while allowed:
        free = [part for part, others in allowed.items() if others <= done]
        assert free, f"a circle among {sorted(allowed)}"
        done.update(free)
        for part in free:
            del allowed[part]
    assert not any(
        name.startswith("shadowrun.report") or name == "shadowrun.report"
        for node in ast.parse((ROOT / "run.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name, _ in imported(node, ROOT / "run.py")
    )


def test_hot_path_imports_no_rendering():
    assert check(heavy_imports) == []


def test_private_torch_apis_stay_in_their_places():
    assert check(private_torch) == []


@pytest.mark.parametrize(
    ("rule", "path", "code"),
    [
        (wrong_imports, "numerics/x.py", "from shadowrun.store.schema import SCHEMA"),
        (wrong_imports, "numerics/x.py", "def f():\n    from shadowrun import report"),
        (wrong_imports, "store/x.py", "from ..analysis import find"),
        (wrong_imports, "platforms/x.py", "import shadowrun.intercept.plan"),
        (heavy_imports, "replay/x.py", "def f():\n    import rich.table"),
        (heavy_imports, "store/x.py", "from jinja2 import Template"),
        (private_torch, "replay/x.py", "import torch\ntorch._C._set_mkldnn_enabled(True)"),
        (private_torch, "report/x.py", "from torch._subclasses import FakeTensor"),
        (private_torch, "report/x.py", "from torch.utils import _pytree"),
        (private_torch, "comparison/x.py", "import torch.utils._python_dispatch"),
    ],
)
def test_the_rules_see_a_violation(rule, path, code):
    assert len(list(rule(ast.parse(code), ROOT / path))) >= 1


@pytest.mark.parametrize(
    ("rule", "path", "code"),
    [
        (wrong_imports, "report/x.py", "from shadowrun.analysis import find"),
        (wrong_imports, "store/x.py", "from . import schema\nfrom .schema import SCHEMA"),
        (wrong_imports, "cli/x.py", "import shadowrun\nfrom shadowrun import report"),
        (heavy_imports, "report/x.py", "import jinja2"),
        (private_torch, "replay/x.py", "import torch\nx: torch._ops.OpOverload\ntorch.ops.aten.add"),
        (private_torch, "intercept/torchapi.py", "import torch._C"),
    ],
)
def test_the_rules_let_the_rest_pass(rule, path, code):
    assert list(rule(ast.parse(code), ROOT / path)) == []
