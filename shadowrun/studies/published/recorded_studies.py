"""A study recorded on many platforms of this machine, each in a fresh process, and the classes of its variants."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from shadowrun.errors import UsageError
from shadowrun.recording.model import Kind
from shadowrun.studies.classes import platforms as recorded_platforms
from shadowrun.studies.classes.classes_by_call import Change, along_graph
from shadowrun.studies.classes.equivalence import Classes, Output, classes_of, common_keys, values_of
from shadowrun.studies.grid import RECORDED, Cell, platforms_of, record_grid
from shadowrun.studies.published import programs

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from shadowrun.recording.model import Key
    from shadowrun.studies.classes.platforms import Platform

__all__ = ["PLATFORMS", "QUICK_PLATFORMS", "RecordedStudy", "read_study", "record_study"]

PLATFORMS: Final = (
    *("cpu[threads=1]", "cpu[threads=2]", "cpu[threads=4]", "cpu[isa=default]", "cpu[isa=avx2]"),
    *("cpu[mkl_cbwr=COMPATIBLE]", "cpu[mkldnn=off]", "cpu[onednn_isa=SSE41]", "cpu[onednn_isa=AVX]"),
    *("cpu[onednn_isa=AVX2]", "cpu[isa=default,mkldnn=off]", "cpu[isa=avx2,mkl_cbwr=COMPATIBLE]"),
)
QUICK_PLATFORMS: Final = ("cpu[threads=1]", "cpu[isa=default]", "cpu[mkldnn=off]")
_CORES: Final = tuple(
    f"cpu[{settings}threads={threads}]"
    for threads in (1, 2, 4, 8, 16)
    for settings in ("isa=default,", "isa=avx2,", "")
)
# 49 virtual platforms of one CPU.
_MANY: Final = (
    *(
        f"cpu[{isa}{mkl}threads={threads}]"
        for threads in (1, 2, 3, 4, 8, 16)
        for isa in ("", "isa=avx2,", "isa=default,")
        for mkl in ("", "mkl_cbwr=COMPATIBLE,")
    ),
    *(f"cpu[onednn_isa={isa},threads={threads}]" for threads in (1, 2, 4) for isa in ("SSE41", "AVX", "AVX2")),
    *(f"cpu[mkldnn=off,threads={threads}]" for threads in (1, 2, 4)),
    "cpu[mkl_cbwr=COMPATIBLE,mkldnn=off,threads=1]",
)
_QUICK_CORES: Final = tuple(f"cpu[{isa}threads={threads}]" for threads in (1, 2) for isa in ("isa=default,", ""))


@dataclass(frozen=True)
class RecordedStudy:
    """What all platforms computed.

    Attributes:
        name: The study.
        variants: Names of its variants.
        platforms: Platforms that recorded it, in the order asked for.
        specs: Their specs.
        cells: What became of every platform.
        changes: Classes along the graph, of all variants.
    """

    name: str
    variants: tuple[str, ...]
    platforms: tuple[Platform, ...]
    specs: tuple[str, ...]
    cells: tuple[Cell, ...]
    changes: tuple[Change, ...]

    def of_variant(self, variant: str) -> list[Change]:
        """Calls of a variant, in order."""
        return [change for change in self.changes if _variant_of(change.key) == variant]

    def classes(self, variant: str, platforms: Sequence[Platform] | None = None) -> Classes:
        """Classes of the last result of a variant, over all platforms or some."""
        key = [key for key in common_keys(self.platforms)[0] if _variant_of(key) == variant][-1]
        found = classes_of(self.platforms if platforms is None else platforms, Output(key, Kind.RESULT, 0))
        assert found is not None  # every platform has a common key
        return found

    def deviating(self, key: Key) -> float:
        """Share of the sampled elements of a result that are not identical on all platforms."""
        output = Output(key, Kind.RESULT, 0)
        samples = [next(values_of(platform, output)).bits for platform in self.platforms]
        different = sum(len({int(bits) for bits in element}) > 1 for element in zip(*samples, strict=True))
        return different / max(1, len(samples[0]))


# Each platform in a process of its own: the instruction set is read once, when torch is loaded.
def record_study(
    name: str,
    targets: Sequence[str],
    *,
    quick: bool,
    jobs: int = 1,
    progress: Callable[[int, int], None] | None = None,
) -> RecordedStudy:
    """Record a study on each platform, and read the recordings.

    Args:
        name: One of `programs.STUDIES`.
        targets: Platforms of the CPU; the study's own by default.
        quick: Fewer platforms and smaller variants.
        jobs: Processes at a time.
        progress: Called with the number of platforms done and of all.

    Raises:
        PlatformError: A platform cannot be read.
        UsageError: One that is not the CPU, or fewer than two recorded the study.
    """
    many = {"cores": _CORES, "resnet18": _MANY}.get(name, PLATFORMS)
    few = _QUICK_CORES if name == "cores" else QUICK_PLATFORMS
    specs = platforms_of((), targets or (few if quick else many))
    # Its tables have the kernel of each layer.
    kernels = ("--kernels",) if name == "resnet18" else ()
    # Calls outside all modules make the weights: they are not of the study.
    arguments = (*kernels, "--modules", "?*", "-m", programs.__name__, name, *(("--quick",) if quick else ()))
    with tempfile.TemporaryDirectory(prefix="shadowrun-") as folder:
        cells = record_grid(specs, arguments, Path(folder), jobs=jobs, progress=progress)
        done = [cell for cell in cells if cell.outcome == RECORDED]
        if len(done) < 2:
            why = "; ".join(f"{cell.platform}: {cell.outcome} {cell.note}".strip() for cell in cells)
            raise UsageError(f"Fewer than two platforms recorded the study {name!r}: {why}.", slug="no-recordings")
        return read_study(name, cells, Path(folder), quick=quick)


def read_study(name: str, cells: Sequence[Cell], folder: Path, *, quick: bool) -> RecordedStudy:
    """Read the recordings of a study.

    Args:
        name: The study.
        cells: Its platforms, of which those that were recorded are read.
        folder: Has their files.
        quick: As it was recorded.
    """
    done = [cell for cell in cells if cell.outcome == RECORDED]
    platforms = recorded_platforms.load([folder / cell.file for cell in done])
    return RecordedStudy(
        name,
        tuple(programs.variants(name, quick=quick)),
        tuple(platforms),
        tuple(cell.platform for cell in done),
        tuple(cells),
        tuple(along_graph(platforms)),
    )


def _variant_of(key: Key) -> str:
    """The part of a module's path that names the variant: it follows the wrapper's name."""
    return key.module.split(".")[1] if "." in key.module else ""
