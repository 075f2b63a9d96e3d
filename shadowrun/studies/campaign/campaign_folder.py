"""The folder of a campaign: its settings, programs, shards and combined store.

The settings are JSON and may come from anyone: platforms in them are started only under the rules for files.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shutil
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from shadowrun.errors import DataFileError, brief
from shadowrun.limits import read_head
from shadowrun.report.document import Column, Document, Fact, Facts, Limits, Note, Records, Table
from shadowrun.report.sanitize import MAX_NAME, clip
from shadowrun.store.atomic_write import atomic_write, write_text
from shadowrun.store.codec import decode_facts
from shadowrun.studies.campaign.store import CampaignStore, other_campaign
from shadowrun.studies.campaign.tables import CampaignInfo

if TYPE_CHECKING:
    from pathlib import Path

    from shadowrun.studies.shards import Shard

__all__ = ["CHUNK", "CampaignFolder", "CampaignSettings", "Status", "digest_of", "status", "status_document"]

CHUNK: Final = 100
"""Recipes in a chunk. All processes of a campaign must have the same: a shard is every n-th chunk."""
_FORMAT: Final = 1
# The folder may come from anyone: its settings are checked before anything of them is used.
_MAX_BYTES: Final = 1 << 20
_MAX_NAMES: Final = 1000
# Of the programs, compressed: nothing that has more fits into memory, and a file of holes may have any number.
_MAX_PROGRAMS: Final = 1 << 30
_MAX_SECONDS: Final = 1e9
_SETTINGS: Final = "campaign.json"
_PROGRAMS: Final = "programs.shadowzoo"
_SHARDS: Final = "shards"
_COMBINED: Final = "campaign.shadowcampaign"
_SUFFIX: Final = ".shadowcampaign"


@dataclass(frozen=True, slots=True)
class CampaignSettings:
    """What a campaign is.

    Attributes:
        targets: Platform specs.
        ref: Spec of the reference.
        n: Number of recipes; 0 for no limit.
        seed: Of the recipes.
        mutators: Their names.
        compile: Backends of `torch.compile`; each makes a further target of each platform.
        simulated: Whether a target is simulated, with `flaws`.
        flaws: Flaws of the simulated device.
        programs: Hash of the file with the programs.
        torch: Version of torch.
        timeout_s: Time limit of a variant on a target, in seconds.
        memory_bytes: Memory that a variant may take.
    """

    targets: tuple[str, ...]
    ref: str = "cpu"
    n: int = 0
    seed: int = 0
    mutators: tuple[str, ...] = ()
    compile: tuple[str, ...] = ()
    simulated: bool = False
    flaws: tuple[str, ...] = ()
    programs: str = ""
    torch: str = ""
    timeout_s: float = 60.0
    memory_bytes: int = 4 << 30

    @property
    def campaign(self) -> str:
        """Hash of what decides recipes and results: not of how many, nor of the limits."""
        facts = dataclasses.asdict(self)
        for name in ("n", "timeout_s", "memory_bytes"):
            del facts[name]
        # With the size of a chunk: a shard is every n-th chunk, and another size would give its variants to others.
        text = json.dumps([_FORMAT, CHUNK, facts], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def shown_targets(self) -> tuple[str, ...]:
        """Targets as reports name them: with the flaws of the simulated one, ``sim (matmul-in-bf16), inductor``."""
        flaws = f" ({', '.join(self.flaws)})" if self.flaws else ""
        names = tuple(t if t.startswith("cpu") else f"{t}{flaws}" for t in self.targets)
        return (*names, *(f"{name}, {backend}" for backend in self.compile for name in names))

    def for_workers(self, programs: Path, threads: int) -> dict[str, Any]:
        """What workers need to know, as JSON has it."""
        return {
            "targets": self.targets,
            "ref": self.ref,
            "flaws": self.flaws if self.simulated else None,
            "seed": self.seed,
            "mutators": self.mutators,
            "compile": self.compile,
            "programs": str(programs),
            "threads": threads,
            # Half: the process of a platform must time out before the worker that waits for it is killed.
            "call_limit_s": self.timeout_s / 2,
        }


class CampaignFolder:
    """A folder with a campaign.

    Args:
        path: The folder.
        settings: What it has.
    """

    def __init__(self, path: Path, settings: CampaignSettings) -> None:
        self.path = path
        self.settings = settings

    @classmethod
    def create(cls, path: Path, settings: CampaignSettings, programs: Path) -> CampaignFolder:
        """Make a folder, or find the same campaign in it; a larger number of recipes extends it.

        Args:
            path: The folder, missing or empty or of the same campaign.
            settings: Without the hash of the programs.
            programs: File with the programs; copied.

        Raises:
            DataFileError: It holds something else, or cannot be written.
        """
        settings = dataclasses.replace(settings, programs=digest_of(programs))
        if (path / _SETTINGS).exists():
            found = cls.open(path)
            if found.settings.campaign != settings.campaign:
                raise _other(path, found.settings, settings)
        else:
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise DataFileError(
                    f"{str(path)!r} is no folder of a campaign, and not empty. Name a new folder.",
                    slug="campaign-folder",
                )
            found = None
        folder = cls(path, settings)
        try:
            (path / _SHARDS).mkdir(parents=True, exist_ok=True)
            if found is None and programs.resolve() != folder.programs.resolve():
                with programs.open("rb") as given, atomic_write(folder.programs, shared=True) as file:
                    shutil.copyfileobj(given, file)
            # The settings last: a folder that was not made to its end is none.
            folder._write()
        except OSError as error:
            raise _unwritable(path, error) from error
        return folder

    @classmethod
    def open(cls, path: Path) -> CampaignFolder:
        """Read a folder.

        Raises:
            DataFileError: It is none, or damaged, or of a newer shadowrun.
        """
        file = path / _SETTINGS
        try:
            if not file.is_file():
                raise DataFileError(
                    f"{str(path)!r} is no folder of a campaign: it has no {_SETTINGS}. `shadowrun campaign run DIR "
                    "--target SPEC` makes one.",
                    slug="campaign-folder",
                )
            # One byte more than is allowed, so that a longer file is seen to be too long.
            content = read_head(file, _MAX_BYTES + 1)
            if len(content) > _MAX_BYTES:
                raise _damaged(file, "it is too large")
            found = json.loads(content)
            settings = decode_facts(CampaignSettings, json.dumps(found))
            if found.get("format") != _FORMAT:
                raise DataFileError(
                    f"{str(path)!r} is of a campaign in format {brief(found.get('format'))}, and this shadowrun reads "
                    f"{_FORMAT}: use the shadowrun that made it, or start a new campaign.",
                    slug="campaign-folder",
                )
        except OSError as error:
            raise _damaged(file, str(error.strerror)) from error
        except (ValueError, RecursionError) as error:
            raise _damaged(file, str(error)) from error
        s = settings
        if not s.targets or not 0 <= s.n < 1 << 63 or not 0 < s.timeout_s <= _MAX_SECONDS or s.memory_bytes < 1:
            # A file from anyone: a number that no database holds, or a limit that no clock reaches, would end a worker
            # later.
            raise _damaged(file, "it has no targets, or limits that are none")
        if max(map(len, (s.targets, s.mutators, s.compile, s.flaws))) > _MAX_NAMES:
            raise _damaged(file, f"it has more than {_MAX_NAMES} targets, mutators, backends or flaws")
        folder = cls(path, settings)
        folder._refuse_links()
        return folder

    def _refuse_links(self) -> None:
        """Refuse links in the folder: what is written here would be written elsewhere.

        Raises:
            DataFileError: It has one.
        """
        shards = self.path / _SHARDS
        for place in (self.path / _SETTINGS, self.programs, self.combined, shards, *shards.glob(f"*{_SUFFIX}")):
            if place.is_symlink():
                raise DataFileError(
                    f"{str(place)!r} is a link, which could lead out of the folder. Copy what it leads to here.",
                    slug="campaign-folder",
                )

    @staticmethod
    def programs_in(path: Path) -> Path | None:
        """File with the programs of the campaign in a folder; None if there is none."""
        return path / _PROGRAMS if (path / _SETTINGS).is_file() and (path / _PROGRAMS).is_file() else None

    def check_programs(self) -> None:
        """Look that the programs are those of the settings.

        Raises:
            DataFileError: They are not.
        """
        if digest_of(self.programs) != self.settings.programs:
            raise DataFileError(
                f"{str(self.programs)!r} was changed since the campaign began: its numbers mean other variants now. "
                "Restore the file, or start a new campaign.",
                slug="campaign-other",
            )

    def check_torch(self) -> None:
        """Look that torch is that of the campaign: another one makes other variants, and other results.

        Raises:
            DataFileError: It is not.
        """
        import torch

        # Another torch has other kernels and another decomposition: the same recipe gives another graph and other
        # results.
        if self.settings.torch not in ("", str(torch.__version__)):
            raise DataFileError(
                f"{str(self.path)!r} is a campaign with torch {brief(self.settings.torch)}, and this is torch "
                f"{torch.__version__}: use that version, or start a new campaign.",
                slug="campaign-other",
            )

    @property
    def programs(self) -> Path:
        """File with the programs."""
        return self.path / _PROGRAMS

    @property
    def combined(self) -> Path:
        """The combined store."""
        return self.path / _COMBINED

    def shard(self, shard: Shard) -> Path:
        """The store of a shard."""
        return self.path / _SHARDS / f"{shard.name}{_SUFFIX}"

    def shards(self) -> list[Path]:
        """All shards that are there and not empty."""
        empty = self.empty_shards()
        return [path for path in self._shard_files() if path not in empty]

    def empty_shards(self) -> list[Path]:
        """Shards without a byte: their process ended before it wrote anything, and the next one begins them anew."""
        return [path for path in self._shard_files() if path.is_file() and not path.stat().st_size]

    def _shard_files(self) -> list[Path]:
        return sorted((self.path / _SHARDS).glob(f"*{_SUFFIX}"))

    def info(self) -> CampaignInfo:
        """What a store of this campaign says of itself."""
        from shadowrun.platforms.fingerprint import versions
        from shadowrun.studies.campaign.oracles import FIRED, ORACLES

        s = self.settings
        return CampaignInfo(s.campaign, s.shown_targets, s.ref, (*ORACLES, FIRED), versions=versions())

    def _write(self) -> None:
        facts = {"format": _FORMAT, "campaign": self.settings.campaign, **dataclasses.asdict(self.settings)}
        write_text(self.path / _SETTINGS, json.dumps(facts, indent=1) + "\n", shared=True)


def digest_of(path: Path) -> str:
    """Hash of a file with programs, as the settings have it.

    Raises:
        DataFileError: It cannot be read, is no regular file, or larger than any file of programs.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe would block, a device has no end
            raise DataFileError(f"The programs {str(path)!r} are no regular file.", slug="campaign-folder")
        if path.stat().st_size > _MAX_PROGRAMS:
            raise DataFileError(
                f"The programs {str(path)!r} have more than {_MAX_PROGRAMS >> 30} GiB: name fewer by --programs.",
                slug="campaign-folder",
            )
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:32]
    except OSError as error:
        raise DataFileError(
            f"The programs {str(path)!r} cannot be read: {error.strerror}.", slug="campaign-folder"
        ) from error


def _damaged(path: Path, why: str) -> DataFileError:
    return DataFileError(
        f"{str(path)!r} is damaged, or was not written by shadowrun ({why[:200]}). Start a new campaign.",
        slug="data-file-corrupt",
    )


def _unwritable(path: Path, error: OSError) -> DataFileError:
    return DataFileError(
        f"The folder {str(path)!r} cannot be written: {error.strerror}. Choose a folder that you may write to.",
        slug="campaign-folder",
    )


def _other(path: Path, was: CampaignSettings, now: CampaignSettings) -> DataFileError:
    names = ("targets", "ref", "seed", "mutators", "compile", "flaws", "programs", "torch", "simulated")
    differs = next((n for n in names if getattr(was, n) != getattr(now, n)), "format")
    return DataFileError(
        f"{str(path)!r} has a campaign with other {differs}: {brief(getattr(was, differs, ''))}, not "
        f"{brief(getattr(now, differs, ''))}. Choose another folder, or give the same options.",
        slug="campaign-other",
    )


# How far a campaign is, from all of its shards, also while they are written.


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


def status(folder: CampaignFolder) -> Status:
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
            done = {number for number, n in store.settled_targets() if n >= n_targets}
            counts.update(store.counts())
            wall_s += sum(s[3] for s in store.sessions())
            cpu_s += sum(s[4] for s in store.sessions())
        # As a set: two shards may have settled the same variant.
        settled |= done
        shards.append((path.name.partition(".")[0], len(done)))
    empty = tuple(path.name.partition(".")[0] for path in folder.empty_shards())
    return Status(len(settled), dict(counts), wall_s, cpu_s, tuple(shards), empty)


def status_document(folder: CampaignFolder, now: Status, note: str = "") -> Document:
    """The status as a document.

    Args:
        folder: The campaign.
        now: Its status.
        note: First line, on what just happened.
    """
    s = folder.settings
    of = f" of {s.n:,} ({100 * now.n_settled / s.n:.1f} %)" if s.n else ""
    # Of the time of starts alone: a campaign that was stopped overnight was not slow.
    rate = 3600 * now.n_settled / now.wall_s if now.wall_s else 0.0
    facts = [
        Fact("targets", clip(", ".join(s.shown_targets), MAX_NAME)),
        Fact("reference", clip(s.ref, MAX_NAME)),
        Fact("seed", str(s.seed)),
        Fact("variants", f"{now.n_settled:,}{of}"),
        Fact("rate", f"{rate:,.0f} variants an hour, {1000 * now.cpu_s / max(now.n_settled, 1):.0f} ms of processor "
                     "time each"),
    ]  # fmt: skip
    # An estimate of one start: shards that run at once each print that of their own part.
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
