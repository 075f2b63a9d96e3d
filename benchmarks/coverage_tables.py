"""Operator coverage of platforms: the tables of docs/coverage.md.

Each sweep writes a coverage file into a folder. A second start resumes an interrupted sweep and skips complete ones.

    python benchmarks/coverage_tables.py                                     # about a quarter of an hour on two cores
    python benchmarks/coverage_tables.py --only 'sim-*' --jobs 1
    python benchmarks/coverage_tables.py --markdown docs/coverage.md         # measure, and rewrite the page's tables
    python benchmarks/coverage_tables.py --no-run --markdown docs/coverage.md   # from existing coverage files
"""

from __future__ import annotations

import argparse
import itertools
import subprocess
import sys
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from coverage_page import Measured, markdown
from dtype_table import dtype_table
from tables import put_between_marks

from shadowrun.studies.sweep.coverage_file import CoverageFile
from shadowrun.studies.sweep.reports.support import read_sweeps

ROOT = Path(__file__).resolve().parents[1]
DTYPES = "float32,bfloat16,float16"
N_SAMPLES = 8
"""Of each operator in the table of dtypes."""
_MAX_DEATHS = 20


@dataclass(frozen=True, slots=True)
class Planned:
    """A sweep that the page shows.

    Attributes:
        name: Of its file.
        arguments: Of ``shadowrun sweep``.
    """

    name: str
    arguments: tuple[str, ...]

    @property
    def tried(self) -> str:
        """``forward, backward; 3 samples``."""
        given = dict(itertools.pairwise(self.arguments))
        return f"{given['--parts'].replace(',', ', ')}; {given['--samples']} samples"


def _sweep(name: str, target: str, dtypes: str, samples: int, *more: str, parts: str = "forward,backward") -> Planned:
    options = ("--target", target, "--dtypes", dtypes, "--samples", str(samples), "--parts", parts)
    return Planned(name, (*options, *more))


def _preset(name: str, dtypes: str = "float32,bfloat16", parts: str = "forward,backward") -> Planned:
    return _sweep(f"sim-{name}", "sim", dtypes, 2, "--preset", name, parts=parts)


SWEEPS = (
    _sweep("isa", "cpu[isa=default]", DTYPES, 3),
    _sweep("lazy", "lazy", "float32", 3),
    _preset("clean"),
    _preset("young"),
    _preset("support", f"{DTYPES},float64,int64"),
    _preset("exceptional", parts="forward,backward,probe"),
    _preset("low-precision"),
    _preset("rounding"),
)
"""In the order of the page."""


def main() -> int:
    """Run the incomplete sweeps, and write the tables."""
    options = _parser().parse_args()
    folder = Path(options.folder)
    folder.mkdir(parents=True, exist_ok=True)
    chosen = [planned for planned in SWEEPS if fnmatchcase(planned.name, options.only)]
    dtypes = folder / "dtypes.jsonl"
    if options.run:
        for number, planned in enumerate(chosen, 1):
            print(f"{number} of {len(chosen)}: {planned.name}", file=sys.stderr, flush=True)
            _run(planned, _file(folder, planned), options.jobs)
        if fnmatchcase("dtypes", options.only):
            _run_dtypes(dtypes)
    done = [planned for planned in chosen if _file(folder, planned).exists()]
    sweeps = read_sweeps([_file(folder, planned) for planned in done])
    text = markdown(
        [Measured(sweep, planned.tried) for sweep, planned in zip(sweeps, done, strict=True)],
        dtype_table(dtypes, N_SAMPLES) if dtypes.exists() else "",
    )
    print(text)
    if options.markdown:
        put_between_marks(Path(options.markdown), text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--folder", default=".coverage-tables", help="folder of the coverage files (default: %(default)s)"
    )
    parser.add_argument(
        "--only", default="*", metavar="GLOB", help=f"run only these: {', '.join(p.name for p in SWEEPS)}, dtypes"
    )
    parser.add_argument("--jobs", default="2", help="worker processes of a sweep (default: %(default)s)")
    parser.add_argument(
        "--no-run", dest="run", action="store_false", help="only write the tables, from existing coverage files"
    )
    parser.add_argument("--markdown", metavar="FILE", help="write the tables to a file; in a page, between its marks")
    return parser


def _file(folder: Path, planned: Planned) -> Path:
    return folder / f"{planned.name}.shadowcov"


def _run(planned: Planned, path: Path, jobs: str) -> None:
    """Sweep, unless that is done."""
    if path.exists():
        file = CoverageFile.open(path)
        complete = file.info.complete
        file.close()
        if complete:
            return
    command = [sys.executable, "-m", "shadowrun", "sweep", *planned.arguments, "--jobs", jobs, "--file", str(path)]
    done = subprocess.run([*command, "--fail-on", "none"], cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise SystemExit(f"{planned.name}: shadowrun sweep ended with {done.returncode}; run this again to go on")


def _run_dtypes(path: Path) -> None:
    """An operator may end the process: the next process starts with the operator after it."""
    command = [sys.executable, "-m", "tests.ground_truth.dtype_support", str(path.resolve())]
    for _ in range(_MAX_DEATHS):
        if not subprocess.run([*command, "--samples", str(N_SAMPLES)], cwd=ROOT, check=False).returncode:
            return
    raise SystemExit(f"dtypes: {_MAX_DEATHS} operators ended their process")


if __name__ == "__main__":
    sys.exit(main())
