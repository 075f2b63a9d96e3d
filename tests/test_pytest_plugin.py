"""The fixture `known_classes`, in tests of projects that pytester writes."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytest_plugins = "pytester"

PLUGIN = ("-p", "shadowrun.pytest_plugin", "-p", "no:cacheprovider")
TESTS = """
import pytest, torch

VALUE = {value}

@pytest.mark.parametrize("n", [2, 3])
def test_double(known_classes, n):
    with known_classes.record():
        torch.full((n,), VALUE) * n

def test_twice(known_classes):
    for power in (1, 2):
        with known_classes.record(outputs=("aten::pow*",)) as run:
            torch.full((2,), 3 * VALUE) ** power
            torch.zeros(1) + 1
"""


@pytest.fixture(autouse=True)
def no_xdist(monkeypatch):
    """These tests may run under xdist, and those that they write do not."""
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)


@pytest.fixture
def project(pytester):
    """Writes the tests with this value, and runs them."""

    def run(value, *options):
        pytester.makepyfile(test_results=TESTS.format(value=value))
        return pytester.runpytest_inprocess(*PLUGIN, *options)

    return run


def known(pytester, name="known_classes.toml"):
    return tomllib.loads((pytester.path / name).read_text(encoding="utf-8"))["class"]


def test_a_new_class_fails_until_it_is_written(project, pytester):
    result = project(1.5)
    result.assert_outcomes(failed=3)
    result.stdout.fnmatch_lines(
        [
            "E*AssertionError: test_results.py::test_double[[]2[]]: no known class has these outputs",
            "E*pytest --known-classes-update 'WHY THEY ARE RIGHT'",
        ]
    )
    result = project(1.5, "--known-classes-update", "checked by hand")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["known classes: 4 new in known_classes.toml: look at them and commit them"])
    project(1.5).assert_outcomes(passed=3)
    classes = known(pytester)
    assert {c["reason"] for c in classes} == {"checked by hand"}
    assert [c["fingerprint"]["test"] for c in classes] == [
        "test_results.py::test_double[[]2]",
        "test_results.py::test_double[[]3]",
        "test_results.py::test_twice",
        "test_results.py::test_twice #2",
    ]
    # Only the outputs that the test names.
    assert [output["op"] for c in classes[2:] for output in c["output"]] == ["aten::pow.Tensor_Scalar"] * 2


def test_another_result_has_its_distance_to_the_nearest(project, pytester):
    project(1.5, "--known-classes-update", "first")
    near = 1.5 + 2**-20  # 8 ULP of float32
    result = project(near)
    result.assert_outcomes(failed=3)
    said = result.stdout.str()
    assert "test_double[2]: new class; the nearest is" in said
    assert "19 of 23 bits agree, at most 15 ULP apart (aten::mul.Tensor)" in said
    result = project(near, "--known-classes-update", "second")
    result.assert_outcomes(passed=3)
    assert [c["reason"] for c in known(pytester)] == ["first"] * 4 + ["second"] * 4
    project(near).assert_outcomes(passed=3)
    project(1.5).assert_outcomes(passed=3)
    # Known classes of another test do not count, though its calls have the same names.
    text = (pytester.path / "known_classes.toml").read_text(encoding="utf-8")
    (pytester.path / "known_classes.toml").write_text(text.replace("test_double[[]2]", "test_gone"), encoding="utf-8")
    result = project(1.5)
    result.assert_outcomes(failed=1, passed=2)
    assert "test_double[2]: no known class has these outputs" in result.stdout.str()


def test_one_file_for_the_project(project, pytester):
    pytester.makeini("[pytest]\nknown_classes_file = expected/classes.toml\n")
    (pytester.path / "expected").mkdir()
    project(2.0, "--known-classes-update", "x").assert_outcomes(passed=3)
    assert known(pytester, "expected/classes.toml")[0]["fingerprint"]["test"].startswith("../test_results.py::")
    project(2.0).assert_outcomes(passed=3)


def test_what_the_test_raises_comes_first(pytester):
    pytester.makepyfile(
        "def test_it(known_classes):\n    with known_classes.record():\n        raise KeyError('mine')\n"
    )
    result = pytester.runpytest_inprocess(*PLUGIN, "--known-classes-update", "x")
    result.assert_outcomes(failed=1)
    assert "KeyError: 'mine'" in result.stdout.str()
    assert not (pytester.path / "known_classes.toml").exists()


def test_nothing_is_recorded(pytester):
    pytester.makepyfile("def test_it(known_classes):\n    with known_classes.record():\n        pass\n")
    result = pytester.runpytest_inprocess(*PLUGIN, "--known-classes-update", "x")
    result.assert_outcomes(failed=1)
    assert "the recording has no results" in result.stdout.str()


def test_a_damaged_file(project, pytester):
    (pytester.path / "known_classes.toml").write_text("[[class]]", encoding="utf-8")
    result = project(1.5)
    result.assert_outcomes(failed=3)
    assert "known_classes.toml' cannot be read: 'output' is missing" in result.stdout.str()


@pytest.mark.parametrize(("reason", "environment", "message"), [
    (" ", {}, "say why the new results are right"),
    ("right", {"PYTEST_XDIST_WORKER": "gw0"}, "run it without -n"),
])  # fmt: skip
def test_the_option_is_refused(project, monkeypatch, reason, environment, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    result = project(1.5, "--known-classes-update", reason)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert message in result.stderr.str()


def test_a_project_that_does_not_use_it_imports_nothing():
    """pytest loads the module wherever shadowrun is installed."""
    code = (
        "import sys, pytest; before = set(sys.modules); import shadowrun.pytest_plugin; "
        "print(sorted(n for n in set(sys.modules) - before if not n.startswith('_')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['shadowrun', 'shadowrun.pytest_plugin']"


def test_it_is_declared():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    # The name of the entry point is the module's: `-p` then registers what the entry point would.
    assert project["entry-points"]["pytest11"] == {PLUGIN[1]: PLUGIN[1]}
