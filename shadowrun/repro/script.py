"""The text of a script: plain torch, from these pieces."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from shadowrun.repro.bodies import BODIES, CRASHES
from shadowrun.repro.effects import COPY_GUARDED, EFFECTS
from shadowrun.repro.quoting import in_docstring, literal, mapping, quoted

if TYPE_CHECKING:
    from shadowrun.repro.places import Place

__all__ = ["COPY", "COPY_LAID", "PRESENT", "Script", "call", "differs", "head", "stays", "write"]

COPY = '''

def copied(value, device):
    """A copy of an argument."""
    if isinstance(value, list):
        return [copied(v, device) for v in value]
    return value.to(device, copy=True) if isinstance(value, torch.Tensor) else value
'''

COPY_LAID = '''

def copied(value, device, memory):
    """A copy of an argument with its strides; `to` alone would make it dense, and part what shares memory."""
    if isinstance(value, list):
        return [copied(v, device, memory) for v in value]
    if not isinstance(value, torch.Tensor):
        return value
    storage = value.untyped_storage()
    key = storage.data_ptr(), value.dtype
    if key not in memory:
        whole = value.as_strided((storage.nbytes() // value.element_size(),), (1,), 0)
        memory[key] = whole.to(device, copy=True)
    return memory[key].as_strided(value.shape, value.stride(), value.storage_offset())
'''

_DIFFERS = '''

def differs(name, actual, expected):
    """Print how a result of the target differs from that of the reference; whether it does."""
    actual, expected = torch.as_tensor(actual), torch.as_tensor(expected)
    forms = [(str(t.dtype), tuple(t.shape){stride}) for t in (actual, expected)]
    if forms[0] != forms[1]:
        print(f"{{name}}: {{forms[0]}} on {{TARGET}}, {{forms[1]}} on {{REFERENCE}}")
        return True
    a, e = (torch.view_as_real(t.cpu()) if t.is_complex() else t.cpu() for t in (actual, expected))
    a, e = a.double(), e.double()
    allowed = ALLOWED[name]
    if isinstance(allowed, torch.Tensor):
        allowed = allowed.reshape(a.shape)
    same = (a == e) | (a.isnan() & e.isnan()) | ((a - e).abs() <= allowed) | torch.as_tensor(allowed == float("inf"))
{zeros}    wrong = (~same).nonzero().tolist()
    for index in wrong[:3]:
        i = tuple(index)
        print(f"{{name}}{{index}}: {{a[i].item():.9g}} on {{TARGET}}, {{e[i].item():.9g}} on {{REFERENCE}}")
    print(f"{{name}}: {{len(wrong)}} of {{same.numel()}} elements differ by more than rounding explains")
    return bool(wrong)
'''
_ZEROS = "    same &= (a != 0) | (a.signbit() == e.signbit())\n"

_DISTURBED = '''

def disturbed(value):
    """Other values of the same form."""
    if isinstance(value, list):
        return [disturbed(v) for v in value]
    return -value if isinstance(value, torch.Tensor) and value.is_floating_point() else value
'''

PRESENT = """\
    try:
        torch.empty(1, device=TARGET_DEVICE)
    except Exception as error:
        print(f"there is no {{TARGET}} here: {{str(error).strip().splitlines()[0]}}")
        sys.exit(2)
""".replace("{{", "{").replace("}}", "}")

_IN_PROCESS = '''

def in_process(side):
    """The results of one side, which needs a process with an environment of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.pt"
        command = [sys.executable, __file__, side, str(path)]
        subprocess.run(command, check=True, env=os.environ | ENVIRONMENT[side])
        return torch.load(path, weights_only=True)
'''

_REFERENCE = "\n\ndef reference():\n    return call({})\n"

_FLUSHED = """\
    results = call(TARGET_DEVICE)
    torch.set_flush_denormal(False)  # else the comparison would flush, too
    return results
"""

_SIDE = """\
    if len(sys.argv) == 3:  # started by `in_process`
        {{"target": on_target, "reference": on_reference}}[sys.argv[1]](sys.argv[2])
        return
"""


@dataclasses.dataclass(frozen=True)
class Script:
    """What a script is to do.

    Attributes:
        title: The finding in one line.
        story: Where it was seen, with which versions; lines.
        kind: ``mismatch``, ``unstable`` (a mismatch that depends on earlier calls), ``raises``, ``fallback``, ``slow``,
            ``accepts`` (what the reference refuses, or refuses it by another exception), ``memory`` (what a call does
            to memory).
        operator: ``aten::add.Tensor``.
        call: The call as an expression.
        results: Names of the results that are looked at, with their expressions.
        allowed: Differences that rounding explains, by result; None for those that lie in the file of the inputs.
        laid: Whether the layout of the inputs has to be kept.
        on_cpu: Arguments that lie on the CPU wherever the call runs.
        strides, signed_zeros: Whether these are compared too.
        target, ref: The platforms.
        key: Dispatch key of the target.
        ratio: How many times as long is slow.
        preamble: Lines before all that; `modules` is what they need.
        before, after: Lines around the call.
        modules: Further modules to import.
        written: For ``memory``, the arguments that the call may write to.
        returned: For ``memory``, expressions for what should be one of these, by the argument.
    """

    title: str
    story: tuple[str, ...]
    kind: str
    operator: str
    call: str
    results: tuple[tuple[str, str], ...]
    target: Place
    ref: Place
    allowed: tuple[tuple[str, float | None], ...] = ()
    laid: bool = False
    on_cpu: tuple[str, ...] = ()
    strides: bool = False
    signed_zeros: bool = False
    key: str = ""
    ratio: float = 10.0
    preamble: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    returned: tuple[tuple[str, str], ...] = ()

    @property
    def in_processes(self) -> bool:
        """Whether each side needs a process of its own."""
        return bool(self.target.environment or self.ref.environment or self.ref.settings)


def write(script: Script) -> str:
    """The text of a script."""
    if script.kind == "memory":
        parts = [head(script), COPY_GUARDED, EFFECTS, call(script)]
    else:
        parts = [head(script), COPY_LAID if script.laid else COPY, call(script)]
    if script.kind == "unstable":
        parts.append(_DISTURBED)
    if script.kind in ("mismatch", "unstable"):
        parts.append(differs(script))
    parts += [_sides(script), _main(script)]
    return "".join(parts)


def differs(script: Script) -> str:
    """The function that compares one result."""
    zeros = _ZEROS if script.signed_zeros else ""
    return _DIFFERS.format(stride=", t.stride()" if script.strides else "", zeros=zeros)


def head(script: Script) -> str:
    """What it says of itself, imports, and names: all that comes before its functions."""
    places = (script.target, script.ref)
    modules = {"sys", *script.modules, *(m for place in places for m in place.modules)}
    if script.in_processes:
        modules |= {"os", "subprocess", "tempfile"}
    modules |= {"fallback": {"warnings"}, "slow": {"time"}}.get(script.kind, set())
    lines = [f'"""{in_docstring(script.title)}', "", *map(in_docstring, script.story), '"""', ""]
    lines += [*(f"import {m}" for m in sorted(modules)), "from pathlib import Path", "", "import torch", ""]
    for start in dict.fromkeys((*script.preamble, *(place.starting for place in places))):
        lines += [start, ""] if start else []
    lines += [f"OPERATOR = {quoted(script.operator)}"]
    lines.append(f"TARGET, REFERENCE = {quoted(script.target.name)}, {quoted(script.ref.name)}")
    lines.append(f"TARGET_DEVICE = {quoted(script.target.device)}")
    if script.kind == "fallback":
        lines.append(f"KEY = {quoted(script.key)}")
    if script.in_processes:
        sides = (mapping(dict(place.environment)) for place in (script.target, script.ref))
        lines.append('ENVIRONMENT = {{"target": {}, "reference": {}}}'.format(*sides))
    lines.append('INPUTS = torch.load(Path(__file__).with_name("inputs.pt"), weights_only=True)')
    if script.kind == "memory":
        lines.append(f"WRITTEN = ({''.join(f'{quoted(name)}, ' for name in script.written)})")
    if script.kind in ("mismatch", "unstable"):
        stored = any(bound is None for _, bound in script.allowed)
        shown = ", ".join(f"{quoted(name)}: {literal(bound)}" for name, bound in script.allowed if bound is not None)
        lines.append("# Differences that rounding explains.")
        lines.append(f'ALLOWED = INPUTS.pop("allowed") | {{{shown}}}' if stored else f"ALLOWED = {{{shown}}}")
    return "\n".join(lines) + "\n"


def call(script: Script) -> str:
    """The function that makes the call."""
    memory = ", memory" if script.laid else ""
    where = "device"
    if script.on_cpu:
        where = stays(script)
    change, values = "", "value"
    if script.kind == "unstable":
        change, values = ", change=lambda value: value", "change(value)"
    lines = ["", "", f"def call(device{change}):", '    """Run the operator; gives the results that matter."""']
    if script.laid:
        lines.append("    memory = {}")
    lines.append(f"    x = {{name: copied({values}, {where}{memory}) for name, value in INPUTS.items()}}")
    lines += [f"    {line}" for line in (*script.before, f"out = {script.call}", *script.after)]
    results, returned = (
        "{" + ", ".join(f"{quoted(name)}: {expression}" for name, expression in pairs) + "}"
        for pairs in (script.results, script.returned)
    )
    if script.kind == "memory":
        lines[3] = '    """Run the operator; gives what it did to memory."""'
        return "\n".join([*lines, f"    return effects(x, {results}, {returned}, memory)"]) + "\n"
    return "\n".join([*lines, f"    return {results}"]) + "\n"


def stays(script: Script) -> str:
    """The device of an argument, where some stay on the CPU."""
    return f'"cpu" if name in ({"".join(f"{quoted(name)}, " for name in script.on_cpu)}) else device'


def _sides(script: Script) -> str:
    if script.in_processes:
        sides = (("target", script.target), ("reference", script.ref))
        inner = "".join(
            f"\n\ndef on_{side}(path):\n"
            + "".join(f"    {line}\n" for line in place.settings)
            + f"    torch.save(call({quoted(place.device)}), path)\n"
            for side, place in sides
        )
        outer = "".join(f'\n\ndef {side}():\n    return in_process("{side}")\n' for side, _ in sides)
        return _IN_PROCESS + inner + outer
    settings = "".join(f"    {line}\n" for line in script.target.settings)
    reference = _REFERENCE.format(quoted(script.ref.device))
    if any("set_flush_denormal(True)" in line for line in script.target.settings):
        return reference + f"\n\ndef target():\n{settings}{_FLUSHED}"
    return reference + f"\n\ndef target():\n{settings}    return call(TARGET_DEVICE)\n"


def _main(script: Script) -> str:
    body = CRASHES if script.kind == "raises" and script.in_processes else BODIES[script.kind]
    device = "" if script.target.device == "cpu" else PRESENT
    side = _SIDE.format() if script.in_processes else ""
    text = body.format(device=device, ratio=script.ratio).lstrip("\n")
    return f'\n\ndef main():\n{side}{text}\n\nif __name__ == "__main__":\n    with torch.no_grad():\n        main()\n'
