"""What a script does in its main function, by kind: text into which `device` and `ratio` are put."""

from __future__ import annotations

__all__ = ["BODIES", "CRASHES"]

_COMPARE = """
    expected = reference()
{device}    actual = target()
    sys.exit(1 if any([differs(name, actual[name], expected[name]) for name in expected]) else 0)
"""

_COMPARE_OFTEN = """
    expected = reference()
{device}    faults = 0
    for _ in range(8):
        call(TARGET_DEVICE, disturbed)  # what this call leaves behind must not show in the next one
        actual = target()
        faults += any([differs(name, actual[name], expected[name]) for name in expected])
    sys.exit(1 if faults else 0)
"""

_RAISES = """
    reference()
{device}    try:
        target()
    except Exception as error:
        print(f"{{OPERATOR}} on {{TARGET}} raises {{type(error).__name__}}: {{str(error).strip().splitlines()[0]}}")
        sys.exit(1)
    print(f"{{OPERATOR}} runs on {{TARGET}}")
"""

CRASHES = """
    reference()
    try:
        target()
    except subprocess.CalledProcessError as error:
        print(f"{{OPERATOR}} on {{TARGET}} ends its process: exit status {{error.returncode}}")
        sys.exit(1)
    print(f"{{OPERATOR}} runs on {{TARGET}}")
"""

_ACCEPTS = """
    try:
        reference()
    except Exception as error:
        expected = error
    else:
        print(f"{{OPERATOR}} on {{REFERENCE}} accepts these inputs")
        sys.exit(2)
{device}    try:
        for value in target().values():
            for t in value if isinstance(value, (list, tuple)) else [value]:
                torch.as_tensor(t).cpu()
    except Exception as error:
        kin = isinstance(error, type(expected)) and not isinstance(error, NotImplementedError)
        alike = kin or isinstance(expected, type(error))
        raised = f"raises {{type(error).__name__}}: {{str(error).strip().splitlines()[0]}}"
    else:
        alike, raised = False, "accepts these inputs"
    print(f"{{OPERATOR}} on {{TARGET}} {{raised}}")
    print(f"on {{REFERENCE}} it raises {{type(expected).__name__}}: {{str(expected).strip().splitlines()[0]}}")
    sys.exit(0 if alike else 1)
"""

_MEMORY = """
    usual = reference()
{device}    found = [text for text in target() if text not in usual]
    print("\\n".join(found) or f"{{OPERATOR}} on {{TARGET}} does to memory what its schema says")
    sys.exit(1 if found else 0)
"""

_FALLS_BACK = """
{device}    seen = []

    def to_cpu(tensors):  # what PyTorch's own cpu_fallback calls
        seen.append(f"{{OPERATOR}} moved {{len(tensors)}} tensors to the CPU")
        return [t.cpu() if isinstance(t, torch.Tensor) else torch.tensor(t) for t in tensors]

    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        library = torch.library.Library("aten", "IMPL")
        library.impl("_to_cpu", to_cpu, KEY, allow_override=True)
        heard.clear()  # torch warns of that
        results = target()
    seen += [str(w.message).splitlines()[0] for w in heard if "cpu" in str(w.message).lower()]
    device = torch.device(TARGET_DEVICE).type
    for name, value in results.items():
        if isinstance(value, torch.Tensor) and value.device.type != device:
            seen.append(f"{{name}} lies on {{value.device}}")
    print("\\n".join(seen) or f"{{OPERATOR}} runs on {{TARGET}} itself")
    sys.exit(1 if seen else 0)
"""

_SLOW = """
{device}
    def milliseconds(run):
        wait = getattr(getattr(torch, torch.device(TARGET_DEVICE).type, None), "synchronize", lambda: None)
        times = []
        for _ in range(7):
            wait()
            start = time.perf_counter()
            run()
            wait()
            times.append(1000 * (time.perf_counter() - start))
        return min(times[1:])

    slow, quick = milliseconds(target), milliseconds(reference)
    print(f"{{OPERATOR}} takes {{slow:.3g}} ms on {{TARGET}}, {{quick:.3g}} ms on {{REFERENCE}}")
    sys.exit(1 if slow >= {ratio:g} * quick and slow >= quick + 1 else 0)
"""

BODIES = {
    "mismatch": _COMPARE,
    "memory": _MEMORY,
    "unstable": _COMPARE_OFTEN,
    "raises": _RAISES,
    "accepts": _ACCEPTS,
    "fallback": _FALLS_BACK,
    "slow": _SLOW,
}
"""Kind of a script to its main function."""
