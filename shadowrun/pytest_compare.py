"""Each test of a pytest session under a comparison: what ``--shadowrun`` and the marker ``shadowrun`` ask for.

Tests share one comparison, and are its steps: to make one takes longer than a short test. A test whose marker has
options gets one of its own, in memory. Under pytest-xdist each worker writes a data file; the controller combines them.

Fixtures are compared too, and what they do counts for the test that they were set up or torn down for: findings of a
setup fail that test, those of a teardown are an error after it. Not compared are those around which the suite has a
dispatch mode of its own on: what a fixture enters in its setup it leaves in its teardown, with ours on top then.
"""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest

from shadowrun.analysis.wording import plural
from shadowrun.pytest_plugin import compared_tests
from shadowrun.settings import DATA_FILE, FAIL_ON, KINDS, NEW, fits_operator

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from shadowrun.analysis import Baseline
    from shadowrun.comparison import Comparison
    from shadowrun.types import OpRecord

__all__ = ["CompareTests", "Wanted"]

_MAX_ROWS: Final = 10
# Options of the marker that are not those of `shadowrun.compare`.
_OWN: Final = ("ref", "fail_on", "allow", "skip", "target")
# Fixtures that call no operator: a test with these alone is not slowed down by the comparison of its fixtures.
_OF_PYTEST: Final = frozenset({
    *("request", "pytestconfig", "cache", "capsys", "capsysbinary", "capfd", "capfdbinary", "caplog"),
    *("monkeypatch", "recwarn", "record_property", "record_testsuite_property", "record_xml_attribute"),
    *("tmp_path", "tmp_path_factory", "tmpdir", "tmpdir_factory", "testdir", "pytester", "worker_id", "testrun_uid"),
    *("shadowrun_run", "known_classes"),
})  # fmt: skip
_FAILING: Final = ("unsupported", "error", "mismatch", "fallback")


@dataclass(frozen=True, slots=True)
class Wanted:
    """The options, as given; None or empty where not.

    Attributes:
        target, ref, fail_on, data, baseline, flaws: Of ``--shadowrun-NAME``.
        report, imports: Likewise, with several values.
    """

    target: str | None
    ref: str | None
    fail_on: str | None
    data: str | None
    baseline: str | None
    flaws: str | None
    report: list[str]
    imports: list[str]


@dataclass(frozen=True, slots=True)
class _Test:
    """How a test is compared.

    Attributes:
        run: Its comparison.
        fail_on: Kinds of findings that fail it.
        allow: Patterns of operators whose findings do not.
        api: Whether a mode for functions of torch is on too.
    """

    run: Comparison
    fail_on: tuple[str, ...]
    allow: tuple[str, ...]
    api: bool = False


class CompareTests:
    """The plug-in: hooks of pytest.

    Args:
        config: Of the session.
        wanted: The options.
    """

    def __init__(self, config: pytest.Config, wanted: Wanted) -> None:
        self._config = config
        self._wanted = wanted
        self._fail_on = _kinds(wanted.fail_on)
        self._runs: dict[str, Comparison] = {}
        self._tests: dict[str, _Test | None] = {}
        self._baseline: Baseline | None = None
        self._ends_wider = False
        self._worker: str = getattr(config, "workerinput", {}).get("workerid", "")
        # Of xdist, whose controller runs no test.
        self._is_controller = not self._worker and getattr(config.option, "dist", "no") != "no"
        self._data = Path(wanted.data or DATA_FILE)
        if NEW in self._fail_on and not wanted.baseline:
            raise pytest.UsageError("--shadowrun-fail-on new compares with an earlier session: --shadowrun-baseline.")
        if not self._is_controller:
            with _usage_errors():
                self._begin()

    def _begin(self) -> None:
        """Before the tests are collected: they may name the device when they are imported."""
        from shadowrun.cli import options

        if self._wanted.imports:
            from shadowrun.platforms.plugins import import_plugins

            import_plugins(self._wanted.imports, inherit=True)
        if self._wanted.flaws:
            options.enable_simulation(self._wanted.target or "sim", options.words(self._wanted.flaws), None)
        if self._wanted.baseline:
            import shadowrun

            # Read at once: it may be the file that this session replaces.
            self._baseline = shadowrun.load(self._wanted.baseline).as_baseline()

    # -- the session -----------------------------------------------------------------------------------

    def pytest_report_header(self) -> str:
        """``shadowrun: npu against cpu``."""
        if not self._wanted.target:
            return "shadowrun: tests with a marker"
        kinds = ", ".join(self._fail_on) or "nothing"
        return f"shadowrun: {self._wanted.target} against {self._wanted.ref or 'cpu'}; a test fails on {kinds}"

    def pytest_sessionstart(self) -> None:
        """Refuse a target that does not exist before any test runs; forget files of earlier workers."""
        from shadowrun.cli import options

        with _usage_errors():
            options.check_outputs(self._wanted.report)
            if self._is_controller:
                for path in self._files_of_workers():
                    path.unlink()
            elif self._wanted.target:
                self._comparison(self._wanted.target, self._wanted.ref or "cpu", {})

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Combine the files of workers, write reports, and fail a session in which nothing was compared."""
        if self._worker:
            return
        with _usage_errors():
            if self._is_controller:
                self._combine()
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        seen = compared_tests(reporter)
        # Nothing was compared: this would be a gate that always passes.
        if self._wanted.target and self._fail_on and seen and not any(c["n_calls"] for c in seen.values()):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(trylast=True)
    def pytest_terminal_summary(self) -> None:
        """Write the reports: one to standard output comes after the findings."""
        if self._wanted.report and self._data.exists():
            with _usage_errors():
                self._report()

    def _files_of_workers(self) -> list[Path]:
        return sorted(self._data.parent.glob(f"{self._data.name}.gw*[0-9]"))

    def _combine(self) -> None:
        import shadowrun
        from shadowrun.store.captured_inputs import folder_of

        files = self._files_of_workers()
        if files:
            shadowrun.combine(files, self._data, force=True)
        for path in files:
            # `shadowrun repro` reads captured inputs next to the file of the worker that captured them.
            if not folder_of(path).exists():
                path.unlink()

    def _report(self) -> None:
        import shadowrun
        from shadowrun.cli import options
        from shadowrun.report.run_report import run_document

        run = shadowrun.load(self._data)
        run.fail_on, run.baseline = self._fail_on, self._baseline
        options.print_report(run_document(run), argparse.Namespace(output=self._wanted.report, format=None))

    # -- a test ----------------------------------------------------------------------------------------

    def run_of(self, item: pytest.Item) -> Comparison | None:
        """The comparison of a test; None for one that is not compared."""
        test = self._test(item)
        return None if test is None else test.run

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> None:
        """Note whether fixtures of a module or class end after this test."""
        self._ends_wider = nextitem is None or nextitem.parent is not item.parent

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Compare what fixtures do before a test: their findings are the test's."""
        try:
            test = self._test(item)
        except pytest.fail.Exception:  # a wrong marker fails the test, not its setup
            test = None
        if test is None or not self._compares_fixtures(item, test):
            return (yield)
        item.stash[_first] = test.run.last_call() + 1
        try:
            with _running(test.run, ends_step=False):
                return (yield)
        except BaseException:
            self._collect(item, test, item.stash[_first])
            raise

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Compare what a test does; fail it if it passes and has findings."""
        test = self._test(item)
        if test is None:
            return (yield)
        first = item.stash.get(_first, None)
        if first is None:
            first = test.run.last_call() + 1
        else:
            del item.stash[_first]  # the test may run again
        ends_step = not self._compares_fixtures(item, test, teardown=True)
        try:
            with _running(test.run, ends_step=ends_step):
                result = yield
        finally:
            findings = self._collect(item, test, first)
        _fail_for(item, findings)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, Any, Any]:
        """Compare what fixtures do after a test; findings are an error of its teardown."""
        test = self._tests.get(item.nodeid)
        if test is None or not self._compares_fixtures(item, test, teardown=True):
            return (yield)
        first = test.run.last_call() + 1
        item.stash[_failed_here] = False
        try:
            with _running(test.run, ends_step=True):
                result = yield
        finally:
            findings = self._collect(item, test, first)
        _fail_for(item, findings)
        return result

    def _compares_fixtures(self, item: pytest.Item, test: _Test, *, teardown: bool = False) -> bool:
        """Whether a phase has fixtures that may call operators, and no mode of the suite is in the way."""
        import shadowrun
        from shadowrun.intercept import torchapi

        has_any = not _OF_PYTEST.issuperset(getattr(item, "fixturenames", ())) or (teardown and self._ends_wider)
        # A fixture that entered a mode leaves it in its teardown, by taking off whatever lies on top.
        return has_any and not test.api and shadowrun.current() is None and not torchapi.modes()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        """Put the findings into the report of a test, which xdist sends to the controller."""
        report = yield
        compared = item.stash.get(_compared, None)
        # All phases until then: the last report has all.
        if compared is not None:
            report.shadowrun = compared
            # The test's own exception is what failed; what differs may be why.
            if call.excinfo is not None and compared["findings"] and not item.stash.get(_failed_here, False):
                report.sections.append(("shadowrun", _text(compared["findings"])))
        return report

    def _test(self, item: pytest.Item) -> _Test | None:
        if item.nodeid not in self._tests:
            self._tests.clear()
            with _failures():
                self._tests[item.nodeid] = self._read(item)
        return self._tests[item.nodeid]

    def _read(self, item: pytest.Item) -> _Test | None:
        """The marker of a test, over the options of the session."""
        options: dict[str, Any] = {}
        # Of the module first, of the test last: the closest decides.
        for mark in reversed(list(item.iter_markers("shadowrun"))):
            options |= {**mark.kwargs, **({"target": mark.args[0]} if mark.args else {})}
        target = options.get("target") or self._wanted.target
        if not target or options.get("skip"):
            return None
        ref = options.get("ref") or self._wanted.ref or "cpu"
        fail_on = _kinds(options["fail_on"]) if "fail_on" in options else self._fail_on
        allow = options.get("allow", ())
        others = {name: value for name, value in options.items() if name not in _OWN}
        run = self._comparison(str(target), str(ref), others)
        patterns = (allow,) if isinstance(allow, str) else tuple(allow)
        return _Test(run, fail_on, patterns, bool(others.get("api")))

    def _comparison(self, target: str, ref: str, options: dict[str, Any]) -> Comparison:
        key = repr((target, ref, sorted(options.items(), key=lambda item: item[0])))
        if key not in self._runs:
            import shadowrun

            is_shared = (target, ref) == (self._wanted.target, self._wanted.ref or "cpu") and not options
            file = self._data.with_name(f"{self._data.name}.{self._worker}" if self._worker else self._data.name)
            given: Any = {"file": file, **options} if is_shared else options
            run = shadowrun.compare(target, ref, **given)
            run.baseline = self._baseline
            self._runs[key] = run
        return self._runs[key]

    def _collect(self, item: pytest.Item, test: _Test, first: int) -> list[dict[str, Any]]:
        """The findings of a test, as plain values; also kept for its report."""
        run = test.run
        found: dict[tuple[str, str, str, str], list[OpRecord]] = {}
        for record in run.records(status=_FAILING, since=first):
            v = record.verdict
            if str(v.cause) != "harness":  # shadowrun's own failure says nothing about the target
                found.setdefault((str(v.status), record.call.op, str(v.cause or ""), v.explanation), []).append(record)
        findings = [self._finding(test, key, records) for key, records in found.items()]
        findings.sort(key=lambda f: not f["fails"])
        n_calls = run.last_call() + 1 - first
        compared = _compared in item.stash
        before: dict[str, Any] = item.stash[_compared] if compared else {"n_calls": 0, "findings": []}
        all_findings = [*before["findings"], *findings]
        item.stash[_compared] = {"n_calls": before["n_calls"] + n_calls, "findings": all_findings}
        # In the JUnit XML of pytest these are properties of the test.
        shown = [finding["text"] for finding in all_findings[:_MAX_ROWS]]
        shown += [f"… and {len(all_findings) - _MAX_ROWS} more"] if len(all_findings) > _MAX_ROWS else []
        item.user_properties[:] = [
            *(pair for pair in item.user_properties if not pair[0].startswith("shadowrun_")),
            ("shadowrun_calls", before["n_calls"] + n_calls),
            *(("shadowrun_finding", text) for text in shown),
        ]
        return findings

    def _finding(self, test: _Test, key: tuple[str, str, str, str], records: list[OpRecord]) -> dict[str, Any]:
        from shadowrun.analysis import Signature
        from shadowrun.report.sanitize import clip

        kind, op, cause, explanation = key
        calls = [record.call for record in records]
        known = test.run.excuse(kind, op, dict.fromkeys(call.module for call in calls))
        allowed = any(fits_operator(pattern, op) for pattern in test.allow)
        before = self._baseline.findings if self._baseline is not None else {}
        is_new = any(Signature(kind, op, c.module, str(c.phase), cause) not in before for c in calls)
        fails = kind in test.fail_on or (NEW in test.fail_on and is_new)
        site = next((call.site for call in calls if call.site), "")
        why = f" ({explanation or cause})" if explanation or cause else ""
        excuse = f", known issue: {known.reason}" if known is not None else ", allowed by the marker" if allowed else ""
        return {
            "text": clip(f"{kind} of {op}{why}{f' at {site}' if site else ''}{excuse}"),
            "n_calls": len(records),
            "fails": fails and known is None and not allowed,
        }


_compared: pytest.StashKey[dict[str, Any]] = pytest.StashKey()
_failed_here: pytest.StashKey[bool] = pytest.StashKey()
_first: pytest.StashKey[int] = pytest.StashKey()


@contextlib.contextmanager
def _running(run: Comparison, *, ends_step: bool) -> Generator[None]:
    """Compare a phase of a test."""
    import shadowrun

    # A test may compare or record by itself: the session's comparison ends for it.
    run.gives_way = True
    run.start()
    try:
        yield
    finally:
        if ends_step and shadowrun.current() is run:  # else it gave way
            run.step()
        run.stop()


def _fail_for(item: pytest.Item, findings: list[dict[str, Any]]) -> None:
    failing = [finding for finding in findings if finding["fails"]]
    if failing:
        item.stash[_failed_here] = True
        # No traceback: it would show this hook. The lines name the test's own.
        pytest.fail(_text(failing), pytrace=False)


def _text(findings: list[dict[str, Any]]) -> str:
    # The first row is what pytest's short summary shows.
    rows = [f"shadowrun: {f['text']}, {plural(f['n_calls'], 'call')}" for f in findings[:_MAX_ROWS]]
    more = [f"shadowrun: … and {len(findings) - _MAX_ROWS:,} more"] if len(findings) > _MAX_ROWS else []
    return "\n".join([*rows, *more])


def _kinds(given: str | Iterable[str] | None) -> tuple[str, ...]:
    """Read ``a,b``, ``none`` or a sequence of kinds."""
    if given is None or given == "":
        return FAIL_ON
    words = given.split(",") if isinstance(given, str) else list(given)
    kinds = () if words in (["none"], []) else tuple(word.strip() for word in words)
    for kind in kinds:
        if kind not in (*KINDS, NEW) or kind == "slow":
            known = ", ".join(k for k in KINDS if k != "slow")
            raise pytest.UsageError(
                f"--shadowrun-fail-on: {kind!r} is no kind of finding; use {known}, {NEW}, or none."
            )
    return kinds


@contextlib.contextmanager
def _usage_errors() -> Generator[None]:
    """Our errors as pytest's: one line, and its exit status for wrong usage."""
    from shadowrun.errors import ShadowrunError

    try:
        yield
    except ShadowrunError as error:
        raise pytest.UsageError(f"shadowrun: {error}") from error


@contextlib.contextmanager
def _failures() -> Generator[None]:
    """Our errors as failures of the test whose marker is wrong."""
    from shadowrun.errors import ShadowrunError

    try:
        yield
    except (ShadowrunError, pytest.UsageError, TypeError) as error:
        raise pytest.fail.Exception(f"marker shadowrun: {error}", pytrace=False) from None
