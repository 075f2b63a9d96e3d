"""Lists for other test suites, from a sweep: OpInfo's allow list and overrides, a backend's YAML, expected accuracy.

Texts of a coverage file become code here: each is written as a literal in ASCII, and names must be those of torch.
"""

from __future__ import annotations

import io
import re
import warnings
from typing import TYPE_CHECKING, Final

from shadowrun.errors import UsageError
from shadowrun.report.formats.json_csv import csv_writer
from shadowrun.report.sanitize import clip
from shadowrun.studies.sweep.cases import ANY_DTYPE, FAILURES, Kind, Part, Support
from shadowrun.studies.sweep.run_sweep import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shadowrun.studies.sweep.reports.support import FailingPart, OperatorSupport, Sweep

__all__ = ["LISTS", "export"]

_MAX_REASON: Final = 160
_NO_WORD: Final = re.compile(r"[^\w .+=,:\[\]-]", re.ASCII)
# Words of torch's benchmarks/dynamo; a fallback computes the right result, and passes.
_PROBLEMS: Final = {
    Kind.CRASH: "fail_to_run",
    Kind.TIMEOUT: "timeout",
    Kind.OUT_OF_MEMORY: "fail_to_run",
    Kind.UNSUPPORTED: "fail_to_run",
    Kind.UNSUPPORTED_DTYPE: "fail_to_run",
    Kind.ERROR: "fail_to_run",
    Kind.MISMATCH: "fail_accuracy",
    Kind.FORM: "fail_accuracy",
    Kind.MISSING_ERROR: "fail_accuracy",
    Kind.WRONG_ERROR: "fail_accuracy",
}
# Classes and tests of PyTorch's suites that test a part; a failure of any other part is one of all tests.
_TESTS: Final = {
    Part.BACKWARD: (("TestBwdGradients", None), ("TestFwdGradients", None)),
    Part.OUT: (("TestCommon", "test_out"), ("TestCommon", "test_out_warning")),
    Part.TRANSPOSED: (("TestCommon", "test_noncontiguous_samples"),),
    Part.STRIDED: (("TestCommon", "test_noncontiguous_samples"),),
    Part.STRIDED_INPLACE: (
        ("TestCommon", "test_noncontiguous_samples"),
        ("TestCommon", "test_variant_consistency_eager"),
    ),
    Part.INPLACE: (("TestCommon", "test_variant_consistency_eager"),),
    Part.INVALID: (("TestCommon", "test_errors"),),
}
_ALL: Final = ((None, None),)

_PYTHON: Final = '''\
"""Operators of torch's test database on {device}: which are tested, and which tests are skipped.

Written by `shadowrun support --write opinfo:FILE` from a sweep against {ref} with torch {torch}: {n_allowed} of {n}
operators work at least in part, {n_overridden} have tests that are skipped. Call `configure` before
`instantiate_device_type_tests`; where torch has no `set_test_configs`, ``apply_to(op_db)``.
"""

import unittest

import torch
from torch.testing._internal.opinfo.core import DecorateInfo

DEVICE_TYPE = "{device}"

OP_ALLOWLIST = [
{allowed}]

# Operator: (reason, test class, test, dtypes); None stands for all.
SKIPS = {{
{skips}}}


def op_overrides():
    """The skips, as `op_overrides` of torch's `DeviceTypeTestBase` takes them."""
    return {{
        name: [
            DecorateInfo(unittest.skip(reason), cls, test, device_type=DEVICE_TYPE, dtypes=dtypes)
            for reason, cls, test, dtypes in skips
        ]
        for name, skips in SKIPS.items()
    }}


def configure(base=None, *, only_allowed=False):
    """Give torch's device-generic tests the skips.

    Args:
        base: The device's class of tests; `PrivateUse1TestBase` by default.
        only_allowed: Also leave out all operators that are not in the allow list. torch 2.13 refuses that where a test
            is left without operators ("An empty op_list was passed to @ops").
    """
    if base is None:
        from torch.testing._internal.common_device_type import PrivateUse1TestBase as base
    # Until then torch 2.13 does not know the name of a PrivateUse1 device, and the first test would not be skipped.
    base.setUpClass()
    base.set_test_configs(op_overrides=op_overrides(), op_allowlist=OP_ALLOWLIST if only_allowed else None)


def apply_to(op_db):
    """Add the skips to entries of a database, and give those of the allow list."""
    overrides = op_overrides()
    for op in op_db:
        op.decorators = (*op.decorators, *overrides.get(op.full_name, ()))
    return [op for op in op_db if op.full_name in OP_ALLOWLIST]
'''

_YAML: Final = """\
# Operators that {device} runs, for torchgen.gen_backend_stubs: those that {source} and that no failure names.
# Written by `shadowrun support --write backend-yaml:FILE` from a sweep against {ref} with torch {torch}.
backend: {key}
cpp_namespace: {namespace}
supported:
{supported}"""


def export(name: str, sweep: Sweep) -> str:
    """A list, as text.

    Args:
        name: One of `LISTS`.
        sweep: The sweep.

    Raises:
        UsageError: The sweep cannot give this list.
    """
    return _LISTS[name](sweep)


def _opinfo(sweep: Sweep) -> str:
    from shadowrun.repro.quoting import literal
    from shadowrun.studies.sweep.opinfo import database

    operators = sweep.table.operators
    known = database()
    unknown = [operator.name for operator in operators if operator.name not in known]
    if unknown:
        raise UsageError(
            f"{clip(unknown[0], 80)!r} is no name of torch's database of operators: --write opinfo needs a sweep "
            "of the database, with this torch, not of recorded calls.",
            slug="bad-option",
        )
    names = {operator.name: str(known[operator.name].full_name) for operator in operators}
    # Those that work in part too: their failing tests are skipped one by one, and the others guard what works.
    allowed = [names[o.name] for o in operators if o.support in (Support.FULL, Support.PARTIAL)]
    skips: dict[str, list[tuple[str, str | None, str | None, str]]] = {}
    for operator in operators:  # two entries may have one name
        if found := list(_skips(operator)):
            skips.setdefault(names[operator.name], []).extend(found)
    lines = []
    for name, found in sorted(skips.items()):
        rows = (f"        ({', '.join(map(literal, texts))}, {dtypes}),\n" for *texts, dtypes in found)
        lines.append(f"    {literal(name)}: [\n{''.join(rows)}    ],\n")
    return _PYTHON.format(
        **_facts(sweep),
        n=len(operators),
        n_allowed=len(allowed),
        n_overridden=len(skips),
        allowed="".join(f"    {literal(name)},\n" for name in dict.fromkeys(sorted(allowed))),
        skips="".join(lines),
    )


def _skips(operator: OperatorSupport) -> Iterator[tuple[str, str | None, str | None, str]]:
    """Reason, class, test and dtypes: one for each reason and test, with all its dtypes."""
    found: dict[tuple[str, str | None, str | None], dict[str, None]] = {}
    everywhere = {f.dtype for f in _failing(operator) if _tests(f) == _ALL}
    for f in _failing(operator):
        if f.dtype in everywhere and _tests(f) != _ALL:  # all tests of the dtype are skipped already
            continue
        for cls, test in _tests(f):
            found.setdefault((_reason(f), cls, test), {})[f.dtype] = None
    for (reason, cls, test), dtypes in found.items():
        names = sorted(name for name in dtypes if name != ANY_DTYPE)
        # They become code.
        if wrong := [name for name in names if name not in DTYPES]:
            raise UsageError(f"{wrong[0]!r} is no dtype: the coverage file is damaged.", slug="bad-option")
        some = f"({', '.join(f'torch.{name}' for name in names)},)" if len(names) == len(dtypes) else "None"
        yield reason, cls, test, some


def _tests(f: FailingPart) -> tuple[tuple[str | None, str | None], ...]:
    # A crash ends all tests of a file.
    ends = f.finding.kind in (Kind.CRASH, Kind.TIMEOUT, Kind.OUT_OF_MEMORY)
    return _ALL if ends else _TESTS.get(f.part, _ALL)


def _failing(operator: OperatorSupport) -> list[FailingPart]:
    # PyTorch's tests pass on a result that the CPU computed: to skip them would hide later failures.
    fallbacks = (Kind.SILENT_FALLBACK, Kind.WARNED_FALLBACK)
    return [f for f in operator.failing if f.finding.kind in FAILURES and f.finding.kind not in fallbacks]


def _reason(f: FailingPart) -> str:
    where = f.finding.kernel or f.finding.op
    words = (f"{f.finding.kind} in {where}" if where else str(f.finding.kind), f.finding.cause, f.finding.explanation)
    return clip(": ".join(filter(None, words)), _MAX_REASON)


def _yaml(sweep: Sweep) -> str:
    from shadowrun.platforms.backends import backend_of
    from shadowrun.studies.static.coverage import IMPLICIT, declared
    from shadowrun.studies.sweep.opinfo import operators_called

    # Composite operators have no kernel to register: they call others.
    native = {name for name, operator in declared().items() if operator.keys != {IMPLICIT}}
    works = [o for o in sweep.table.operators if o.support in (Support.FULL, Support.PARTIAL)]
    recorded = any("::" in operator.name for operator in works)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of samples that use what is deprecated
        called = {n for o in works for n in ([o.name] if "::" in o.name else operators_called(o.name))}
    failing = {name for o in sweep.table.operators for f in _failing(o) for name in (f.finding.op, f.finding.kernel)}
    supported = sorted(n.removeprefix("aten::") for n in called - failing if n in native)
    if not supported:
        raise UsageError(
            "No operator of this sweep works, so there is nothing for --write backend-yaml.", slug="bad-option"
        )
    device = _device(sweep)
    return _YAML.format(
        **_facts(sweep),
        key=backend_of(device).dispatch_key,
        namespace=f"at_{device}",
        source="it ran" if recorded else "its working functions call on the CPU",
        supported="".join(f"  - {name}\n" for name in supported),
    )


def _accuracy(sweep: Sweep) -> str:
    out = io.StringIO()
    write = csv_writer(out)
    write(("name", "accuracy", "graph_breaks"))
    several = (
        len({dtype for operator in sweep.table.operators for dtype, _ in operator.parts if dtype != ANY_DTYPE}) > 1
    )
    for operator in sweep.table.operators:
        dtypes = list(dict.fromkeys(dtype for dtype, _ in operator.parts if dtype != ANY_DTYPE))
        for dtype in dtypes:
            supports = {s for (d, _), s in operator.parts.items() if d == dtype}
            if supports == {Support.UNTESTED}:
                continue
            worst = [_PROBLEMS[f.finding.kind] for f in _failing(operator) if f.dtype == dtype]
            name = clip(f"{operator.name}.{dtype}" if several else operator.name, 200)
            # Operators run in eager mode, which has no graphs that could break.
            write((name, worst[0] if worst else "pass", 0))
    return out.getvalue()


def _facts(sweep: Sweep) -> dict[str, str]:
    """Words for comments and docstrings, without characters that could end these."""
    words = {"device": _device(sweep), "ref": sweep.info.ref, "torch": str(sweep.info.versions.get("torch", "?"))}
    return {name: _NO_WORD.sub("", clip(text, 60)) for name, text in words.items()}


def _device(sweep: Sweep) -> str:
    """The device type: ``vpu`` of ``vpu:1[fast_math=on]``, and of ``vpu (preset young)``."""
    text = sweep.info.target
    for end in ("[", ":", " "):
        text = text.partition(end)[0]
    if not text.isidentifier() or not text.isascii():
        raise UsageError(f"{clip(text, 60)!r} is no device type: the coverage file is damaged.", slug="bad-option")
    return text


_LISTS: Final[dict[str, Callable[[Sweep], str]]] = {"opinfo": _opinfo, "backend-yaml": _yaml, "accuracy": _accuracy}
LISTS: Final[Sequence[str]] = tuple(_LISTS)
"""Names of the lists."""
