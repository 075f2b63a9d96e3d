"""Plug-in of pytest: the fixture `known_classes`, for tests whose results are expected to the last bit.

pytest loads this module in every project where shadowrun is installed, so that it imports neither torch nor anything of
shadowrun before a test asks for the fixture.

Example of a test:
    >>> def test_results_are_known(known_classes):  # doctest: +SKIP
    ...     with known_classes.record():
    ...         model(inputs)
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

if TYPE_CHECKING:
    from types import TracebackType

    from shadowrun.recording.model import Recording
    from shadowrun.studies.classes.known import ClassCheck

__all__ = ["KnownClasses", "known_classes", "pytest_addoption", "pytest_configure", "pytest_terminal_summary"]

_FILE: Final = "known_classes.toml"
_HINT: Final = "If the new results are right, add their class by: pytest --known-classes-update 'WHY THEY ARE RIGHT'"
_written: pytest.StashKey[dict[Path, int]] = pytest.StashKey()


def pytest_addoption(parser: pytest.Parser) -> None:
    """The option that writes, and the setting that names the file."""
    parser.getgroup("shadowrun").addoption(
        "--known-classes-update",
        metavar="REASON",
        help="fixture known_classes: add new classes to the file, with the date and this reason why they are right",
    )
    parser.addini(
        "known_classes_file",
        f"fixture known_classes: file of known classes, from the root of the project (default: {_FILE} in the folder "
        "of each test)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to write without a reason, or from several processes at once."""
    reason = config.getoption("known_classes_update")
    if reason is None:
        return
    if not reason.strip():
        raise pytest.UsageError("--known-classes-update: say why the new results are right; the file keeps the reason.")
    if os.environ.get("PYTEST_XDIST_WORKER") or getattr(config.option, "numprocesses", None):
        raise pytest.UsageError("--known-classes-update writes one file from all tests: run it without -n.")
    config.stash[_written] = {}


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say what was written."""
    for path, n in config.stash.get(_written, {}).items():
        terminalreporter.write_line(f"known classes: {n} new in {os.path.relpath(path)}: look at them and commit them")


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
            name: Tells several checks of one test apart; they are numbered by default.
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
        from shadowrun.recording.recording_file import read
        from shadowrun.studies.classes import known
        from shadowrun.studies.classes.platforms import platforms_of

        self._n_checks += 1
        label = name or (f"#{self._n_checks}" if self._n_checks > 1 else "")
        test = f"{self._test} {label}".strip()
        loaded = read(Path(recording)) if isinstance(recording, str | Path) else recording
        platform = platforms_of([loaded], [test])[0].with_facts(test=test)
        # Other tests may have the same calls: their classes are no candidates.
        every = known.read_known(self.path) if self.path.exists() else []
        found = known.check_platform(platform, [entry for entry in every if entry.is_of(test=test)])
        if found.known:
            return found
        reason = self._config.getoption("known_classes_update")
        if reason is None:
            raise AssertionError(f"{found.message}\n{self.path.name} of {self.path.parent.name}: {_HINT}")
        new = known.classes_to_know([platform], outputs, reason)
        if not new:
            raise AssertionError(f"{test}: the recording has no results: no call left a digest")
        written = self._config.stash[_written]
        written[self.path] = written.get(self.path, 0) + known.write_known(self.path, new)
        return known.check_platform(platform, new)


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
