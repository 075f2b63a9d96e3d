"""An accelerator with other settings: applied around the launch of one call, and put back exactly as they were."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from shadowrun.platforms import torchplatform

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shadowrun.platforms.spec import Setting

__all__ = ["device_settings"]

_SIM_TF32 = ("matmul-in-tf32", "convolution-in-tf32")


@contextlib.contextmanager
def device_settings(device_type: str, settings: tuple[tuple[str, Setting], ...]) -> Iterator[None]:
    """Apply the settings of a device other than the CPU for the length of a ``with`` block.

    They belong to the process, and are read when a kernel is launched: nobody has to wait for it inside the block.

    Args:
        device_type: ``cuda``; `sim` imitates it.
        settings: Pairs as in `PlatformSpec.settings`.
    """
    values = dict(settings)
    with contextlib.ExitStack() as stack:
        deterministic = values.get("deterministic")
        if deterministic is not None:
            stack.callback(torchplatform.set_deterministic_state, torchplatform.deterministic_state())
            torchplatform.set_deterministic_state((bool(deterministic), False))
        tf32 = values.get("tf32")
        if tf32 is not None and device_type == "cuda":
            stack.callback(torchplatform.set_cuda_precisions, torchplatform.cuda_precisions())
            torchplatform.allow_tf32(bool(tf32))
        elif tf32 is not None:
            from shadowrun.platforms import sim

            others = [name for name in sim.active() if name not in _SIM_TF32]
            stack.enter_context(sim.flaws(*others, *(_SIM_TF32 if tf32 else ())))
        yield
