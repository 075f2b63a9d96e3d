"""Static coverage: the state of each operator on each device by torch's kernel tables, without running it.

There are two tables. The dispatcher of this process has the kernels that are registered here. ``native_functions.yaml``
is part of every torch wheel and lists the kernels of all devices whose code is in PyTorch, also of devices that this
build lacks: a laptop without a GPU can list the operators that MPS or CUDA lacks. Kernels of other devices are in
separate packages, and are known if the package is imported.

Neither table has dtypes, or the operators that a default kernel calls: only a run can decide.
"""

from __future__ import annotations

import functools
from collections import Counter
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Any

from shadowrun.analysis.wording import plural
from shadowrun.errors import PlatformError
from shadowrun.platforms import torchplatform
from shadowrun.platforms.backends import BACKENDS
from shadowrun.report.bars import stacked_bars
from shadowrun.report.document import (
    Block,
    Column,
    Document,
    Filter,
    Limits,
    Note,
    Records,
    Section,
    Table,
    status_span,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shadowrun.report.document import Cell

__all__ = [
    "IMPLICIT",
    "DeclaredOperator",
    "Kernels",
    "StaticCoverage",
    "StaticOperator",
    "cover_statically",
    "declared",
    "kernels",
    "static_document",
]

IN_TREE = frozenset(b.dispatch_key for b in BACKENDS.values() if b.native_functions)
"""Dispatch keys with all kernels in ``native_functions.yaml``; of XPU and MTIA it has only some."""

_EXPLICIT = "CompositeExplicitAutograd"
_OUT_OF_PLACE = "CompositeExplicitAutogradNonFunctional"
IMPLICIT = "CompositeImplicitAutograd"
"""Key of operators that call others, and have no kernel to write."""
# ROCm builds of torch register their kernels under CUDA.
_KEY_OF = {"gpu": "CUDA", "rocm": "CUDA", "hip": "CUDA"}


@dataclass(frozen=True, slots=True)
class DeclaredOperator:
    """The entry of one operator in ``native_functions.yaml``.

    Attributes:
        keys: Dispatch keys with a kernel.
        through: Operator that the generated code of this one calls: the ``out`` variant of a structured operator, or
            the operator that an ``out`` variant was generated for. Empty if the operator has its own code.
    """

    keys: frozenset[str]
    through: str = ""


@dataclass(frozen=True, slots=True)
class Kernels:
    """States of operators on one device.

    Attributes:
        device: Name of the device, in lower case.
        key: Its dispatch key.
        source: Where its kernels are listed: ``dispatcher`` (this process), ``native_functions.yaml``, or
            ``native_functions.yaml, in part`` if a separate package has more.
    """

    device: str
    key: str
    source: str
    _operators: Mapping[str, DeclaredOperator] = field(repr=False)
    _own: Callable[[str], bool] = field(repr=False)
    _elsewhere: str = field(repr=False)
    _default: Callable[[str, str], bool] = field(repr=False)

    def state(self, op: str) -> str:
        """State of an operator.

        Args:
            op: Operator such as ``aten::add.Tensor``.

        Returns:
            ``kernel`` (registered for the device), ``composite`` (decomposed above autograd), ``generic`` (decomposed
            below autograd), ``fallback`` (the backend's fallback), ``absent``, or ``unknown`` if only some kernels of
            the device are listed.
        """
        name, seen = op, {op}
        while True:
            if self._own(name):
                return "kernel"
            through = self._operators[name].through if name in self._operators else ""
            if not through or through in seen:
                break
            name = through
            seen.add(name)
        if self._has(name, IMPLICIT):
            return "composite"
        if self._has(name, _EXPLICIT) or self._has(name, _OUT_OF_PLACE):
            return "generic"
        return self._elsewhere

    def _has(self, op: str, key: str) -> bool:
        declared = self._operators.get(op)
        return key in declared.keys if declared is not None else self._default(op, key)


def kernels(device: str) -> Kernels:
    """The kernels of a device.

    Args:
        device: Device type or dispatch key, in any case: ``mps``, ``CUDA``, ``npu``, ``PrivateUse1``.

    Raises:
        PlatformError: Torch knows no such device, or ``native_functions.yaml`` cannot be read.
    """
    name = device.lower()
    key = _key(name)
    operators = declared()
    # The dispatcher is exact for this build; the list is for devices that this build lacks.
    if torchplatform.kernels_registered(key):
        has_fallback = torchplatform.has_backend_fallback(key)
        elsewhere, source = "fallback" if has_fallback else "absent", "dispatcher"
        own: Callable[[str], bool] = frozenset(torchplatform.registrations(key)).__contains__
    else:
        own = functools.partial(_is_declared, operators, key)
        elsewhere = "absent" if key in IN_TREE else "unknown"
        source = "native_functions.yaml" + ("" if key in IN_TREE else ", in part")
    return Kernels(name, key, source, operators, own, elsewhere, torchplatform.has_kernel)


@functools.cache
def declared() -> Mapping[str, DeclaredOperator]:
    """The entries of ``native_functions.yaml``, by operator.

    Raises:
        PlatformError: PyYAML or the file is missing.
    """
    try:
        import yaml
    except ImportError:
        raise PlatformError(
            "torch's list of kernels is a YAML file, and PyYAML is not installed: pip install 'shadowrun[static]'.",
            slug="no-kernel-list",
        ) from None
    try:
        file = resources.files("torchgen").joinpath("packaged/ATen/native/native_functions.yaml")
        text = file.read_text(encoding="utf-8")
    except (ImportError, OSError):
        raise PlatformError(
            "torch's list of kernels (torchgen/packaged/ATen/native/native_functions.yaml) is not in this installation "
            "of torch: use one of PyTorch's own wheels.",
            slug="no-kernel-list",
        ) from None
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # 0.2 s; the pure Python loader takes 5 s
    return _read(yaml.load(text, loader))  # noqa: S506 - both are safe loaders


def _read(functions: list[dict[str, Any]]) -> dict[str, DeclaredOperator]:
    operators = {}
    for function in functions:
        name = "aten::" + function["func"].partition("(")[0]
        through = function.get("structured_delegate", "")
        keys = {key.strip() for listed in function.get("dispatch", ()) for key in listed.split(",")}
        # The code generator makes the kernels of such an operator; they have no `dispatch` entry.
        if "ufunc_inner_loop" in function:
            keys |= {"CPU", "CUDA"}
        if not keys and not through:  # the default of the code generator
            keys = {IMPLICIT}
        operators[name] = DeclaredOperator(frozenset(keys), f"aten::{through}" if through else "")
        # Generated variants call the operator that they were made of.
        for generated in filter(None, (n.strip() for n in function.get("autogen", "").split(","))):
            operators[f"aten::{generated}"] = DeclaredOperator(frozenset({_EXPLICIT}), name)
    return operators


def _is_declared(operators: Mapping[str, DeclaredOperator], key: str, op: str) -> bool:
    return op in operators and key in operators[op].keys


def _key(name: str) -> str:
    try:
        return _KEY_OF[name] if name in _KEY_OF else torchplatform.dispatch_key(name)
    except RuntimeError:
        raise PlatformError(
            f"Static coverage of {name!r}: torch knows no such device. Use a device type, such as mps, cuda, xpu, xla, "
            "mtia or hpu, or that of a package which is imported before.",
            slug="unknown-device",
        ) from None


STATES = ("absent", "unknown", "fallback", "generic", "composite", "kernel")
"""From worst to best."""

SPECIFIC = "specific"
"""State of an operator that exists for one kind of device only: other devices do not need it."""


@dataclass(frozen=True, slots=True)
class StaticOperator:
    """One operator.

    Attributes:
        op: Operator such as ``aten::add.Tensor``.
        states: One of `STATES` or `SPECIFIC`, for each device of the `StaticCoverage`.
        n_calls: Calls in the run; 0 without a run.
    """

    op: str
    states: tuple[str, ...]
    n_calls: int


@dataclass(frozen=True, slots=True)
class StaticCoverage:
    """Operators and devices.

    Attributes:
        devices: Names of the devices.
        sources: Where the kernels of each are listed.
        operators: First those that most devices lack, then those with most calls.
    """

    devices: tuple[str, ...]
    sources: tuple[str, ...]
    operators: tuple[StaticOperator, ...]

    def n_by_state(self, device: str) -> dict[str, int]:
        """State to number of operators on a device."""
        at = self.devices.index(device)
        counted = Counter(operator.states[at] for operator in self.operators)
        return {state: counted[state] for state in (*STATES, SPECIFIC)}

    def lacking(self, device: str) -> tuple[StaticOperator, ...]:
        """Operators that a device certainly lacks."""
        at = self.devices.index(device)
        return tuple(operator for operator in self.operators if operator.states[at] == "absent")

    def percent(self, device: str) -> float:
        """Percentage of operators with a kernel or a decomposition; 100 if there is no operator.

        Operators specific to one kind of device are not counted. If some are unknown, this is a lower bound.
        """
        n = self.n_by_state(device)
        has, total = n["kernel"] + n["composite"] + n["generic"], len(self.operators) - n[SPECIFIC]
        return 100.0 * has / total if total else 100.0

    def verdict(self, device: str) -> str:
        """Summary of a device, in words."""
        n = self.n_by_state(device)
        if not self.operators:
            return "no operators to look up"
        words = []
        if n["absent"]:
            words.append(f"{plural(n['absent'], 'operator')} absent")
        if n["fallback"]:
            words.append(f"{plural(n['fallback'], 'operator')} left to the backend's fallback")
        if n["unknown"]:
            words.append(
                f"{plural(n['unknown'], 'operator')} unknown: the kernels of {device} are in a separate package"
            )
        return ", ".join(words) if words else "no operator is absent"


def cover_statically(
    n_calls: Mapping[str, int],
    devices: Mapping[str, tuple[str, Callable[[str], str]]],
    *,
    is_specific: Callable[[str], bool],
) -> StaticCoverage:
    """Look operators up.

    Args:
        n_calls: Operator to its number of calls.
        devices: Device to where its kernels are listed, and to the look-up of an operator's state.
        is_specific: Whether an operator exists for one kind of device only.
    """

    def states(op: str) -> tuple[str, ...]:
        listed = (state(op) for _, state in devices.values())
        return tuple(SPECIFIC if s in ("absent", "unknown") and is_specific(op) else s for s in listed)

    operators = [StaticOperator(op, states(op), n) for op, n in n_calls.items()]
    # What most devices lack is first, and of these what the program calls most.
    operators.sort(key=lambda o: (-o.states.count("absent"), -o.states.count("fallback"), -o.n_calls, o.op))
    return StaticCoverage(tuple(devices), tuple(source for source, _ in devices.values()), tuple(operators))


# Report of static coverage as a `Document`.

FORMAT = 1
"""Version of the JSON's form."""

_WARNING = "By torch's tables only, nothing ran: they know no dtypes, and not what a generic operator calls in turn."


def static_document(coverage: StaticCoverage, subject: str) -> Document:
    """Report of the operators of `subject` that each device lacks by torch's tables."""
    verdicts = {device: coverage.verdict(device) for device in coverage.devices}
    sources = zip(coverage.devices, coverage.sources, strict=True)
    notes = (Note(f"{device}: {verdicts[device]} (by {source})") for device, source in sources)
    bars = stacked_bars([(d, coverage.n_by_state(d)) for d in coverage.devices], "Operators by state", "operators")
    blocks: list[Block] = [Note(_WARNING, "dim"), *notes, *bars, _states(coverage)]
    lacking = [o for o in coverage.operators if {"absent", "fallback"} & set(o.states)]
    if lacking:
        blocks.append(Section("Operators that a device lacks", (_operators(coverage, lacking),), count=len(lacking)))
    data = {
        "format": FORMAT,
        "of": subject,
        "static": True,
        "devices": {
            device: {
                "source": source,
                "verdict": verdicts[device],
                "percent": coverage.percent(device),
                "n_by_state": coverage.n_by_state(device),
            }
            for device, source in zip(coverage.devices, coverage.sources, strict=True)
        },
        "operators": [
            {"op": o.op, "n_calls": o.n_calls, "states": dict(zip(coverage.devices, o.states, strict=True))}
            for o in coverage.operators
        ],
    }
    rows = tuple((o.op, o.n_calls, *o.states) for o in coverage.operators)
    records = Records(("operator", "calls", *coverage.devices), rows)
    return Document(f"static coverage of {subject}", tuple(blocks), data, records)


def _states(coverage: StaticCoverage) -> Table:
    """Operators in each state on each device."""
    counts = [coverage.n_by_state(device) for device in coverage.devices]
    rows: list[tuple[Cell, ...]] = [
        ((status_span(state),), *(f"{n[state]:,}" for n in counts)) for state in (*STATES, SPECIFIC)
    ]
    shares = [
        f"{'at least ' if n['unknown'] else ''}{coverage.percent(device):.1f} %"
        for device, n in zip(coverage.devices, counts, strict=True)
    ]
    columns = (Column("operators"), *(Column(device, "number") for device in coverage.devices))
    return Table(columns, (*rows, ("have kernels", *shares)))


def _operators(coverage: StaticCoverage, lacking: list[StaticOperator]) -> Table:
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (o.op, f"{o.n_calls:,}" if o.n_calls else "", *((status_span(state),) for state in o.states)) for o in lacking
    )
    columns = (Column("operator", "name"), Column("calls", "number"), *(Column(d) for d in coverage.devices))
    return Table(
        columns,
        rows,
        noun="operators: -f csv lists all",
        limits=Limits(40, 40, len(rows)),
        filter=Filter(("absent", "fallback")),
        tags=tuple(o.states for o in lacking),
    )
