"""What is built and packed: the compiled part where there is a compiler, all files of the package, all sources."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
import zlib
from pathlib import Path

import pytest

from shadowrun import native

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "shadowrun/native"
SOURCES = sorted([*FOLDER.glob("*.c"), *FOLDER.glob("*.h")])
PYTHON_H = Path(sysconfig.get_path("include"), "Python.h")
COMPILER = (sysconfig.get_config_var("CC") or "cc").split()[0]
CAN_BUILD = shutil.which(COMPILER) is not None and PYTHON_H.is_file()
AGAIN = "pip install -c constraints.txt -e ."


@pytest.mark.skipif(native.why_not == "SHADOWRUN_NATIVE=0", reason="SHADOWRUN_NATIVE=0")
def test_built_where_there_is_a_compiler():
    assert native.core is not None or not CAN_BUILD, f"{native.why_not}: {AGAIN}, and with -v if that does not help"


@pytest.mark.skipif(native.core is None, reason="there is no compiled part")
def test_built_from_the_sources_that_are_here():
    checksum = zlib.crc32(b"".join(file.read_bytes() for file in SOURCES)) & 0x7FFFFFFF
    assert checksum == native.core.SOURCES, f"built from other C files than those in {FOLDER}: {AGAIN}"


def test_every_c_file_is_compiled():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    (extension,) = settings["ext-modules"]
    assert extension["optional"]
    assert {*extension["sources"]} == {f"shadowrun/native/{file.name}" for file in SOURCES if file.suffix == ".c"}


def build(what, source, out, **env):
    """Build in `source` with the setuptools that is here, and give the file; pip would fetch one."""
    code = f"import sys; from setuptools import build_meta; build_meta.build_{what}(sys.argv[1])"
    command = [sys.executable, "-c", code, str(out)]
    out.mkdir()
    done = subprocess.run(command, cwd=source, env=os.environ | env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (file,) = out.iterdir()
    return file, done.stdout + done.stderr


def of_package(names):
    return {name for name in names if name.startswith("shadowrun/") and not name.endswith((".so", ".pyd", "/"))}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory):
    """The sources as the archive has them."""
    pytest.importorskip("setuptools", "77")
    tmp = tmp_path_factory.mktemp("archive")
    ignored = shutil.ignore_patterns(".*", "*.egg-info", "build", "dist", "__pycache__", "*.so", "*.pyd", "_build")
    shutil.copytree(ROOT, tmp / "tree", ignore=ignored)
    shutil.copytree(ROOT / ".ci", tmp / "tree/.ci")
    shutil.copy(ROOT / ".pre-commit-hooks.yaml", tmp / "tree")
    archive, _ = build("sdist", tmp / "tree", tmp / "out")
    with tarfile.open(archive) as file:
        file.extractall(tmp, filter="data")
    return tmp / archive.name.removesuffix(".tar.gz")


def test_the_archive_of_sources_has_all(unpacked):
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False).stdout.split()
    expected = {name for name in tracked if (ROOT / name).is_file() and name != ".gitignore"} or {"pyproject.toml"}
    assert expected - {str(file.relative_to(unpacked).as_posix()) for file in unpacked.rglob("*")} == set()


@pytest.mark.parametrize("compiler", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_wheel_from_the_archive_of_sources(unpacked, tmp_path, compiler):
    if compiler and not CAN_BUILD:
        pytest.skip("there is no C compiler, or no Python.h")
    tree = shutil.copytree(unpacked, tmp_path / "tree")
    wheel, log = build("wheel", tree, tmp_path / "out", **({} if compiler else {"CC": str(tmp_path / "no-compiler")}))
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        file.extractall(tmp_path / "installed")
    sources = {str(f.relative_to(unpacked).as_posix()) for f in (unpacked / "shadowrun").rglob("*") if f.is_file()}
    pages = {f"shadowrun/pages/{f.relative_to(unpacked / 'docs').as_posix()}" for f in unpacked.glob("docs/**/*.md")}
    pages = {page for page in pages if "/reference/" not in page}
    assert of_package(names) == {name for name in sources if not name.endswith((".c", ".h"))} | pages
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"shadowrun"}
    code = "from shadowrun import native; print(native.__file__, native.state())"
    env = {k: v for k, v in os.environ.items() if k != "SHADOWRUN_NATIVE"} | {"PYTHONPATH": str(tmp_path / "installed")}
    printed = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    ).stdout
    assert str(tmp_path) in printed
    assert printed.endswith(" on\n" if compiler else " off (not built)\n"), log
    # A user who has the wheel alone can read the entry that an error message names.
    explain = [sys.executable, "-m", "shadowrun", "explain", "unknown-device"]
    entry = subprocess.run(explain, cwd=tmp_path, env=env, capture_output=True, text=True, check=True).stdout
    assert "No device type of this name" in entry


def test_an_editable_install_is_a_line_in_a_file_and_keeps_no_former_build(unpacked, tmp_path):
    """A module that finds the package would cost at every start of Python; a build that failed has no successor."""
    tree = shutil.copytree(unpacked, tmp_path / "tree")
    former = tree / "shadowrun/native" / f"_core{sysconfig.get_config_var('EXT_SUFFIX')}"
    former.touch()
    wheel, _ = build("editable", tree, tmp_path / "out", CC=str(tmp_path / "no-compiler"))
    with zipfile.ZipFile(wheel) as file:
        (pth,) = [name for name in file.namelist() if ".dist-info/" not in name]
        assert pth.endswith(".pth")
        assert file.read(pth).decode().split() == [str(tree)]
    assert not former.exists()
