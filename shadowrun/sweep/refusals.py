"""How a platform refuses invalid inputs: what it raises.

A platform in a process of its own runs single operators, no programs. So the program runs here, and the operator that
refuses its inputs is run there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from shadowrun.intercept.plan import make_plan
from shadowrun.intercept.torchapi import DispatchMode
from shadowrun.replay.execution import Executor
from shadowrun.replay.mirror import tensors_in

if TYPE_CHECKING:
    from shadowrun.platforms.device import Platform
    from shadowrun.sweep.programs import Program

__all__ = ["NotAsked", "Refusals"]

_MAX_BYTES = 1 << 28


class NotAsked(Exception):  # noqa: N818 - a reason, caught inside
    """The inputs were refused before any operator of the platform was called."""


class Refusals:
    """What a platform raises.

    Args:
        platform: Which.
    """

    def __init__(self, platform: Platform) -> None:
        self._platform = platform
        self._executor = Executor(platform)

    def of(self, program: Program) -> Exception | None:
        """Run a program; its exception, or None where it raises none.

        Raises:
            NotAsked: The platform has a process of its own, and the program raises outside of operators.
            WorkerDied: That process died, or took too long.
            Exception: The inputs cannot be copied to the device.
        """
        prepared = program(self._platform.device)
        failed = _Failed()
        is_remote = self._platform.remote is not None
        try:
            with failed if is_remote else self._platform.context():
                torch.manual_seed(0)
                result = prepared()
                if not is_remote:
                    self._platform.materialise(list(tensors_in([result])))
        except Exception as error:
            return self._asked(failed) if is_remote else error
        return None

    def _asked(self, failed: _Failed) -> Exception | None:
        if failed.call is None:
            raise NotAsked
        func, args, kwargs = failed.call
        try:
            self._executor.run_mirrored(make_plan(func, 0), args, kwargs, _MAX_BYTES)
        except Exception as error:
            return error
        return None


class _Failed(DispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the last call of an operator that raised."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.call: tuple[Any, tuple[Any, ...], dict[str, Any]] | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            return func(*args, **kwargs)
        except Exception:
            if isinstance(func, torch._ops.OpOverload):
                self.call = func, args, kwargs
            raise
