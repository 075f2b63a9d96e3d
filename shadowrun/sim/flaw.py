"""A flaw of the simulated accelerator: the fact, the fault that makes it so, and user code on which it matters.

Each file of `catalogue` makes a `FlawKind` and decorates one function for each flaw with it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.sim import device

if TYPE_CHECKING:
    from shadowrun.sim.device import Kernel
    from shadowrun.types import Cause

__all__ = ["Flaw", "FlawKind", "KernelChanges", "randn"]

Fault = Callable[["KernelChanges"], None]
Trigger = Callable[[str], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Flaw:
    """One switchable flaw, and what a correct tool must say about it.

    Attributes:
        name: ``maximum-drops-nan``.
        kind: ``support``, ``exceptional``, ``precision``, ``form``, ``kernel``, ``memory``, ``training`` or ``speed``;
            ``fatal`` outside the catalogue.
        description: One line.
        issue: Public issue that it is modelled on, ``pytorch/pytorch#143976``, or ``none:`` and what it imitates.
        operators: Operators, as a dispatch mode sees them, on which the finding may be placed: any of them is
            right, any other is wrong.
        statuses: Values of `shadowrun.types.Status` that are right.
        cause: Cause that is right; None where no cause fits (a vendor's runtime error).
        accepted: Causes that are right as well, where the evidence a tool can have leaves two.
        explanation: Hypothesis that a tool should name; may be empty.
        fault: Changes the device's kernels.
        trigger: A few lines of ordinary user code on which the flaw matters, given a device's name. They run on
            ``"cpu"`` as well, and raise where the flaw is a missing operator. None for flaws that are fatal.
    """

    name: str
    kind: str
    description: str
    issue: str
    operators: tuple[str, ...]
    statuses: tuple[str, ...]
    cause: Cause | None
    accepted: tuple[Cause, ...]
    explanation: str
    fault: Fault
    trigger: Trigger | None


class FlawKind:
    """Decorator that collects the flaws of one file.

    Args:
        kind: Name of the kind.
        cause: Cause of flaws that name no other.
        statuses: Right statuses of flaws that name no others.

    Attributes:
        flaws: In the order of the file.
    """

    def __init__(self, kind: str, *, cause: Cause | None = None, statuses: tuple[str, ...] = ("mismatch",)) -> None:
        self.flaws: list[Flaw] = []
        self._defaults = {
            "kind": kind, "cause": cause, "statuses": statuses, "accepted": (), "explanation": "", "trigger": None,
        }  # fmt: skip

    def __call__(self, name: str, description: str, **facts: Any) -> Callable[[Fault], Fault]:
        """Makes a flaw of the decorated fault.

        Args:
            name: As in `Flaw`.
            description: As in `Flaw`.
            **facts: The other attributes of `Flaw`.
        """

        def add(fault: Fault) -> Fault:
            self.flaws.append(Flaw(name=name, description=description, fault=fault, **{**self._defaults, **facts}))
            return fault

        return add


@dataclasses.dataclass
class KernelChanges:
    """The changes that a set of flaws makes to the device's kernels.

    Attributes:
        replaced: Replacements per operator: called with the kernel that was there and the arguments.
        before: Called with the arguments of each call; may raise, warn or wait.
        after: Called with the results of each call.
        removed: Operators whose kernel is taken away from the dispatcher.
    """

    replaced: dict[str, list[Callable[..., Any]]] = dataclasses.field(default_factory=dict)
    before: dict[str, list[Callable[..., None]]] = dataclasses.field(default_factory=dict)
    after: dict[str, list[Callable[[Any], Any]]] = dataclasses.field(default_factory=dict)
    removed: set[str] = dataclasses.field(default_factory=set)

    def replace(self, function: Callable[..., Any], *operators: str) -> None:
        """Runs `function(kernel, *args, **kwargs)` on CPU tensors in the place of the kernels."""
        for name in operators:
            self.replaced.setdefault(name, []).append(function)

    def replace_variants(self, function: Callable[..., Any], *operators: str) -> None:
        """Replaces functional operators together with their in-place and ``out=`` variants.

        Args:
            function: Called as ``function(operator, *args)``; returns a fresh value.
            operators: Functional overloads.
        """
        for name in operators:
            # The variants call the functional operator, so one replacement holds for all three.
            plain = device.raw(device.overload(name))
            base, _, variant = name.partition(".")
            self.replace(function, name)
            inplace = f"{base}_.{variant}" if variant else f"{base}_"
            # torch's own names: `add.Tensor` has `add.out`, and `add.Scalar` has `add.Scalar_out`.
            out = f"{base}.out" if variant in {"", "Tensor"} else f"{base}.{variant}_out"
            if device.has_kernel(inplace, "CPU"):
                self.replace(_inplace(function, plain), inplace)
            if device.has_kernel(out, "CPU"):
                self.replace(_out(function, plain), out)

    def call_before(self, function: Callable[..., None], *operators: str) -> None:
        """Runs `function(*args, **kwargs)` on the device's tensors before each call."""
        for name in operators:
            self.before.setdefault(name, []).append(function)

    def call_after(self, function: Callable[[Any], Any], *operators: str) -> None:
        """Passes the device's results to `function` and returns what it returns."""
        for name in operators:
            self.after.setdefault(name, []).append(function)

    def remove(self, *operators: str) -> None:
        """Takes the kernels away, so that the dispatcher itself reports them as missing."""
        # The text that a real backend gives for a missing operator is then what is classified, and no imitation of
        # it.
        self.removed.update(operators)


def _inplace(function: Callable[..., Any], plain: Kernel) -> Callable[..., Any]:
    def kernel(_: Kernel, target: Any, *args: Any, **kwargs: Any) -> Any:
        # The result may have another dtype, and an in-place operator keeps that of its tensor.
        return target.copy_(function(plain, target, *args, **kwargs))

    return kernel


def _out(function: Callable[..., Any], plain: Kernel) -> Callable[..., Any]:
    def kernel(_: Kernel, *args: Any, out: Any, **kwargs: Any) -> Any:
        value = function(plain, *args, **kwargs)
        # Torch resizes an `out=` of another size, and so must a flaw.
        return out.resize_(value.shape).copy_(value)

    return kernel


def randn(device: str, *shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal numbers that are the same on every device and draw from no default generator."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype).to(device)
