"""How a script sets up a platform: imports, settings, and the environment of a new process."""

from __future__ import annotations

import dataclasses
import shlex
from typing import TYPE_CHECKING, Any

from shadowrun import sim
from shadowrun.errors import PlatformError, UsageError
from shadowrun.platforms import parse, settings
from shadowrun.platforms.backends import BACKENDS, backend_of
from shadowrun.platforms.untrusted_specs import simulated_flaws, spec_of_user, trusted_spec
from shadowrun.repro.quoting import Code, code, dotted_name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shadowrun.types import Permissions, RunInfo

__all__ = ["PlatformSetup", "allowed_platforms", "check_harmless", "platform_setup_of", "platform_setups"]

_SIMULATED = """\
# The device is simulated: for a real one, this script would need torch (and its plug-in) only.
from shadowrun import sim

sim.enable({name}, flaws=[f for f in os.environ.get("SIM_FLAWS", {flaws}).split(",") if f])"""
_ENTRY = """\
for entry in importlib.metadata.entry_points(group="shadowrun.platforms", name={name}):
    entry.load()()"""
_OWN = "{}.{}({}).__enter__()"
# By torch's public functions, where shadowrun itself takes narrower private ones: scripts are shown to the maintainers
# of torch and of platforms.
_SETTINGS = {
    "threads": "torch.set_num_threads({})",
    "mkldnn": "torch.backends.mkldnn.enabled = {}",
    "deterministic": "torch.use_deterministic_algorithms({})",
    "flush_denormal": "torch.set_flush_denormal({})",
    "tf32": "torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = {}",
    "float32_matmul_precision": "torch.set_float32_matmul_precision({})",
}


@dataclasses.dataclass(frozen=True)
class PlatformSetup:
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
    starting: Code = code("")  # noqa: RUF009 - frozen
    settings: tuple[Code, ...] = ()
    environment: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def flushes(self) -> bool:
        """Whether its settings flush denormal numbers to zero."""
        return any("set_flush_denormal(True)" in line for line in self.settings)


def platform_setup_of(spec: str, facts: dict[str, Any]) -> PlatformSetup:
    """How to get to a platform.

    Args:
        spec: As the data file has it.
        facts: The platform's fingerprint.

    Raises:
        UsageError: The data file does not have all of it.
    """
    wanted = parse(spec)
    # Data files keep no paths, which name users and machines.
    hidden = [key for key, value in wanted.settings if value == "(a path)"]
    if hidden or any(key == settings.PYTHON for key, _ in wanted.settings):
        raise UsageError(
            f"Platform {spec!r} was set by a path ({', '.join(hidden) or settings.PYTHON}), which data files do not "
            "keep: no script can be written for it.",
            slug="no-repro",
        )
    own = {setting.name: setting for setting in backend_of(wanted.device_type).own_settings}
    unknown = [
        key
        for key, value in wanted.settings
        if key not in (_SETTINGS | own) and not settings.environment(((key, value),))
    ]
    if unknown:
        raise UsageError(f"No script can make the setting {unknown[0]!r} of platform {spec!r}.", slug="no-repro")
    kind = wanted.device_type
    modules: tuple[str, ...] = ()
    starting = code("")
    flaws = simulated_flaws(facts)
    if flaws is not None:
        modules, starting = ("os",), code(_SIMULATED, name=kind, flaws=",".join(flaws))
    # A plug-in without a row there registers itself by its entry point.
    elif kind in BACKENDS or backend_of(kind).package:
        package = backend_of(kind).package
        starting = code("import {}", dotted_name(package)) if package else code(BACKENDS[kind].script_setup)
    else:
        modules, starting = ("importlib.metadata",), code(_ENTRY, name=kind)
    lines = [
        code(_OWN, dotted_name(own[key].module), dotted_name(own[key].function), value)
        if key in own
        else code(_SETTINGS[key], value)
        for key, value in wanted.settings
        if key in own or key in _SETTINGS
    ]
    modules += tuple(dict.fromkeys(own[key].module for key, _ in wanted.settings if key in own))
    if dict(wanted.settings).get("flush_denormal"):
        lines.insert(0, code("torch.set_num_threads(1)  # the mode is one thread's"))
    variables = settings.environment(wanted.settings) if wanted.needs_process else {}
    return PlatformSetup(
        spec, wanted.device_string, modules, starting, tuple(dict.fromkeys(lines)), dict(sorted(variables.items()))
    )


def allowed_platforms(info: RunInfo, allowed: Permissions) -> RunInfo:
    """A run as a file has it, with platforms that may be started.

    Args:
        info: As the file has it.
        allowed: What the user named.

    Raises:
        PlatformError: A platform takes more than this process, and the user did not name it.
        DataFileError: It has flaws that do not exist.
    """
    flaws = simulated_flaws(info.target_fingerprint)
    # Before anything of the platform is started: to start one may import a package or run another Python.
    target = trusted_spec(info.target, allowed.names, simulated=flaws is not None)
    simulated = simulated_flaws(info.ref_fingerprint) is not None
    ref = trusted_spec(info.ref, allowed.names, simulated=simulated, option="--ref")
    return dataclasses.replace(info, target=target, ref=ref)


def check_harmless(info: RunInfo, allowed: Permissions) -> None:
    """Refuse to simulate, in this process, what would end, block or change it, where only a file asks for that.

    Args:
        info: As the file has it.
        allowed: What the user named.

    Raises:
        PlatformError: The simulated device has such flaws, or would be registered in a program, and the user did not
            name it.
        DataFileError: It has flaws that do not exist.
    """
    if allowed.modules:
        return
    # torch has one private device, and renames it once: a program would keep the name that the file chose.
    registered = () if sim.is_enabled() or allowed.is_command else _simulated(info)
    name = next((n for n in registered if spec_of_user(n, allowed.names) is None), None)
    if name is not None:
        raise PlatformError(
            f"The simulated device of this file would be registered in this program for good, as {ascii(name)[:300]}, "
            "and only the data file names it, which may come from another person. Use the commands `shadowrun "
            f"explain` and `shadowrun repro`, which have a process of their own, or name it: allow=[{name!r}].",
            slug="platform-refused",
        )
    # A file from elsewhere must not be able to end or block the process that reads it.
    fatal = [f for f in simulated_flaws(info.target_fingerprint) or () if f in sim.FATAL]
    if fatal and spec_of_user(info.target, allowed.names) is None:
        raise PlatformError(
            f"The simulated device of this file has {fatal[0]}, which would end or block this process, and only the "
            "data file names it, which may come from another person. If you know what it is, name the device: "
            f"--target {shlex.quote(ascii(info.target)[1:-1][:300])}.",
            slug="platform-refused",
        )


def _simulated(info: RunInfo) -> Iterator[str]:
    """The platforms of a run for which the simulated device is registered, if it is not."""
    for spec, facts in ((info.target, info.target_fingerprint), (info.ref, info.ref_fingerprint)):
        if simulated_flaws(facts) is not None or parse(spec).device_type == "sim":
            yield spec


def platform_setups(info: RunInfo) -> tuple[PlatformSetup, PlatformSetup]:
    """Target and reference of a run."""
    return platform_setup_of(info.target, info.target_fingerprint), platform_setup_of(info.ref, info.ref_fingerprint)
