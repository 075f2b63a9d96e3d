"""Generates the inputs of cases, for a worker and later for a script.

A coverage file stores no tensors. It stores the seed, and the same seed gives the same inputs: `Sampler` generates the
samples of an operator, and `rebuild_case` uses it to rebuild one case of a coverage file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from shadowrun.errors import ShadowrunError, UsageError, brief
from shadowrun.studies.sweep import case_programs, exceptional_inputs, opinfo, recorded_calls
from shadowrun.studies.sweep.cases import ANY_DTYPE, PROBES, Part
from shadowrun.studies.sweep.coverage_file import ALL
from shadowrun.studies.sweep.inputs import printed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from shadowrun.studies.sweep.case_programs import Program
    from shadowrun.studies.sweep.cases import Case
    from shadowrun.studies.sweep.coverage_file import CoverageFile
    from shadowrun.studies.sweep.inputs import Sample
    from shadowrun.studies.sweep.sweep_findings import SweepFinding

__all__ = ["Origin", "RebuiltCase", "Sampler", "rebuild_case"]


class Sampler:
    """Samples of one operator in one dtype. Parts that start from the same samples share them.

    Args:
        name: Operator of torch's database, with its variant.
        dtype: ``float32``, or `ANY_DTYPE` for invalid inputs.
        seed: Seed of the sample inputs.
        limit: Maximum number of samples of the database; None for all.
    """

    def __init__(self, name: str, dtype: str, seed: int, limit: int | None) -> None:
        self._name, self._dtype, self._seed, self._limit = name, dtype, seed, limit
        self._made: dict[bool, list[Sample]] = {}

    def samples(self, part: Part) -> Iterator[tuple[int, Sample]]:
        """Samples in the form of a part, with their numbers."""
        if self._dtype == ANY_DTYPE:
            yield from enumerate(opinfo.invalid(self._name, self._seed, self._limit))
        elif part is Part.SLICE:
            yield from enumerate(exceptional_inputs.batches(self._name, self._dtype, self._samples))
        elif part in PROBES:
            info = opinfo.database()[self._name]
            yield from enumerate(exceptional_inputs.probes(self._name, info, self._dtype, self._samples))
        else:
            yield from case_programs.varied(self._samples(grad=part is Part.BACKWARD), part)

    def _samples(self, *, grad: bool = False) -> list[Sample]:
        if grad not in self._made:
            self._made[grad] = opinfo.samples(self._name, self._dtype, self._seed, self._limit, grad=grad)
        return self._made[grad]


@dataclass(frozen=True, slots=True)
class Origin:
    """Source of the inputs of a sweep's cases.

    Attributes:
        seed: Seed of the sample inputs.
        samples: Limit of samples by operator, dtype and part; `ALL` for no limit.
        source: Data file whose calls were swept; None for torch's database.
        torch: Version of torch in the sweep.
    """

    seed: int
    samples: dict[tuple[str, str, Part], int]
    source: Path | None
    torch: str

    @classmethod
    def from_file(cls, file: CoverageFile, source: Path | None) -> Origin:
        """Read it from a coverage file.

        Args:
            file: The coverage file.
            source: Data file whose calls were swept; None to look in the folder of the coverage file, then in the
                current folder.

        Raises:
            UsageError: The data file does not exist.
        """
        info = file.info
        if info.source == "opinfo":
            return cls(info.seed, file.finished(), None, info.versions.get("torch", "?"))
        # A bare name only: an untrusted coverage file must not choose which other files are read.
        is_bare = info.source not in ("", "..") and Path(info.source).name == info.source
        bare = [file.path.parent / info.source, Path(info.source)] if is_bare else []
        places = bare if source is None else [source]
        there = next((path for path in places if _is_file(path)), None)
        if there is None:
            raise UsageError(
                f"{str(file.path)!r} is a sweep of the calls of {brief(info.source)}, which is not at "
                f"{', '.join(brief(str(p)) for p in places) or 'its folder'}: give its path with --from DATA.",
                slug="no-repro",
            )
        return cls(info.seed, file.finished(), there, info.versions.get("torch", "?"))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # the name comes from the file: too long, or with a null character
        return False


@dataclass(frozen=True, slots=True)
class RebuiltCase:
    """A case, ready to run.

    Attributes:
        case: The case.
        entry: Its entry in torch's database; for recorded calls the operator.
        sample: Its inputs in the form of its part, on the CPU.
        program: Its program.
    """

    case: Case
    entry: Any
    sample: Sample
    program: Program


def rebuild_case(sweep_finding: SweepFinding, origin: Origin) -> RebuiltCase:
    """Rebuild the first case of a finding.

    Raises:
        UsageError: This torch generates other inputs for it, or none.
        DataFileError: The data file whose calls were swept cannot be read.
    """
    case = sweep_finding.first
    try:
        sample = _recorded(case, origin) if origin.source is not None else _of_database(case, origin)
    except ShadowrunError:
        raise
    except Exception as error:  # the file names the dtype, and the database may raise anything on it
        raise UsageError(
            f"The inputs of {case} cannot be made again: {type(error).__name__} {str(error)[:200]}", slug="no-repro"
        ) from None
    # Another torch has other samples: then the script would show something else.
    if sample is None or printed(sample) != sweep_finding.inputs:
        now = "it has none" if sample is None else f"they are {printed(sample)[:100]}"
        raise UsageError(
            f"The inputs of {case} ({sweep_finding.inputs[:100]}) cannot be made again: {now}. The sweep was made by "
            f"torch {origin.torch}, this is torch {torch.__version__}.",
            slug="no-repro",
        )
    entry = _recorded_function(case.operator) if origin.source is not None else opinfo.database()[case.operator]
    return RebuiltCase(case, entry, sample, case_programs.program(entry, case.part, case.sample, sample))


def _of_database(case: Case, origin: Origin) -> Sample | None:
    # Not `getattr`: torch imports modules lazily, and an untrusted file must not choose which.
    is_dtype = isinstance(vars(torch).get(case.dtype), torch.dtype) or case.dtype == ANY_DTYPE
    if case.operator not in opinfo.database() or not is_dtype:
        return None
    limit = origin.samples.get((case.operator, case.dtype, case.part), ALL)
    sampler = Sampler(case.operator, case.dtype, origin.seed, None if limit == ALL else limit)
    return next((sample for number, sample in sampler.samples(case.part) if number == case.sample), None)


def _recorded(case: Case, origin: Origin) -> Sample | None:
    assert origin.source is not None
    # A sweep makes no other part of them. Slices and layouts of a call of a file would be further calls.
    if case.part is not Part.FORWARD:
        return None
    calls = recorded_calls.read_calls(origin.source).get((case.operator, case.dtype), [])
    if not 0 <= case.sample < len(calls):
        return None
    try:
        return recorded_calls.sample(case.operator, calls[case.sample], origin.seed)
    except recorded_calls.UnreadableCall as why:
        raise UsageError(f"No script is written: {why}.", slug="operator-refused") from None


def _recorded_function(name: str) -> Any:
    try:
        return recorded_calls.function(name)
    except recorded_calls.UnreadableCall as why:
        raise UsageError(f"No script is written: {why}.", slug="operator-refused") from None
