"""How a script gets to a platform: what it imports, which settings it makes, whether that takes a process."""

from __future__ import annotations

import dataclasses
import shlex
from typing import TYPE_CHECKING, Any

from shadowrun.errors import PlatformError, UsageError
from shadowrun.platforms import parse, settings
from shadowrun.platforms.sim import FATAL
from shadowrun.platforms.spec import PLUGINS
from shadowrun.platforms.untrusted import accepted, named, simulated_flaws
from shadowrun.repro.quoting import literal, quoted

if TYPE_CHECKING:
    from shadowrun.types import Allowed, RunInfo

__all__ = ["Place", "check_harmless", "checked", "place_of", "places_of"]

_SIMULATED = """\
# The device is simulated: for a real one, this script would need torch (and its plug-in) only.
from shadowrun.platforms import sim

sim.enable({name}, flaws=[f for f in os.environ.get("SIM_FLAWS", {flaws}).split(",") if f])"""
_LAZY = "import torch._lazy.ts_backend\n\ntorch._lazy.ts_backend.init()"
_ENTRY = """\
for entry in importlib.metadata.entry_points(group="shadowrun.platforms", name={name}):
    entry.load()()"""
_SETTINGS = {
    "threads": "torch.set_num_threads({})",
    "mkldnn": "torch.backends.mkldnn.enabled = {}",
    "deterministic": "torch.use_deterministic_algorithms({})",
    "flush_denormal": "torch.set_flush_denormal({})",
    "tf32": "torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = {}",
    "float32_matmul_precision": "torch.set_float32_matmul_precision({})",
}


@dataclasses.dataclass(frozen=True)
class Place:
    """One platform, for a script.

    Attributes:
        name: As reports show it.
        device: For torch: ``npu:1``.
        modules: What has to be imported before `starting` is run.
        starting: Lines that make the device usable; empty for torch's own.
        settings: Lines that make the CPU's settings.
        environment: Variables that its process must have from the beginning.
    """

    name: str
    device: str
    modules: tuple[str, ...] = ()
    starting: str = ""
    settings: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


def place_of(spec: str, facts: dict[str, Any]) -> Place:
    """How to get to a platform.

    Args:
        spec: As the data file has it.
        facts: The platform's fingerprint.

    Raises:
        UsageError: The data file does not tell all of it.
    """
    wanted = parse(spec)
    hidden = [key for key, value in wanted.settings if value == "(a path)"]
    if hidden or any(key == settings.PYTHON for key, _ in wanted.settings):
        raise UsageError(
            f"Platform {spec!r} was set by a path ({', '.join(hidden) or settings.PYTHON}), which data files do not "
            "keep: no script can be written for it.",
            slug="no-repro",
        )
    unknown = [
        key for key, value in wanted.settings if key not in _SETTINGS and not settings.environment(((key, value),))
    ]
    if unknown:
        raise UsageError(f"No script can make the setting {unknown[0]!r} of platform {spec!r}.", slug="no-repro")
    kind = wanted.device_type
    modules: tuple[str, ...] = ()
    starting = ""
    flaws = simulated_flaws(facts)
    if flaws is not None:
        modules, starting = ("os",), _SIMULATED.format(name=quoted(kind), flaws=quoted(",".join(flaws)))
    elif kind == "lazy":
        starting = _LAZY
    elif kind in PLUGINS:
        starting = f"import {PLUGINS[kind]}"
    elif kind not in ("cpu", "cuda", "xpu", "mps", "mtia"):
        modules, starting = ("importlib.metadata",), _ENTRY.format(name=quoted(kind))
    lines = [_SETTINGS[key].format(literal(value)) for key, value in wanted.settings if key in _SETTINGS]
    if dict(wanted.settings).get("flush_denormal"):
        lines.insert(0, "torch.set_num_threads(1)  # the mode is one thread's")
    variables = settings.environment(wanted.settings) if wanted.needs_process else {}
    return Place(
        spec, wanted.device_string, modules, starting, tuple(dict.fromkeys(lines)), tuple(sorted(variables.items()))
    )


def checked(info: RunInfo, allowed: Allowed) -> RunInfo:
    """A run whose platforms may be started, from one that a file tells.

    Args:
        info: As the file has it.
        allowed: What the person at the keyboard named.

    Raises:
        PlatformError: A platform takes more than this process, and nobody named it.
        DataFileError: It has flaws that there are not.
    """
    flaws = simulated_flaws(info.target_fingerprint)
    target = accepted(info.target, allowed.names, simulated=flaws is not None)
    simulated = simulated_flaws(info.ref_fingerprint) is not None
    ref = accepted(info.ref, allowed.names, simulated=simulated, option="--ref")
    return dataclasses.replace(info, target=target, ref=ref)


def check_harmless(info: RunInfo, allowed: Allowed) -> None:
    """Refuse to simulate, in this process, what would end or block it, where only a file asks for that.

    Args:
        info: As the file has it.
        allowed: What the person at the keyboard named.

    Raises:
        PlatformError: The simulated device has such flaws, and nobody named it.
        DataFileError: It has flaws that there are not.
    """
    fatal = [f for f in simulated_flaws(info.target_fingerprint) or () if f in FATAL]
    if fatal and not allowed.modules and named(info.target, allowed.names) is None:
        raise PlatformError(
            f"The simulated device of this file has {fatal[0]}, which would end or block this process, and only the "
            "data file names it, which may be somebody else's. If you know what it is, name the device: "
            f"--target {shlex.quote(ascii(info.target)[1:-1][:300])}.",
            slug="platform-refused",
        )


def places_of(info: RunInfo) -> tuple[Place, Place]:
    """Target and reference of a run."""
    return place_of(info.target, info.target_fingerprint), place_of(info.ref, info.ref_fingerprint)
