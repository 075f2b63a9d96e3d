"""Runs the user's program as Python does: with its argv, ``sys.path[0]``, traceback and exit status."""

from __future__ import annotations

import ast
import builtins
import contextlib
import gc
import importlib.machinery
import importlib.util
import os
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import shadowrun
from shadowrun.errors import UsageError
from shadowrun.sim import named_in_program

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager
    from importlib.machinery import ModuleSpec

__all__ = ["Program", "ProgramExit", "import_torch"]

# A script may lie in the folder of a large source tree, and starts as fast there.
_MAX_FILES = 1000
_OWN_FOLDER = str(Path(shadowrun.__file__).parent) + os.sep


def import_torch() -> None:
    """Import torch with Python's collector at rest, which would go through a million objects that stay.

    It does so at the end of the process too, unless they are frozen: together 0.7 of 3.2 s of processor time.
    """
    if "torch" in sys.modules or not gc.isenabled():  # called by a program, whose objects are not ours
        return
    gc.disable()
    try:
        import torch  # noqa: F401
    finally:
        gc.freeze()
        gc.enable()


@dataclass(frozen=True, slots=True)
class ProgramExit:
    """How a program ended.

    Attributes:
        status: The exit status that Python would have returned.
        interrupted: True after Ctrl-C.
    """

    status: int
    interrupted: bool = False


class Program:
    """A script or module with its arguments.

    Args:
        command: Script and its arguments, or module and its arguments.
        is_module: Whether `command` starts with a module.

    Raises:
        UsageError: There is no such script or module.
    """

    def __init__(self, command: list[str], *, is_module: bool) -> None:
        name, *arguments = command
        self._spec: ModuleSpec | None = None
        if is_module:
            self._folder = str(Path.cwd())
            self._spec = self._find_module(name)
            self._file = self._spec.origin or ""
        else:
            if not Path(name).is_file():
                what = "is a folder" if Path(name).is_dir() else "does not exist"
                raise UsageError(f"The script {name!r} {what}: give the program to run.", slug="missing-script")
            # With links followed, as Python does: a script finds the modules next to the file that a link leads to.
            self._folder = str(Path(name).resolve().parent)
            self._file = str(Path(name).absolute())
        self.argv = [self._file if is_module else name, *arguments]

    def environment(self) -> AbstractContextManager[None]:
        """`sys.argv` and ``sys.path[0]`` as the program has them, for a ``with`` block."""
        return _Environment(self.argv, self._folder)

    def names(self, device: str) -> bool:
        """Whether the program names a device: in its arguments, its source, or what it imports from its own folder."""
        if named_in_program.is_named_in_arguments(self.argv[1:], device):
            return True
        package = self._spec.name.rpartition(".")[0] if self._spec is not None else ""
        todo = [(Path(self._file), package)]
        seen: set[Path] = set()
        while todo:
            file, package = todo.pop()
            # The limit keeps the start fast for a script in a folder with a large source tree.
            if file in seen or len(seen) >= _MAX_FILES:
                continue
            seen.add(file)
            # A file that cannot be read or parsed names no device; Python reports it when the program imports it.
            with contextlib.suppress(OSError, SyntaxError, ValueError):
                source = file.read_bytes()
                if named_in_program.is_named_in_source(source.decode(errors="replace"), device):
                    return True
                todo += _imported(ast.parse(source), Path(self._folder), package)
        return False

    def execute(self, block: AbstractContextManager[Any]) -> ProgramExit:
        """Run the program inside a ``with`` block, which sees its exceptions; print them like Python.

        Raises:
            ShadowrunError: The block cannot be entered, for example because the data file cannot be written.
        """
        with self.environment():
            # Before the block: a recording has the digest of the file of `__main__`.
            sys.modules["__main__"] = main = self._new_main()
            running = contextlib.ExitStack()
            running.enter_context(block)  # an error here is not the program's
            # The block must see the exception before it becomes an exit status: the data file records it.
            try:
                with running:
                    # `dont_inherit`: the __future__ imports of this file must not apply to the program.
                    code = compile(Path(self._file).read_bytes(), self._file, "exec", dont_inherit=True)
                    exec(code, main.__dict__)  # noqa: S102 - this runs the program
            except SystemExit as end:
                return ProgramExit(_exit_status(end))
            except KeyboardInterrupt as interrupt:
                _show(interrupt)
                return ProgramExit(130, interrupted=True)
            except BaseException as error:
                _show(error)
                return ProgramExit(1)
        return ProgramExit(0)

    def _new_main(self) -> types.ModuleType:
        """The program as a module that has not run; pickle and multiprocessing look up its classes in `__main__`."""
        main = types.ModuleType("__main__")
        main.__dict__.update(__file__=self._file, __builtins__=builtins, __spec__=self._spec, __cached__=None)
        main.__loader__ = importlib.machinery.SourceFileLoader("__main__", self._file)
        if sys.version_info < (3, 14):  # since 3.14 modules create it on first use
            main.__annotations__ = {}
        if self._spec is not None:
            main.__package__, main.__loader__ = self._spec.parent, self._spec.loader
            main.__dict__["__cached__"] = self._spec.cached
        return main

    def _find_module(self, name: str) -> ModuleSpec:
        # As `python -m`: a module of the working directory is found first.
        with _Environment(sys.argv, self._folder):
            try:
                spec = importlib.util.find_spec(name)
                if spec is not None and spec.submodule_search_locations is not None:
                    spec = importlib.util.find_spec(f"{name}.__main__")
            except (ImportError, ValueError):
                spec = None
        if spec is None or not (spec.origin or "").endswith(".py"):
            raise UsageError(
                f"There is no module {name!r} to run: it is not found, or has no source or no __main__.",
                slug="missing-script",
            )
        return spec


def _imported(tree: ast.AST, folder: Path, package: str) -> Iterator[tuple[Path, str]]:
    """Files below a folder that a module may import, each with its package."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            names.update((base, *(f"{base}.{alias.name}" for alias in node.names)))
    for name in names:
        path = folder.joinpath(*name.split("."))
        for file, inside in ((path.with_suffix(".py"), name.rpartition(".")[0]), (path / "__init__.py", name)):
            if file.is_file():
                yield file, inside


class _Environment:
    """Sets `sys.argv` and ``sys.path[0]`` of the program, and restores them and ``__main__``."""

    def __init__(self, argv: list[str], folder: str) -> None:
        self._argv, self._folder = argv, folder

    def __enter__(self) -> None:
        # A copy of the path: the program may change the list in place.
        self._before = sys.argv, sys.path[:], sys.modules["__main__"]
        sys.argv = self._argv
        if not sys.flags.safe_path:  # with `python -P`, the folder of the script is not on the path
            sys.path[:1] = [self._folder]

    def __exit__(self, *_: object) -> None:
        sys.argv, sys.path[:], sys.modules["__main__"] = self._before


def _exit_status(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code
    print(end.code, file=sys.stderr)
    return 1


def _show(error: BaseException) -> None:
    """Print an exception as Python would, without the frames of shadowrun."""
    # Causes and contexts may form a cycle.
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        link = todo.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        link.__traceback__ = _without_our_frames(link.__traceback__)
        todo += [link.__cause__, link.__context__]
    # The program may have set a hook of its own (rich, pdb): Python would call it too.
    sys.excepthook(type(error), error, error.__traceback__)


def _without_our_frames(traceback: types.TracebackType | None) -> types.TracebackType | None:
    kept = None
    for entry in reversed(list(_entries(traceback))):
        if not entry.tb_frame.f_code.co_filename.startswith(_OWN_FOLDER):
            kept = types.TracebackType(kept, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return kept


def _entries(traceback: types.TracebackType | None) -> Iterator[types.TracebackType]:
    while traceback is not None:
        yield traceback
        traceback = traceback.tb_next
