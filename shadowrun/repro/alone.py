"""The text of scripts in which one platform runs alone: against itself, or to its end."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from shadowrun.repro import script
from shadowrun.repro.bodies import BODIES
from shadowrun.repro.quoting import mapping, quoted

if TYPE_CHECKING:
    from shadowrun.repro.script import Script

__all__ = ["Ends", "Itself", "write_ends", "write_itself"]

_TAIL = """

def reference():
    \"\"\"Element by element.\"\"\"
    n = max(t.numel() for t in INPUTS.values() if isinstance(t, torch.Tensor))
    alone = [call({name: at(t, k) for name, t in INPUTS.items()}) for k in range(n)]
    return {name: torch.cat([one[name] for one in alone]) for name in alone[0]}


def at(t, k):
    return t[k : k + 1] if isinstance(t, torch.Tensor) and t.dim() else t


def target():
    \"\"\"All elements at once.\"\"\"
    return call(INPUTS)
"""

_TRANSPOSED = """

def turned(t):
    \"\"\"The same values, with the first and the last dimension exchanged in memory.\"\"\"
    if isinstance(t, list):
        return [turned(one) for one in t]
    if not isinstance(t, torch.Tensor) or t.dim() < 2 or t.numel() < 2:
        return t
    return t.transpose(0, -1).contiguous().transpose(0, -1)
"""

_STRIDED = """

def turned(t):
    \"\"\"The same values, transposed in memory and with a gap after each element.\"\"\"
    if isinstance(t, list):
        return [turned(one) for one in t]
    if not isinstance(t, torch.Tensor) or t.dim() == 0 or t.numel() < 2:
        return t
    t = t.transpose(0, -1)
    wide = torch.zeros(*t.shape, 2, dtype=t.dtype)
    wide[..., 0] = t
    return wide[..., 0].transpose(0, -1)
"""

_LAYOUT = """

def reference():
    \"\"\"Contiguous inputs.\"\"\"
    return call(INPUTS)


def target():
    \"\"\"The same values, laid out otherwise.\"\"\"
    return call({name: turned(t) for name, t in INPUTS.items()})
"""

_SLICE = """

BATCHED, ITEM = BATCHED_ITEM


def reference():
    \"\"\"One item of the batch alone.\"\"\"
    return call({name: t[ITEM : ITEM + 1] if name in BATCHED else t for name, t in INPUTS.items()})


def target():
    \"\"\"The same item in its batch.\"\"\"
    return {name: t[ITEM : ITEM + 1] for name, t in call(INPUTS).items()}
"""
_LAYOUTS = {"strided": _STRIDED + _LAYOUT, "transposed": _TRANSPOSED + _LAYOUT}

_HERE = """

def here():
    \"\"\"The call, in a process of its own.\"\"\"
{settings}    torch.empty(1, device=TARGET_DEVICE)
    print("ready", flush=True)
    try:
        for value in call(TARGET_DEVICE).values():
            for t in value if isinstance(value, (list, tuple)) else [value]:
                torch.as_tensor(t).cpu()
    except Exception as error:
        print(f"{{OPERATOR}} on {{TARGET}} raises {{type(error).__name__}}: {{error}}", file=sys.stderr)


def memory(process):
    \"\"\"Bytes that a process holds; 0 where the system does not tell.\"\"\"
    try:
        return int(Path(f"/proc/{{process.pid}}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, IndexError):
        return 0


def main():
    if sys.argv[1:] == ["here"]:
        here()
        return
    environment = os.environ | {environment}
    process = subprocess.Popen([sys.executable, __file__, "here"], stdout=subprocess.PIPE, text=True, env=environment)
    if process.stdout.readline() != "ready\\n":
        print(f"there is no {{TARGET}} here")
        sys.exit(2)
    start, base, how = time.monotonic(), memory(process), ""
    while process.poll() is None and not how:
        time.sleep(0.02)
        if time.monotonic() - start > LIMIT_S:
            how = f"does not end within {{LIMIT_S:g}} s"
        elif memory(process) - base > LIMIT_BYTES:
            how = f"takes more than {{LIMIT_BYTES / 2**30:.3g}} GiB"
    process.kill()
    status = process.wait()
    if not how and status:
        how = f"ends its process: {{signal.Signals(-status).name if status < 0 else f'exit status {{status}}'}}"
    print(f"{{OPERATOR}} on {{TARGET}} {{how or 'comes to an end'}}")
    sys.exit(1 if how else 0)


if __name__ == "__main__":
    with torch.no_grad():
        main()
"""

_MAIN = """

def main():
{settings}{body}

if __name__ == "__main__":
    with torch.no_grad():
        main()
"""

_AGAIN = """\
    environment = {environment}
    if any(os.environ.get(name) != value for name, value in environment.items()):
        sys.exit(subprocess.run([sys.executable, __file__], env=os.environ | environment).returncode)
"""

_CALL = """

def call(inputs, device=TARGET_DEVICE):
    \"\"\"Run the operator; gives the results that matter, on the CPU.\"\"\"
    memory = {{}}
    x = {{name: copied(value, {where}, memory) for name, value in inputs.items()}}
    out = {call}
    return {{{results}}}
"""


@dataclasses.dataclass(frozen=True)
class Itself:
    """A platform against itself.

    Attributes:
        change: ``strided`` or ``transposed``, for inputs in another layout; else empty.
        batched: Inputs with a batch, for an item of it alone; else empty.
        item: Which.
    """

    change: str = ""
    batched: tuple[str, ...] = ()
    item: int = 0


@dataclasses.dataclass(frozen=True)
class Ends:
    """What a call may take before it counts as endless.

    Attributes:
        seconds: Of wall time.
        n_bytes: Of memory.
    """

    seconds: float = 60.0
    n_bytes: int = 4 << 30


def write_itself(content: Script, how: Itself) -> str:
    """The text of a script that calls an operator in two ways on one platform.

    Args:
        content: Its kind is ``mismatch``, its target the platform, its reference the other way by its name.
        how: The two ways; without change and batch: all elements at once, and one by one.
    """
    place = content.target
    modules = ("os", "subprocess") if place.environment else ()
    head = dataclasses.replace(
        content, modules=(*content.modules, *modules), target=dataclasses.replace(place, environment=())
    )
    results = ", ".join(f"{quoted(name)}: {expression}.cpu()" for name, expression in content.results)
    where = script.stays(content) if content.on_cpu else "device"
    if how.change:
        ways = _LAYOUTS[how.change]
    elif how.batched:
        batched = "".join(f"{quoted(name)}, " for name in how.batched)
        ways = _SLICE.replace("BATCHED_ITEM", f"({batched}), {int(how.item)}")
    else:
        ways = _TAIL
    settings = _AGAIN.format(environment=mapping(dict(place.environment))) if place.environment else ""
    settings += "".join(f"    {line}\n" for line in place.settings)
    body = BODIES["mismatch"].format(device="" if place.device == "cpu" else script.PRESENT).lstrip("\n")
    parts = (
        script.head(head),
        script.COPY_LAID,
        _CALL.format(call=content.call, results=results, where=where),
        script.differs(content),
        ways,
        _MAIN.format(settings=settings, body=body),
    )
    return "".join(parts)


def write_ends(content: Script, limits: Ends) -> str:
    """The text of a script that runs a call in a process of its own, and tells how that ended.

    Args:
        content: Its kind is ``ends``; its reference plays no part.
        limits: What the call may take.
    """
    place = content.target
    modules = ("os", "signal", "subprocess", "time")
    plain = dataclasses.replace(place, environment=())
    head = dataclasses.replace(content, modules=(*content.modules, *modules), target=plain, ref=plain)
    return "".join(
        (
            script.head(head),
            f"LIMIT_S, LIMIT_BYTES = {limits.seconds:g}, {limits.n_bytes}\n",
            script.COPY_LAID if content.laid else script.COPY,
            script.call(content),
            _HERE.format(
                settings="".join(f"    {line}\n" for line in place.settings),
                environment=mapping(dict(place.environment)),
            ),
        )
    )
