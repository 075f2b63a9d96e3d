"""Plug-in of pytest: ``--shadowrun TARGET`` compares each test, and the fixture `known_classes` checks results.

pytest loads this module in every project where shadowrun is installed: it imports neither torch nor anything of
shadowrun, and does nothing, before an option, a marker or a fixture asks for it. `pytest_compare` has the comparison.

Examples:
    >>> def test_results_are_known(known_classes):  # doctest: +SKIP
    ...     with known_classes.record():
    ...         model(inputs)
    >>> @pytest.mark.shadowrun("npu", allow=["aten::erfinv"])  # doctest: +SKIP
    ... def test_model_on_npu(): ...
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from types import TracebackType

    from shadowrun.comparison import Comparison
    from shadowrun.recording.model import Recording
    from shadowrun.studies.classes.known_classes import ClassCheck

__all__ = [
    "KnownClasses",
    "compared_tests",
    "known_classes",
    "pytest_addoption",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_terminal_summary",
    "shadowrun_run",
]

_FILE: Final = "known_classes.toml"
_HINT: Final = "If the new results are right, add their class by: pytest --known-classes-update 'WHY THEY ARE RIGHT'"
_written: pytest.StashKey[dict[Path, int]] = pytest.StashKey()
_COMPARE: Final = "shadowrun-compare"
_MAX_LINES: Final = 10
# Options with one value: ``--shadowrun-ref``, and ``shadowrun_ref`` in the configuration of pytest.
_OPTIONS: Final = {
    "target": ("TARGET", "compare the operators of each test with another platform: npu, 'cpu[threads=1]', sim"),
    "ref": ("REF", "platform to trust (default: cpu)"),
    "fail-on": ("KINDS", "findings that fail a test (default: unsupported,error,mismatch); also: fallback, new, none"),
    "data": ("FILE", "data file of the session (default: .shadowrun)"),
    "baseline": ("DATA", "data file of an earlier session, for --shadowrun-fail-on new"),
    "flaws": ("A,B", "simulate the target with these flaws; `shadowrun platforms --flaws` lists them"),
}
_LISTS: Final = {
    "report": ("FILE", "write the report of the session, as -o of `shadowrun report` (may be repeated)"),
    "import": ("MODULE", "import this package first: it registers the device (may be repeated)"),
}
_MARKER: Final = (
    "shadowrun(target, *, ref, fail_on, allow, skip, **options): compare this test with a target, with or without "
    "--shadowrun. `allow` has patterns of operators whose findings do not fail it, `skip` a reason not to compare it; "
    "other options are those of shadowrun.compare."
)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options, and for each a setting of the same name."""
    group = parser.getgroup("shadowrun")
    for name, (metavar, text) in _OPTIONS.items():
        option = "--shadowrun" if name == "target" else f"--shadowrun-{name}"
        group.addoption(option, dest=f"shadowrun_{name.replace('-', '_')}", metavar=metavar, help=text)
        parser.addini(f"shadowrun_{name.replace('-', '_')}", text, default=None)
    for name, (metavar, text) in _LISTS.items():
        group.addoption(
            f"--shadowrun-{name}", dest=f"shadowrun_{name}", action="append", metavar=metavar, help=text, default=[]
        )
        parser.addini(f"shadowrun_{name}", text, type="args", default=[])
    group.addoption(
        "--known-classes-update",
        metavar="REASON",
        help="fixture known_classes: add new classes to the file, with the date and this reason why they are right",
    )
    parser.addini(
        "known_classes_file",
        f"fixture known_classes: file of known classes, from the root of the project (default: {_FILE} in the folder "
        "of each test)",
    )


def _wanted(config: pytest.Config, name: str) -> Any:
    """An option, or the setting of its name."""
    given = config.getoption(f"shadowrun_{name}")
    return given or config.getini(f"shadowrun_{name}")


def pytest_configure(config: pytest.Config) -> None:
    """Begin to compare, if an option says so; check the option of `known_classes`."""
    config.addinivalue_line("markers", _MARKER)
    if _wanted(config, "target"):
        _compare(config)
    reason = config.getoption("known_classes_update")
    if reason is None:
        return
    if not reason.strip():
        raise pytest.UsageError("--known-classes-update: say why the new results are right; the file keeps the reason.")
    # Each process would write its own classes over those of the others.
    if os.environ.get("PYTEST_XDIST_WORKER") or getattr(config.option, "numprocesses", None):
        raise pytest.UsageError("--known-classes-update writes one file from all tests: run it without -n.")
    config.stash[_written] = {}


def _compare(config: pytest.Config) -> None:
    """Register the part that compares, once."""
    if config.pluginmanager.has_plugin(_COMPARE):
        return
    from shadowrun.pytest_compare import CompareTests, Wanted

    names = [name.replace("-", "_") for name in (*_OPTIONS, *_LISTS)]
    wanted = Wanted(**{name.replace("import", "imports"): _wanted(config, name) for name in names})
    config.pluginmanager.register(CompareTests(config, wanted), _COMPARE)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A marker with a target needs no option."""
    marks = (mark for item in items for mark in item.iter_markers("shadowrun"))
    if any(mark.args or "target" in mark.kwargs for mark in marks):
        _compare(config)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """The findings of all tests, also those of other processes; and the known classes that were written."""
    seen = compared_tests(terminalreporter)
    if seen or (config.pluginmanager.has_plugin(_COMPARE) and any(terminalreporter.stats.values())):
        _summary(terminalreporter, list(seen.items()))
    for path, n in config.stash.get(_written, {}).items():
        terminalreporter.write_line(f"known classes: {n} new in {os.path.relpath(path)}: look at them and commit them")


def compared_tests(reporter: Any) -> dict[str, dict[str, Any]]:
    """What was compared in each test: the last report of its phases has all."""
    found: dict[str, dict[str, Any]] = {}
    for report in (report for group in reporter.stats.values() for report in group):
        compared = getattr(report, "shadowrun", None)
        # Set-up, call and teardown have a report each; the last one counts all.
        if compared is not None and compared["n_calls"] >= found.get(report.nodeid, compared)["n_calls"]:
            found[report.nodeid] = compared
    return found


def _summary(reporter: Any, seen: list[tuple[str, dict[str, Any]]]) -> None:
    found: dict[str, list[str]] = {}
    for test, compared in seen:
        for finding in compared["findings"]:
            found.setdefault(finding["text"], []).append(test)
    n_calls, n_tests = sum(c["n_calls"] for _, c in seen), sum(bool(c["n_calls"]) for _, c in seen)
    reporter.section("shadowrun", sep="=")
    tests = f"{n_tests:,} of {len(seen):,} tests" if n_tests != len(seen) else f"{n_tests:,} tests"
    reporter.write_line(f"{n_calls:,} operator calls in {tests} compared, findings: {len(found):,}")
    if not n_calls:
        reporter.write_line("no call could be compared: this proves nothing", red=True)
    for text, names in list(found.items())[:_MAX_LINES]:
        more = f" and {len(names) - 1:,} more" if len(names) > 1 else ""
        reporter.write_line(f"{text}  [{names[0]}{more}]")
    if len(found) > _MAX_LINES:
        reporter.write_line(f"… and {len(found) - _MAX_LINES:,} more: `shadowrun report` has all")


@pytest.fixture
def shadowrun_run(request: pytest.FixtureRequest) -> Comparison:
    """The comparison of this test, of ``--shadowrun`` or its marker; without either, the test is skipped."""
    plugin: Any = request.config.pluginmanager.get_plugin(_COMPARE)
    run: Comparison | None = plugin.run_of(request.node) if plugin is not None else None
    if run is None:
        pytest.skip("not compared: give --shadowrun TARGET, or the test a marker with a target")
    return run


@pytest.fixture
def known_classes(request: pytest.FixtureRequest, tmp_path: Path) -> KnownClasses:
    """Check a test's results against the classes that the project expects; see `KnownClasses`."""
    return KnownClasses(request, tmp_path)


class KnownClasses:
    """The known classes of one test, in the file ``known_classes.toml`` next to it.

    Each class belongs to a test, and to the hardware that its fingerprint names. A test of other results on one
    hardware fails, and the message has the distance to the nearest known class. With
    ``pytest --known-classes-update REASON`` its class is added, with the reason and the date.
    """

    def __init__(self, request: pytest.FixtureRequest, folder: Path) -> None:
        config = request.config
        named = config.getini("known_classes_file")
        self.path = config.rootpath / named if named else request.path.parent / _FILE
        test = os.path.relpath(request.path, self.path.parent).replace(os.sep, "/")
        self._test = "::".join((test, *request.node.nodeid.split("::")[1:]))
        self._folder = folder
        self._config = config
        self._n_checks = 0

    def record(self, *, outputs: tuple[str, ...] = (), name: str = "", **options: Any) -> _Recorded:
        """Record the calls of a ``with`` block, and check their results at its end.

        Args:
            outputs: Patterns of ``module/operator`` whose results are written; the last call of each step by default.
                A check compares what the file has.
            name: Distinguishes several checks of one test; they are numbered by default.
            **options: Of `shadowrun.record`.

        Returns:
            A context manager. Its ``with`` statement gives the `RecordRun`, for `step`.
        """
        return _Recorded(self, self._folder / f"known_classes.{self._n_checks}.shadowrec", outputs, name, options)

    def check(self, recording: Recording | str | Path, *, outputs: tuple[str, ...] = (), name: str = "") -> ClassCheck:
        """Check a recording.

        Args:
            recording: A recording, or its file.
            outputs: As in `record`.
            name: As in `record`.

        Raises:
            AssertionError: Its class is not known; the message has the distance to the nearest.
            DataFileError: A file cannot be read, or the known classes cannot be written.
        """
        __tracebackhide__ = True
        from shadowrun.recording.file_format.recording_file import read
        from shadowrun.studies.classes import known_classes
        from shadowrun.studies.classes.platforms import platforms_of

        self._n_checks += 1
        label = name or (f"#{self._n_checks}" if self._n_checks > 1 else "")
        test = f"{self._test} {label}".strip()
        loaded = read(Path(recording)) if isinstance(recording, str | Path) else recording
        platform = platforms_of([loaded], [test])[0].with_facts(test=test)
        # Other tests may have the same calls: their classes are no candidates.
        every = known_classes.read_known(self.path) if self.path.exists() else []
        found = known_classes.check_platform(platform, [entry for entry in every if entry.is_of(test=test)])
        if found.known:
            return found
        reason = self._config.getoption("known_classes_update")
        if reason is None:
            raise AssertionError(f"{found.message}\n{self.path.name} of {self.path.parent.name}: {_HINT}")
        new = known_classes.classes_to_know([platform], outputs, reason)
        if not new:
            raise AssertionError(f"{test}: the recording has no results: no call left a digest")
        written = self._config.stash[_written]
        written[self.path] = written.get(self.path, 0) + known_classes.write_known(self.path, new)
        return known_classes.check_platform(platform, new)


class _Recorded:
    """The context manager of `KnownClasses.record`."""

    def __init__(
        self, owner: KnownClasses, path: Path, outputs: tuple[str, ...], name: str, options: dict[str, Any]
    ) -> None:
        from shadowrun.comparison.record import record

        self._owner, self._outputs, self._name = owner, outputs, name
        self._run = record(path, **options)

    def __enter__(self) -> Any:
        return self._run.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        __tracebackhide__ = True
        self._run.stop()
        if kind is None:  # the test's own exception is what failed
            self._owner.check(self._run.path, outputs=self._outputs, name=self._name)
