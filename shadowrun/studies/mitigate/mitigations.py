"""Mitigations: what could make platforms give the same results, and how each is applied to an unchanged program.

Most are settings of a platform (`platforms.settings`). The others are done in the child process that runs the program,
see `applying`: flags of torch, and wrappers of the program's modules.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shadowrun.errors import UsageError
from shadowrun.numerics.hash_ladder import mantissa_of
from shadowrun.platforms.settings import ENV, environment
from shadowrun.platforms.spec import PlatformSpec, parse

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from shadowrun.recording.model import Form, Recording

__all__ = ["DEFAULT_BITS", "Mitigation", "chosen", "conflicts", "platform_under", "why_not_applicable"]

DEFAULT_BITS: Final = (8, 16)
"""Low mantissa bits that are truncated by default, each number a mitigation."""

TRUNCATE: Final = "truncate="
_MAX_BITS: Final = 52
_FLOATS: Final = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class Mitigation:
    """One way to make platforms agree.

    Attributes:
        name: ``threads=1``.
        settings: Settings of a CPU platform that it stands for, as text; empty if it has none.
        in_process: Whether the child process does something for it, see `applying`.
        kind: Of two with the same kind, a combination has one.
        applied: What shadowrun does in the child process.
        in_a_program: What a program does to have it always.
    """

    name: str
    settings: str = ""
    in_process: bool = False
    kind: str = ""
    applied: str = ""
    in_a_program: str = ""

    @property
    def exclusive(self) -> str:
        """Its kind, or its name: equal for two that cannot be combined."""
        return self.kind or self.name


_EVERY: Final = (
    Mitigation(
        "deterministic",
        # cuBLAS repeats itself only with a workspace of fixed size: without the variable, torch raises.
        "deterministic=on,env:CUBLAS_WORKSPACE_CONFIG=:4096:8",
        kind="deterministic",
        applied="deterministic algorithms from the start; an operator that has none raises an error",
        in_a_program="torch.use_deterministic_algorithms(True)",
    ),
    Mitigation(
        "float32_matmul_precision=highest",
        "float32_matmul_precision=highest",
        kind="float32_matmul_precision",
        applied="float32 products in full precision from the start",
        in_a_program="torch.set_float32_matmul_precision('highest')",
    ),
    Mitigation(
        "tf32=off",
        # It overrides what a program asks of NVIDIA's libraries, so it works for an unchanged one.
        "env:NVIDIA_TF32_OVERRIDE=0",
        applied="environment of the process",
        in_a_program="NVIDIA_TF32_OVERRIDE=0",
    ),
    Mitigation(
        "bf16_reduction=off",
        in_process=True,
        applied="flags of torch.backends.cuda.matmul at the start",
        in_a_program="torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False; likewise fp16",
    ),
    Mitigation(
        "threads=1",
        "threads=1",
        kind="threads",
        applied="environment of the process, and torch.set_num_threads at the start",
        in_a_program="OMP_NUM_THREADS=1",
    ),
    Mitigation(
        "mkldnn=off",
        "mkldnn=off",
        kind="mkldnn",
        applied="oneDNN switched off at the start",
        in_a_program="torch.backends.mkldnn.enabled = False",
    ),
    Mitigation(
        "mkl_cbwr=COMPATIBLE",
        "mkl_cbwr=COMPATIBLE",
        kind="mkl_cbwr",
        applied="environment of the process",
        in_a_program="MKL_CBWR=COMPATIBLE",
    ),
    Mitigation(
        "isa=default",
        "isa=default",
        kind="isa",
        applied="environment of the process",
        in_a_program="ATEN_CPU_CAPABILITY=default",
    ),
    Mitigation(
        "channels_last",
        in_process=True,
        applied="wrapper: 4-dimensional parameters and inputs of each outermost module are laid out channels last",
        in_a_program="model.to(memory_format=torch.channels_last), and likewise its inputs",
    ),
    Mitigation(
        "float64",
        in_process=True,
        applied="wrapper: each outermost module computes in float64, and what it returns is rounded back",
        in_a_program="model.double(), and model(x.double()).to(x.dtype)",
    ),
)

_WRAPPERS: Final = ("channels_last", "float64")


def chosen(
    only: Sequence[str] = (), bits: Sequence[int] | None = None, further: Sequence[str] = ()
) -> list[Mitigation]:
    """The mitigations of a sweep.

    Args:
        only: Names of those that are wanted; all by default.
        bits: Numbers of low mantissa bits to truncate, each a mitigation, with `only` too; `DEFAULT_BITS` by default.
        further: Settings of the CPU, such as ``onednn_isa=AVX2``, each a mitigation.

    Raises:
        UsageError: There is no such mitigation, or a wrong number of bits.
        PlatformError: There is no such setting of the CPU, or it has no such value.
    """
    truncations = [_truncation(n_bits) for n_bits in (DEFAULT_BITS if bits is None else bits)]
    known = {m.name: m for m in (*_EVERY, *truncations)}
    for name in only:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1, cutoff=0.5)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise UsageError(
                f"--only {name!r} is no mitigation.{hint} There are: {', '.join(known)}.", slug="bad-option"
            )
    # Bits that were asked for are wanted, even where --only names other mitigations.
    wanted = {*only, *(m.name for m in truncations if bits is not None)} if only else known
    found = {name: m for name, m in known.items() if name in wanted}
    for text in further:
        # As a platform: the parser of settings refuses a wrong one with its own message.
        for key, value in parse(f"cpu[{text}]").settings:
            # The canonical text: one that is known is the same mitigation.
            setting = str(PlatformSpec("cpu", None, ((key, value),)))[len("cpu[") : -1]
            found.setdefault(setting, Mitigation(setting, setting, kind=key, applied="setting of the platform"))
    return list(found.values())


def _truncation(n_bits: int) -> Mitigation:
    if not 1 <= n_bits <= _MAX_BITS:
        raise UsageError(f"--truncate {n_bits}: use numbers of bits from 1 to {_MAX_BITS}.", slug="bad-option")
    return Mitigation(
        f"{TRUNCATE}{n_bits}",
        in_process=True,
        kind="truncate",
        applied=f"wrapper: what each innermost module returns loses its lowest {n_bits} mantissa bits",
        in_a_program="a forward hook on each innermost module",
    )


def conflicts(mitigations: Sequence[Mitigation]) -> bool:
    """Whether two of them cannot be combined: other values of one setting."""
    return len({m.exclusive for m in mitigations}) < len(mitigations)


def platform_under(spec: PlatformSpec, mitigations: Sequence[Mitigation]) -> PlatformSpec:
    """A platform with the settings of mitigations, which replace its own.

    Raises:
        PlatformError: The settings contradict each other.
    """
    settings = dict(spec.settings)
    for mitigation in mitigations:
        if not mitigation.settings:
            continue
        for key, value in parse(f"cpu[{mitigation.settings}]").settings:
            settings[key] = value
            # The platform may have set the same by the name of the variable.
            for name in environment(((key, value),)):
                if key != f"{ENV}{name}":
                    settings.pop(f"{ENV}{name}", None)
    return parse(str(PlatformSpec(spec.device_type, spec.index, tuple(sorted(settings.items())))))


def why_not_applicable(mitigation: Mitigation, recording: Recording) -> str:
    """Why a mitigation cannot do anything for a program, by a recording of it without one; empty if it can."""
    name = mitigation.name
    facts = recording.processes[0].fingerprint
    if name in ("tf32=off", "bf16_reduction=off"):
        return (
            "" if any(c.device == "cuda" for c in recording.contexts) else "the program made no call on a CUDA device"
        )
    if name == "mkldnn=off" and not facts.get("onednn"):
        return "this torch was built without oneDNN"
    if name.startswith("mkl_cbwr=") and not facts.get("mkl"):
        return "this torch was built without MKL"
    if name in _WRAPPERS or name.startswith(TRUNCATE):
        return _why_not_wrapped(name, list(_forms_in_modules(recording)))
    return ""


def _why_not_wrapped(name: str, forms: Sequence[Form]) -> str:
    if not forms:
        return "the program calls no torch.nn.Module, which the wrapper needs"
    if name == "channels_last":
        has_images = any(len(form.shape) == 4 and mantissa_of(form.dtype) for form in forms)
        return "" if has_images else "no module of the program has a result with 4 dimensions"
    if name == "float64":
        return "" if any(form.dtype in _FLOATS for form in forms) else "no module computes in a shorter format"
    n_bits = int(re.sub(r"\D", "", name))
    longer = any(mantissa_of(form.dtype) > n_bits for form in forms)
    return "" if longer else f"no result of a module has more than {n_bits} mantissa bits"


def _forms_in_modules(recording: Recording) -> Iterator[Form]:
    """Forms of results inside modules, each once."""
    inside = [bool(context.module) for context in recording.contexts]
    seen: set[int] = set()
    for call, context in enumerate(recording.calls["context"].tolist()):
        if inside[context]:
            seen.update(recording.results["form"][row] for row in recording.results_of(call))
    yield from (recording.forms[form] for form in sorted(seen))
