"""The device's switchboard: registers the kernels and puts sets of flaws in and out."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from shadowrun.platforms.sim import autocast, device, kernels, module
from shadowrun.platforms.sim.bench import FAULTS, Bench

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.library import Library

    from shadowrun.platforms.sim.device import Kernel
    from shadowrun.platforms.sim.kernels import OpKernel, OwnKernel

__all__ = ["Switchboard"]


class Switchboard:
    """The registered device.

    Attributes:
        active: Names of the active flaws.
    """

    def __init__(self) -> None:
        self.active: tuple[str, ...] = ()
        self._kernels: dict[str, OpKernel | OwnKernel] = {**kernels.standard_kernels()}
        self._kernels.update(kernels.own_kernels())
        self._extra: dict[str, Library] = {}
        self._changed: set[str] = set()
        everything = Bench()
        for build in FAULTS.values():
            build(everything)
        self._module = module.make_module()
        device.set_up(self._module)
        device.patch_storages()
        self._libraries = [*device.register_fallthroughs(), autocast.register()]
        # Kernels that a flaw may take away have a library each: a kernel leaves with its library only.
        self._removable: dict[str, Library | None] = {
            n: device.register([(n, self._kernels[n])]) for n in sorted(everything.removed)
        }
        fixed = ((n, k) for n, k in self._kernels.items() if n not in self._removable)
        self._libraries.append(device.register(fixed))

    def give_name(self, name: str) -> None:
        """Lets programs name the device, as which torch counts it among its accelerators; once per process."""
        device.give_name(name, self._module)

    def switch(self, names: Iterable[str]) -> None:
        """Makes exactly these flaws active."""
        names = tuple(dict.fromkeys(names))
        bench = Bench()
        for name in names:
            FAULTS[name](bench)
        for operator in self._changed:
            self._kernels[operator].reset()
        self._changed = {*bench.replaced, *bench.before, *bench.after}
        self._register_extra(self._changed)
        for operator, functions in bench.replaced.items():
            for function in functions:
                kernel = self._kernels[operator]
                kernel.compute = functools.partial(function, kernel.compute)
        for operator, hooks in bench.before.items():
            self._kernels[operator].before = _all(hooks)
        for operator, filters in bench.after.items():
            self._kernels[operator].after = _chain(filters)
        self._remove(bench.removed)
        self.active = names

    def _register_extra(self, operators: set[str]) -> None:
        """Registers operators that only flaws have kernels for: else the composite ones of torch run."""
        for operator in [*self._extra]:
            if operator not in operators:
                device.unregister(self._extra.pop(operator))
                del self._kernels[operator]
        for operator in operators - self._kernels.keys():
            self._kernels[operator] = kernels.make_kernel(operator)
            self._extra[operator] = device.register([(operator, self._kernels[operator])])

    def _remove(self, operators: set[str]) -> None:
        for operator, library in self._removable.items():
            if operator in operators and library is not None:
                device.unregister(library)
                self._removable[operator] = None
            elif operator not in operators and library is None:
                self._removable[operator] = device.register([(operator, self._kernels[operator])])


def _all(hooks: list[Callable[..., None]]) -> Callable[..., None]:
    def before(*args: Any, **kwargs: Any) -> None:
        for hook in hooks:
            hook(*args, **kwargs)

    return before


def _chain(filters: list[Callable[[Any], Any]]) -> Kernel:
    def after(result: Any) -> Any:
        for function in filters:
            result = function(result)
        return result

    return after
