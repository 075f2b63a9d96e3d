"""Stand-alone scripts: what one shows (`ScriptSpec`), its text from ``templates/``, its files, and a try of it.

One writer for the findings of a run, compiled regions and the cases of a sweep.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.current_folder import from_folder_of_user
from shadowrun.replay.memory_effects import GUARD_BYTES
from shadowrun.repro.call_code import needs_layout
from shadowrun.repro.quoting import Code, code, dotted_name, in_comment, in_docstring, literal
from shadowrun.store.atomic_write import write_text
from shadowrun.store.captured_inputs import NOT_KEPT, write_private
from shadowrun.store.records import REGION
from shadowrun.types import Cause, Permissions

if TYPE_CHECKING:
    from collections.abc import Mapping

    import jinja2

    from shadowrun.analysis import Finding
    from shadowrun.repro.platform_setup import PlatformSetup
    from shadowrun.repro.result_checks import Check
    from shadowrun.store.combine.combined_runs import SourceRun

__all__ = [
    "EXIT_STATUS",
    "Repro",
    "ReproOptions",
    "ScriptSpec",
    "publish",
    "render",
    "run_script",
    "templates",
    "versions_text",
    "why_no_inputs",
]

EXIT_STATUS = "Exit status: 1 while the fault is there, 0 when it is gone, 2 if this machine cannot show it."
# Importing torch alone takes seconds, on a busy machine many.
TIME_LIMIT_S = 120.0
_COMPARING = ("mismatch", "unstable", "itself")
_PROCESS_MODULES = ("os", "subprocess", "tempfile")
# What the templates of a kind import; all import `sys`.
_MODULES = {
    "ends": ("os", "signal", "subprocess", "time"),
    "fallback": ("warnings",),
    "graph": ("copy",),
    "slow": ("time",),
}


@dataclass(frozen=True, slots=True)
class Repro:
    """A script that was written.

    Attributes:
        script: The file.
        inputs: The inputs that it uses, in words.
        shows_fault: Whether it exits 1 on this machine; None where the target is not here.
        said: What it printed.
        notes: Sentences on what a reader should know: why nothing was minimised, what depends on earlier calls.
        spec: What it shows.
    """

    script: Path
    inputs: str
    shows_fault: bool | None
    said: str
    notes: tuple[str, ...]
    spec: ScriptSpec = field(repr=False)


@dataclass(frozen=True, slots=True)
class ReproOptions:
    """How a script is made, be it of a call, a compiled region or a case of a sweep.

    Attributes:
        minimise: Make the inputs smaller and simpler while the fault stays, if the target is on this machine.
        time_limit_s: Time limit of the minimisation.
        allowed: Platforms and modules that the data file may have started and imported.
    """

    minimise: bool = True
    time_limit_s: float = 30.0
    allowed: Permissions = Permissions()  # noqa: RUF009 - frozen

    @property
    def seconds(self) -> float:
        """Time limit of the minimisation; 0 where there is to be none."""
        return self.time_limit_s if self.minimise else 0.0


def why_no_inputs(finding: Finding, sources: tuple[SourceRun, ...]) -> str:
    """Why a finding has no captured inputs, and what to do about it."""
    text = f"No inputs of {finding.op} ({finding.kind}) were captured"
    # Combining copies rows only: the folders of inputs stay with the single files.
    if sources:
        files = ", ".join(repr(sources[number].file) for number in finding.runs[:3])
        return f"{text} in a combined file: give the data file of one of its runs, {files}."
    if finding.kind == "mismatch" and finding.cause is Cause.RANDOMNESS:
        return f"{text}: the operator is random, and one call cannot show a wrong distribution."
    why = f"{text}: the run was in memory, had capture=False, or the inputs took more than a quarter of capture=. "
    if finding.op.startswith(REGION):
        reason = finding.evidence.partition(NOT_KEPT)[2]
        why = f"{text}: {reason}. " if reason else why
        return why + (
            "Record the run again with a larger capture=, run `shadowrun compile --repro DIR` on the program, or call "
            "report.repro(DIR) of shadowrun.compile_check(model, *inputs)."
        )
    return why + "Record the run again with a larger capture=."


@dataclass(frozen=True)
class ScriptSpec:
    """What a script shows.

    Attributes:
        kind: ``mismatch``, ``unstable`` (a mismatch that depends on earlier calls), ``raises``, ``fallback``, ``slow``,
            ``accepts`` (what the reference refuses, or refuses by another exception), ``memory`` (what a call does to
            memory), ``itself`` (one platform in two ways), ``ends`` (a call that ends its process), ``graph`` (a graph
            compiled and eagerly).
        title: The finding in one line.
        story: Where it was seen, with which versions; lines.
        inputs: What ``inputs.pt`` holds.
        imports: Further modules to import.
        setup: Code before the functions.
        target, ref: The platforms; for ``ends`` the target only; None for a graph.
        operator: ``aten::add.Tensor``.
        lines: The call, which gives ``out``, with the lines around it.
        results: Names of the results that are looked at, with their expressions.
        checks: How each of these is compared.
        on_cpu: Arguments that stay on the CPU, whatever the device of the call.
        values: What only the template of this kind takes, by the names there.
    """

    kind: str
    title: str
    story: tuple[str, ...]
    inputs: Mapping[str, Any]
    imports: tuple[str, ...] = ()
    setup: tuple[Code, ...] = ()
    target: PlatformSetup | None = None
    ref: PlatformSetup | None = None
    operator: str = ""
    lines: tuple[Code, ...] = ()
    results: Mapping[str, Code] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()
    on_cpu: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def in_processes(self) -> bool:
        """Whether each side needs a process with its environment."""
        sides = self.target, self.ref
        if None in sides or self.kind in ("itself", "ends"):
            return False
        return any(side.environment for side in sides if side) or bool(self.ref and self.ref.settings)


def render(spec: ScriptSpec) -> str:
    """The text of a script."""
    places = [place for place in (spec.target, spec.ref) if place is not None]
    modules = {"sys", *spec.imports, *_MODULES.get(spec.kind, ()), *(m for place in places for m in place.modules)}
    if spec.in_processes or (spec.kind == "itself" and places[0].environment):
        modules.update(_PROCESS_MODULES if spec.in_processes else ("os", "subprocess"))
    bounds = {c.name: c.allowed for c in spec.checks if not isinstance(c.allowed, torch.Tensor)}
    context = {
        "kind": spec.kind,
        "title": in_docstring(spec.title),
        "story": list(map(in_docstring, spec.story)),
        "imports": list(map(dotted_name, sorted(modules))),
        "setup": [text for text in dict.fromkeys((*spec.setup, *(place.starting for place in places))) if text],
        "target": spec.target,
        "ref": spec.ref,
        "in_processes": spec.in_processes,
        "operator": spec.operator,
        "lines": spec.lines,
        "results": spec.results,
        "on_cpu": spec.on_cpu,
        "laid": spec.kind in ("memory", "itself") or needs_layout(spec.inputs),
        "compares": spec.kind in _COMPARING,
        "allowed": bounds,
        "stored": len(bounds) < len(spec.checks),
        "strides": any(c.strides for c in spec.checks),
        "signed_zeros": any(c.signed_zeros for c in spec.checks),
        "sides": [code("compiled"), code("eagerly")]
        if spec.kind == "graph"
        else [code("on {{TARGET}}"), code("on {{REFERENCE}}")],
        "guard_bytes": GUARD_BYTES,
    }
    return templates().get_template("script.py.txt").render(context | dict(spec.values))


@functools.cache
def templates() -> jinja2.Environment:
    """The templates; each value that they insert is quoted, unless `shadowrun.repro.quoting` made code of it."""
    import jinja2

    made = jinja2.Environment(  # noqa: S701 - no HTML; `finalize` quotes
        loader=jinja2.PackageLoader("shadowrun.repro"), finalize=literal, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    made.filters["in_comment"] = in_comment
    return made


def publish(
    spec: ScriptSpec,
    folder: Path,
    versions: str,
    notes: list[str],
    *,
    shown: str,
    tried: bool = True,
    limit_s: float = TIME_LIMIT_S,
    path: Path | None = None,
    gone: str = "the script does not show the fault here: it depends on what happened before the call",
) -> Repro:
    """Write a script, its inputs and the versions, and run it as its reader will.

    Args:
        spec: What it shows.
        folder: Where to; it is made if it is not there.
        versions: The text of the file of versions.
        notes: Gets what a reader should know.
        shown: The inputs, in words.
        tried: Whether to run it.
        limit_s: How long it may take.
        path: A folder that it imports modules from.
        gone: The note where it exits 0.
    """
    text = render(spec)
    folder.mkdir(parents=True, exist_ok=True)
    script = folder / "repro.py"
    stored = {c.name: c.allowed for c in spec.checks if isinstance(c.allowed, torch.Tensor)}
    write_private(dict(spec.inputs) | ({"allowed": stored} if stored else {}), folder / "inputs.pt")
    write_text(script, text)
    write_text(folder / "versions.json", versions)
    shows, said = _try(spec, script, notes, limit_s, path, gone) if tried else (None, "")
    return Repro(script, shown, shows, said, tuple(notes), spec)


def _try(
    spec: ScriptSpec, script: Path, notes: list[str], limit_s: float, path: Path | None, gone: str
) -> tuple[bool | None, str]:
    """Whether a script shows the fault here, None where it cannot say; and what it printed."""
    try:
        # In a new process, as its reader will run it: this process has settings and flaws that a script lacks.
        done = run_script(script, limit_s, path)
    except subprocess.TimeoutExpired:
        notes.append(f"the script did not end within {limit_s:g} s")
        return None, ""
    said = done.stdout.strip()
    # A compiler may log an exception and fall back to eager: then equal results prove nothing.
    failed = "Traceback" in done.stderr and (done.returncode == 1 or spec.kind == "graph")
    if failed or done.returncode not in (0, 1):
        lines = (done.stderr.strip() if failed else said or done.stderr.strip()).splitlines()
        notes.append(f"the script shows nothing here: {lines[-1] if lines else done.returncode}")
        return None, said
    if done.returncode == 0:
        notes.append(gone)
    return done.returncode == 1, said


def run_script(script: Path, limit_s: float, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run a script as its reader will.

    Raises:
        TimeoutExpired: It takes too long.
    """
    # Files in the folder of the script, which may have been there before, are not to be imported as modules.
    # The variable holds for processes that the script starts too; `-P` for the script only.
    environment = {k: v for k, v in os.environ.items() if k != "SIM_FLAWS"} | {"PYTHONSAFEPATH": "1"}
    # What compilers find in the current folder is not theirs, see `current_folder`; names of the user's are from here.
    folders = ["" if path is None else str(path), *environment.get("PYTHONPATH", "").split(os.pathsep)]
    environment["PYTHONPATH"] = os.pathsep.join(str(from_folder_of_user(Path(name))) for name in folders if name)
    with tempfile.TemporaryDirectory(prefix="shadowrun-", ignore_cleanup_errors=True) as empty:
        return subprocess.run(  # noqa: S603 - the script that was just written
            [sys.executable, "-P", str(script.absolute())], capture_output=True, text=True, errors="replace",
            timeout=limit_s, check=False, env=environment, cwd=empty,
        )  # fmt: skip


def versions_text(content: Mapping[str, Any]) -> str:
    """The file of versions, JSON; empty where a data file has numbers that JSON lacks."""
    with contextlib.suppress(ValueError):
        return json.dumps(content, indent=1, allow_nan=False) + "\n"
    return "{}\n"
