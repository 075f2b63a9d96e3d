"""List the platforms of this machine, and those that it lacks.

Examples:
  shadowrun platforms
  shadowrun platforms --flaws     what the simulated accelerator can do wrong
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import argparse

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to list."""
    parser.add_argument("--flaws", action="store_true", help="list the flaws and presets of the simulated device")


def run(args: argparse.Namespace) -> int:
    """Print the list; returns the exit status."""
    if args.flaws:
        _print_flaws()
    else:
        _print_platforms()
    return 0


def _print_platforms() -> None:
    from shadowrun.intercept import torchapi  # noqa: F401 - it looks up what a comparison uses, of which versions tell
    from shadowrun.platforms import devices, resolve
    from shadowrun.platforms.fingerprint import fingerprint, versions
    from shadowrun.platforms.torchnames import untested

    listed = devices()
    print(", ".join(f"{name} {version}" for name, version in versions().items() if version))
    if note := untested():
        print(note)
    print("\npresent:")
    for device in listed:
        if device.present:
            print(f"  {device.device_type:<9} {device.detail}")
    print("\nabsent:")
    for device in listed:
        if not device.present:
            print(f"  {device.device_type:<9} {device.detail}")
    for device in listed:
        # Starting the simulated or the lazy device only to list it would tell nothing that the CPU's
        # fingerprint does not: they compute there.
        if device.present and device.device_type not in ("sim", "lazy"):
            print(f"\nfingerprint of {device.device_type}:")
            for key, value in fingerprint(resolve(device.device_type)).items():
                print(f"  {key:<24} {value}")


def _print_flaws() -> None:
    from shadowrun.platforms.sim import CATALOGUE, PRESETS

    print("presets (--preset):")
    for preset, names in PRESETS.items():
        print(f"  {preset:<12} {len(names)} flaws{': ' if names else ''}{', '.join(names)}")
    for kind in dict.fromkeys(flaw.kind for flaw in CATALOGUE.values()):
        print(f"\n{kind} (--flaws):")
        for flaw in CATALOGUE.values():
            if flaw.kind == kind:
                print(f"  {flaw.name:<32} {flaw.description} [{flaw.issue}]")
