"""State of each operator on a device by torch's kernel tables, without running it.

There are two tables. The dispatcher of this process has the kernels that are registered here. ``native_functions.yaml``
is part of every torch wheel and lists the kernels of all devices whose code is in PyTorch, also of devices that this
build lacks: a laptop without a GPU can list the operators that MPS or CUDA lacks. Kernels of other devices are in
separate packages, and are known if the package is imported.

Neither table has dtypes, or the operators that a default kernel calls: only a run can decide.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Any

from shadowrun.errors import PlatformError
from shadowrun.platforms import torchplatform
from shadowrun.platforms.backends import BACKENDS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["IMPLICIT", "DeclaredOperator", "Kernels", "declared", "kernels"]

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
