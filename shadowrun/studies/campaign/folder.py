"""The folder of a campaign: its settings, programs, shards and combined store.

The settings are JSON and may come from anyone: platforms in them are started only under the rules for files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from shadowrun.errors import DataFileError, brief
from shadowrun.limits import head
from shadowrun.store.atomic_write import atomic_write, write_text
from shadowrun.store.codec import decode_facts
from shadowrun.studies.campaign.tables import CampaignInfo

if TYPE_CHECKING:
    from pathlib import Path

    from shadowrun.studies.shards import Shard

__all__ = ["CHUNK", "Folder", "Settings"]

CHUNK: Final = 100
"""Recipes in a chunk. All processes of a campaign must have the same: a shard is every n-th chunk."""
_FORMAT: Final = 1
_MAX_BYTES: Final = 1 << 20
_MAX_NAMES: Final = 1000
_MAX_SECONDS: Final = 1e9
_SETTINGS: Final = "campaign.json"
_PROGRAMS: Final = "programs.shadowzoo"
_SHARDS: Final = "shards"
_COMBINED: Final = "campaign.shadowcampaign"
_SUFFIX: Final = ".shadowcampaign"


@dataclass(frozen=True, slots=True)
class Settings:
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


class Folder:
    """A folder with a campaign.

    Args:
        path: The folder.
        settings: What it has.
    """

    def __init__(self, path: Path, settings: Settings) -> None:
        self.path = path
        self.settings = settings

    @classmethod
    def create(cls, path: Path, settings: Settings, programs: Path) -> Folder:
        """Make a folder, or find the same campaign in it; a larger number of recipes extends it.

        Args:
            path: The folder, missing or empty or of the same campaign.
            settings: Without the hash of the programs.
            programs: File with the programs; copied.

        Raises:
            DataFileError: It holds something else, or cannot be written.
        """
        settings = dataclasses.replace(settings, programs=_digest(programs))
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
    def open(cls, path: Path) -> Folder:
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
            content = head(file, _MAX_BYTES + 1)
            if len(content) > _MAX_BYTES:
                raise _damaged(file, "it is too large")
            found = json.loads(content)
            settings = decode_facts(Settings, json.dumps(found))
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
        if _digest(self.programs) != self.settings.programs:
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


def _digest(path: Path) -> str:
    if path.exists() and not path.is_file():  # a pipe would block, a device has no end
        raise DataFileError(f"The programs {str(path)!r} are no regular file.", slug="campaign-folder")
    try:
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


def _other(path: Path, was: Settings, now: Settings) -> DataFileError:
    names = ("targets", "ref", "seed", "mutators", "compile", "flaws", "programs", "torch", "simulated")
    differs = next((n for n in names if getattr(was, n) != getattr(now, n)), "format")
    return DataFileError(
        f"{str(path)!r} has a campaign with other {differs}: {brief(getattr(was, differs, ''))}, not "
        f"{brief(getattr(now, differs, ''))}. Choose another folder, or give the same options.",
        slug="campaign-other",
    )
