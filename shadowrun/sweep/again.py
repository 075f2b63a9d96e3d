"""A case of a sweep made again from its coverage file: the same inputs, from the same seed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.errors import ShadowrunError, UsageError
from shadowrun.sweep import opinfo, programs, recorded
from shadowrun.sweep.cases import ANY_DTYPE
from shadowrun.sweep.coveragefile import ALL
from shadowrun.sweep.inputs import printed
from shadowrun.sweep.sampling import Sampler

if TYPE_CHECKING:
    from shadowrun.sweep.cases import Case, Part
    from shadowrun.sweep.coveragefile import CoverageFile
    from shadowrun.sweep.found import Found
    from shadowrun.sweep.inputs import Sample
    from shadowrun.sweep.programs import Program

__all__ = ["Again", "Origin", "make_again"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the inputs of a sweep's cases come from.

    Attributes:
        seed: Of the sample inputs.
        samples: Limits that parts were run under, by operator, dtype and part; `ALL` for none.
        source: Data file whose calls were swept; None for torch's database.
        torch: Version of torch in the sweep.
    """

    seed: int
    samples: dict[tuple[str, str, Part], int]
    source: Path | None
    torch: str

    @classmethod
    def of(cls, file: CoverageFile, source: Path | None) -> Origin:
        """Read it from a coverage file.

        Args:
            file: Which.
            source: Where the data file lies whose calls were swept; None for beside the coverage file, or here.

        Raises:
            UsageError: That data file is not there.
        """
        info = file.info
        if info.source == "opinfo":
            return cls(info.seed, file.finished(), None, info.versions.get("torch", "?"))
        # Beside it by a bare name only: a file does not tell which others are read.
        is_bare = info.source not in ("", "..") and Path(info.source).name == info.source
        bare = [file.path.parent / info.source, Path(info.source)] if is_bare else []
        places = bare if source is None else [source]
        there = next((path for path in places if _is_file(path)), None)
        if there is None:
            raise UsageError(
                f"{str(file.path)!r} is a sweep of the calls of {info.source!r}, which is not at "
                f"{', '.join(repr(str(p)) for p in places) or 'a place beside it'}: tell where it is by --from DATA.",
                slug="no-repro",
            )
        return cls(info.seed, file.finished(), there, info.versions.get("torch", "?"))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name of any length and any characters
        return False


@dataclass(frozen=True, slots=True)
class Again:
    """A case, ready to be run.

    Attributes:
        case: Which.
        entry: Its entry in torch's database; for recorded calls the operator.
        sample: Its inputs in the form of its part, on the CPU.
        program: What it runs.
    """

    case: Case
    entry: Any
    sample: Sample
    program: Program


def make_again(found: Found, origin: Origin) -> Again:
    """The first case of a fault.

    Raises:
        UsageError: It has other inputs now, since this is another torch; or none.
        DataFileError: The data file whose calls were swept cannot be read.
    """
    case = found.first
    try:
        sample = _recorded(case, origin) if origin.source is not None else _of_database(case, origin)
    except ShadowrunError:
        raise
    except Exception as error:  # whatever torch's database raises on a dtype that the file names
        raise UsageError(
            f"The inputs of {case} cannot be made again: {type(error).__name__} {str(error)[:200]}", slug="no-repro"
        ) from None
    if sample is None or printed(sample) != found.inputs:
        now = "it has none" if sample is None else f"they are {printed(sample)[:100]}"
        raise UsageError(
            f"The inputs of {case} ({found.inputs[:100]}) cannot be made again: {now}. The sweep was made by torch "
            f"{origin.torch}, this is torch {torch.__version__}.",
            slug="no-repro",
        )
    entry = _recorded_function(case.operator) if origin.source is not None else opinfo.database()[case.operator]
    return Again(case, entry, sample, programs.program(entry, case.part, case.sample, sample))


def _of_database(case: Case, origin: Origin) -> Sample | None:
    # Not `getattr`, for which torch imports modules.
    is_dtype = isinstance(vars(torch).get(case.dtype), torch.dtype) or case.dtype == ANY_DTYPE
    if case.operator not in opinfo.database() or not is_dtype:
        return None
    limit = origin.samples.get((case.operator, case.dtype, case.part), ALL)
    sampler = Sampler(case.operator, case.dtype, origin.seed, None if limit == ALL else limit)
    return next((sample for number, sample in sampler.of(case.part) if number == case.sample), None)


def _recorded(case: Case, origin: Origin) -> Sample | None:
    assert origin.source is not None
    calls = recorded.read_calls(origin.source).get((case.operator, case.dtype), [])
    if not 0 <= case.sample < len(calls):
        return None
    try:
        return recorded.sample(case.operator, calls[case.sample], origin.seed)
    except recorded.Unreadable as why:
        raise UsageError(f"No script is written: {why}.", slug="operator-refused") from None


def _recorded_function(name: str) -> Any:
    try:
        return recorded.function(name)
    except recorded.Unreadable as why:
        raise UsageError(f"No script is written: {why}.", slug="operator-refused") from None
