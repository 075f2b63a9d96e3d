"""How far a campaign is, from all of its shards, also while they are written."""

from __future__ import annotations

import contextlib
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shadowrun.report.document import Column, Document, Fact, Facts, Limits, Note, Records, Table
from shadowrun.report.sanitize import MAX_NAME, clip
from shadowrun.studies.campaign.store import CampaignStore, other_campaign

if TYPE_CHECKING:
    from shadowrun.studies.campaign.folder import Folder

__all__ = ["Status", "status", "status_document"]


@dataclass(frozen=True, slots=True)
class Status:
    """Counts of a campaign.

    Attributes:
        n_settled: Variants with all outcomes.
        counts: Sums of `CampaignStore.counts` over the shards.
        wall_s: Seconds of all starts, summed over the shards.
        cpu_s: Seconds of processor time, likewise.
        shards: Name and number of settled variants of each.
        empty: Names of those without a byte.
    """

    n_settled: int
    counts: dict[str, int]
    wall_s: float
    cpu_s: float
    shards: tuple[tuple[str, int], ...]
    empty: tuple[str, ...] = ()


def status(folder: Folder) -> Status:
    """Read the shards.

    Raises:
        DataFileError: One cannot be read, or is of another campaign.
    """
    counts: Counter[str] = Counter()
    settled: set[int] = set()
    shards, wall_s, cpu_s = [], 0.0, 0.0
    for path in folder.shards():
        with contextlib.closing(CampaignStore.open(path)) as store:
            n_targets = len(store.info.targets)
            if store.info.campaign != folder.settings.campaign:
                raise other_campaign(path)
            done = {number for number, n in store.settled() if n >= n_targets}
            counts.update(store.counts())
            wall_s += sum(s[3] for s in store.sessions())
            cpu_s += sum(s[4] for s in store.sessions())
        # As a set: two shards may have settled the same variant.
        settled |= done
        shards.append((path.name.partition(".")[0], len(done)))
    empty = tuple(path.name.partition(".")[0] for path in folder.empty_shards())
    return Status(len(settled), dict(counts), wall_s, cpu_s, tuple(shards), empty)


def status_document(folder: Folder, now: Status, note: str = "") -> Document:
    """The status as a document.

    Args:
        folder: The campaign.
        now: Its status.
        note: First line, on what just happened.
    """
    s = folder.settings
    of = f" of {s.n:,} ({100 * now.n_settled / s.n:.1f} %)" if s.n else ""
    rate = 3600 * now.n_settled / now.wall_s if now.wall_s else 0.0
    facts = [
        Fact("targets", clip(", ".join(s.shown_targets), MAX_NAME)),
        Fact("reference", clip(s.ref, MAX_NAME)),
        Fact("seed", str(s.seed)),
        Fact("variants", f"{now.n_settled:,}{of}"),
        Fact("rate", f"{rate:,.0f} variants an hour, {1000 * now.cpu_s / max(now.n_settled, 1):.0f} ms of processor "
                     "time each"),
    ]  # fmt: skip
    if s.n and rate and now.n_settled < s.n:
        facts.append(Fact("left", f"{(s.n - now.n_settled) / rate * 60:,.0f} minutes at this rate and one start"))
    rows = tuple((name, f"{n:,}") for name, n in now.counts.items())
    blocks: list[Any] = [Note(note)] if note else []
    blocks += [Facts(tuple(facts)), Table((Column("count", "name"), Column("n", "number")), rows)]
    if now.empty:
        text = f"empty, its process ended before it wrote anything: shard {', '.join(now.empty)}"
        blocks.append(Note(clip(text, MAX_NAME), "warn"))
    if len(now.shards) > 1:
        columns = (Column("shard", "name"), Column("variants", "number"))
        shards = tuple((clip(name, MAX_NAME), f"{n:,}") for name, n in now.shards)
        blocks.append(Table(columns, shards, noun="shards", limits=Limits(50, 200, 1000)))
    data = {
        "format": 1,
        "campaign": s.campaign,
        "targets": s.shown_targets,
        "ref": s.ref,
        "seed": s.seed,
        "n": s.n,
        "n_settled": now.n_settled,
        "wall_s": now.wall_s,
        "cpu_s": now.cpu_s,
        "counts": now.counts,
        "shards": dict(now.shards) | dict.fromkeys(now.empty, 0),
    }
    records = Records(("count", "n"), tuple((name, str(n)) for name, n in now.counts.items()))
    return Document(f"campaign {clip(str(folder.path), MAX_NAME)}", tuple(blocks), data, records)
