"""What a run is, and which rank of a distributed one."""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from shadowrun.platforms.fingerprint import fingerprint, versions
from shadowrun.types import RunInfo

if TYPE_CHECKING:
    from shadowrun.config import Config
    from shadowrun.platforms.device import Platform

__all__ = ["file_of_rank", "rank", "run_info"]


def run_info(config: Config, target: Platform, ref: Platform) -> RunInfo:
    """What a run is, as far as that is known before it starts."""
    notes = []
    if str(target) == str(ref):
        notes.append(f"Target and reference are the same platform ({target}): a self-check, which should find nothing.")
    facts = {platform: fingerprint(platform) for platform in (target, ref)}
    notes += [f"{platform}: {f['without_effect']}." for platform, f in facts.items() if f.get("without_effect")]
    number, world = rank()
    return RunInfo(
        target=str(target),
        ref=str(ref),
        target_fingerprint=facts[target],
        ref_fingerprint=facts[ref],
        versions=versions(),
        argv=(Path(sys.argv[0]).name, *sys.argv[1:]) if sys.argv else (),
        config=config.printable(),
        rank=number,
        world_size=world,
        started=datetime.now(UTC).isoformat(timespec="seconds"),
        notes=tuple(notes),
    )


def rank() -> tuple[int, int]:
    """Rank and size of the run; where the program has not made its group yet, those that torchrun gives it."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    number, world = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if number.isdecimal() and world.isdecimal() and int(number) < int(world):
        return int(number), int(world)
    return 0, 1


def file_of_rank(path: Path, number: int, world: int) -> Path:
    """``run.1.shadowrun`` for ``run.shadowrun``: one file for each rank of a distributed run."""
    return path.with_name(f"{path.stem}.{number}{path.suffix}") if world > 1 else path
