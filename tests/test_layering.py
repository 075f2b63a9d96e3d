"""Imports go one way, the hot path stays light, and private names of torch stay in their places."""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "shadowrun"
BASE = {"types", "errors", "limits", "settings", "config", "strided", "current_folder", "visible_text"}
CALL = BASE | {"native", "torch_versions", "torch_private", "platforms", "facts", "intercept", "numerics", "operators"}
CALL |= {"store"}
MAY_IMPORT = {
    "types": set(),
    "visible_text": set(),
    "errors": {"visible_text"},
    "strided": set(),
    "current_folder": set(),
    "limits": {"errors"},
    "native": set(),
    "torch_versions": {"errors", "native"},
    "torch_private": {"torch_versions"},
    "settings": {"errors", "limits"},
    "config": {"errors", "settings"},
    "numerics": {"types", "native", "torch_private"},
    "sim": BASE | {"torch_versions"},
    "platforms": BASE | {"native", "torch_versions", "torch_private", "sim"},
    "store": {"types", "errors", "limits", "visible_text", "native", "torch_private"},
    "facts": set(),
    "intercept": BASE | {"platforms", "native", "torch_versions", "torch_private", "facts"},
    "operators": {"types", "strided", "numerics", "intercept", "torch_private", "facts"},
    "judge": {"types", "strided", "numerics", "facts", "operators", "torch_private"},
    "schedule": {"errors", "settings", "config", "intercept"},
    "replay": CALL | {"judge", "schedule"},
    "recording": CALL | {"replay", "schedule"},
    "analysis": {"types", "errors", "settings", "visible_text", "store"},
    "report": {"types", "errors", "visible_text", "store", "analysis", "run"},
    "repro": CALL | {"sim", "judge", "replay", "recording", "analysis"},
    "compiled": CALL | {"judge", "schedule", "replay", "recording", "analysis", "repro"},
    "run": {"types", "errors", "limits", "settings", "visible_text", "platforms", "store", "analysis", "report"}
    | {"repro", "compiled"},
    "comparison": CALL | {"schedule", "replay", "recording", "analysis", "report", "run", "compiled"},
    "studies": CALL
    | {"sim", "judge", "replay", "recording", "analysis", "report", "repro", "compiled", "run", "comparison"},
    "integrations": {"types", "errors", "settings", "config", "run", "comparison"},
}
"""Part of the package to the parts that it may import. Those `ON_TOP` may import all."""

FACTS = {f"operators/{name}.py" for name in ("facts", "fact_table", "op_facts")}
"""A floor of its own below `intercept`: an operator's row is read to plan its calls; what runs operators lies above."""

ON_TOP = {"cli", "pytest_plugin", "pytest_compare", "__main__", "__init__"}
HOT = ("facts", "intercept", "operators", "judge", "schedule", "replay", "recording", "numerics", "store")
PRIVATE_TORCH = (
    "torch_private.py",
    "intercept/torchapi.py",
    "intercept/torch_operators.py",
    "intercept/torch_compiler.py",
    "platforms/torchplatform.py",
    "sim/",
    "compiled/torchcompile.py",
    "compiled/regions/torchregions.py",
    "studies/sweep/opinfo.py",
    "native/tensors.py",
)
FILES = sorted(ROOT.rglob("*.py"))


def name_of(file):
    return str(file.relative_to(ROOT))


def part_of(file):
    """Folder or module of the package that a file belongs to."""
    return part_named(name_of(file))


def part_named(path):
    return "facts" if path in FACTS else path.partition("/")[0].removesuffix(".py")


def imported(tree, file):
    """Dotted names that a file imports, at the top or inside functions."""
    for node in nodes_of(tree):
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
        other = part_named(f"{rest.replace('.', '/')}.py")
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
    uses += [(dotted(node), node.lineno) for node in nodes_of(tree) if isinstance(node, ast.Attribute)]
    for node in nodes_of(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            uses += [(f"{node.module}.{alias.name}", node.lineno) for alias in node.names]
    for name, line in uses:
        parts = name.split(".")
        private = any(part.startswith("_") and not part.startswith("__") for part in parts[1:])
        if parts[0] == "torch" and private and not any(t.startswith(name) or name.startswith(t) for t in TOLERATED):
            yield f"{name_of(file)}:{line} uses {name}"


OF_OTHERS = ("sys._", "os._", "warnings._", "argparse._", "_thread._", "self._run._", "torch.")
"""Private names of Python's own modules and of `Run`, and chains that `private_torch` judges."""
NOT_OF_TORCH = {
    "_is_owned": "threading.RLock",
    "_replace": "a named tuple",
    "_filename_map": "IPython",
    "_name": "ctypes.CDLL",
    "_handle": "ctypes.CDLL",
}


def attributes_made_in(tree):
    """Names that a module's own classes have, or that it sets on some object."""
    names = set()
    for node in nodes_of(tree):
        if isinstance(node, ast.ClassDef):
            names |= {n.name for n in node.body if isinstance(n, ast.FunctionDef)}
            names |= {n.target.id for n in node.body if isinstance(n, ast.AnnAssign)}
            names |= {t.id for n in node.body if isinstance(n, ast.Assign) for t in n.targets}
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.add(node.attr)
    return names


def private_attributes(tree, file):
    """``x._schema`` of an object from elsewhere: a tensor's, an operator's, or that of another module of ours."""
    if name_of(file).startswith(PRIVATE_TORCH):
        return
    known = attributes_made_in(tree) | NOT_OF_TORCH.keys()
    for node in nodes_of(tree):
        if not isinstance(node, ast.Attribute) or not node.attr.startswith("_") or node.attr.startswith("__"):
            continue
        if node.attr not in known and not dotted(node).startswith(OF_OTHERS):
            yield f"{name_of(file)}:{node.lineno} uses {ast.unparse(node)}"


@functools.cache
def tree_of(file):
    """Parsed once for all rules, which only read it."""
    return ast.parse(file.read_text(encoding="utf-8"))


@functools.cache
def nodes_of(tree):
    return tuple(ast.walk(tree))


def check(rule, files=FILES):
    return [line for file in files for line in rule(tree_of(file), file)]


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
        for node in ast.parse((ROOT / "run" / "run.py").read_text(encoding="utf-8")).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name, _ in imported(node, ROOT / "run" / "run.py")
    )


ACYCLIC = ("platforms", "sim")
"""Parts inside which no module imports another in a circle, inside functions or not."""


def modules_imported(tree, known):
    """Modules of `known` that a file imports when it runs: not those of a ``TYPE_CHECKING`` block."""
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ({node.module, *(f"{node.module}.{alias.name}" for alias in node.names)} & known)


@pytest.mark.parametrize("part", ACYCLIC)
def test_no_circle_inside_a_part(part):
    files = {
        ".".join(("shadowrun", *f.relative_to(ROOT).with_suffix("").parts)): f for f in FILES if part_of(f) == part
    }
    left = {
        name: set(modules_imported(ast.parse(file.read_text(encoding="utf-8")), files.keys())) - {name}
        for name, file in files.items()
    }
    while left:
        free = {name for name, others in left.items() if not others & left.keys()}
        assert free, f"a circle among {sorted(left)}"
        left = {name: others for name, others in left.items() if name not in free}


def test_hot_path_imports_no_rendering():
    assert check(heavy_imports) == []


def test_private_torch_apis_stay_in_their_places():
    assert check(private_torch) == []


def test_private_attributes_stay_in_their_places():
    assert check(private_attributes) == []


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
        (private_attributes, "replay/x.py", "def f(plan):\n    return plan.func._schema"),
        (private_attributes, "replay/x.py", "def _version(t):\n    return t._version"),
        (private_attributes, "numerics/x.py", "def f(t):\n    return t._neg_view()"),
    ],
)
def test_the_rules_see_a_violation(rule, path, code):
    assert len(list(rule(ast.parse(code), ROOT / path))) >= 1


@pytest.mark.parametrize(
    ("rule", "path", "code"),
    [
        (wrong_imports, "report/x.py", "from shadowrun.analysis import Finding"),
        (wrong_imports, "store/x.py", "from . import schema\nfrom .schema import SCHEMA"),
        (wrong_imports, "cli/x.py", "import shadowrun\nfrom shadowrun import report"),
        (heavy_imports, "report/x.py", "import jinja2"),
        (private_torch, "replay/x.py", "import torch\nx: torch._ops.OpOverload\ntorch.ops.aten.add"),
        (private_torch, "intercept/torchapi.py", "import torch._C"),
        (
            private_attributes,
            "replay/x.py",
            "class A:\n    def f(self, a):\n        self._x = a._x, a._f, sys._getframe()\n    _f = 1",
        ),
    ],
)
def test_the_rules_let_the_rest_pass(rule, path, code):
    assert list(rule(ast.parse(code), ROOT / path)) == []
