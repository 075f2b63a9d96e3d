"""How a distribution is built: commands of setuptools, which `pyproject.toml` names; no part of a run imports this.

They do what a table in `pyproject.toml` cannot: a build has the checksum of its C sources, a wheel has the pages of the
documentation, and the source archive has the tests and the documentation without a ``MANIFEST.in``.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import TYPE_CHECKING

from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

if TYPE_CHECKING:
    from collections.abc import Iterator

    from setuptools import Extension

__all__ = ["BuildExtension", "BuildPages", "SourceArchive"]

_C = Path("shadowrun/native")
_ARCHIVED = ("shadowrun", "tests", "docs", "examples", "benchmarks", ".ci")
_ARCHIVED_FILES = ("constraints.txt", "noxfile.py", "CHANGELOG.md", "CONTRIBUTING.md", ".pre-commit-hooks.yaml")
_PAGES = ("", "howto", "design")
# Names of folders and endings of files that are made from others.
_MADE = ("__pycache__", "_build", ".pyc", ".so", ".pyd")


class BuildExtension(build_ext):  # type: ignore[misc]  # setuptools has no types
    """Always rebuilds, and removes an earlier build where this one fails."""

    def build_extension(self, ext: Extension) -> None:
        """Compile one extension, with the checksum of its sources as `SOURCES`."""
        self.force = True  # a checkout of older sources makes them the newer files
        files = sorted(file for pattern in ("*.c", "*.h") for file in _C.glob(pattern))
        checksum = zlib.crc32(b"".join(file.read_bytes() for file in files)) & 0x7FFFFFFF
        ext.define_macros.append(("SOURCES", str(checksum)))
        try:
            super().build_extension(ext)
        except Exception:  # no compiler, for one; the extension is optional, so setuptools continues
            if self.editable_mode:
                Path(self.get_ext_filename(self.get_ext_fullname(ext.name))).unlink(missing_ok=True)
            raise


class BuildPages(build_py):  # type: ignore[misc]  # setuptools has no types
    """The package with the pages that `shadowrun explain` prints; an editable install has them in ``docs/``."""

    def run(self) -> None:
        """Copy the package, then the pages."""
        super().run()
        docs = Path("docs")
        for file in () if self.editable_mode else (f for folder in _PAGES for f in (docs / folder).glob("*.md")):
            to = Path(self.build_lib, "shadowrun/pages", file.relative_to(docs))
            to.parent.mkdir(parents=True, exist_ok=True)
            self.copy_file(str(file), str(to))


class SourceArchive(sdist):  # type: ignore[misc]  # setuptools has no types
    """The archive of sources, from which everything can be built and tested."""

    def make_distribution(self) -> None:
        """Add what setuptools does not find."""
        self.filelist.extend([*_archived(), *_ARCHIVED_FILES])
        super().make_distribution()


def _archived() -> Iterator[str]:
    for folder in _ARCHIVED:
        for file in sorted(Path(folder).rglob("*")):
            if file.is_file() and not any(part.endswith(_MADE) or part.startswith(".") for part in file.parts[1:]):
                yield str(file)
