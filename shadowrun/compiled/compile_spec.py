"""How something was compiled: enough to compile a part of it again, here or in a script."""

from __future__ import annotations

import importlib
import json
import keyword
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from shadowrun.compiled import torchcompile
from shadowrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shadowrun.compiled.torchcompile import CompileRequest
    from shadowrun.types import Permissions

__all__ = ["INDUCTOR", "CompileSpec"]

INDUCTOR: Final = "inductor"
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, slots=True)
class CompileSpec:
    """How a program was compiled.

    Attributes:
        name: Of the backend, as `torch.compile` takes it; of a function, its qualified name.
        module: Module that has to be imported before: it registers the name, or has the function. Empty for torch's.
        is_function: The backend is a function.
        importable: A function is found in its module by its name.
        mode: Of Inductor.
        options: The user's; what is no number or text is left out.
        dynamic: Whether sizes are symbols.
        left_out: Names of the options that were left out.
        compiler: Takes a graph and inputs, returns a callable; None where the backend was not looked for yet.
    """

    name: str
    module: str
    is_function: bool
    importable: bool
    mode: str | None
    options: dict[str, Any]
    dynamic: bool | None
    left_out: tuple[str, ...] = ()
    compiler: Callable[..., Any] | None = field(default=None, repr=False, compare=False)

    @classmethod
    def from_arguments(
        cls, backend: Any, mode: str | None, options: Mapping[str, Any] | None, dynamic: bool | None, compiler: Any
    ) -> CompileSpec:
        """From the arguments of `torch.compile`, and what it made of them."""
        given = dict(options or {})
        if isinstance(backend, str):
            module = torchcompile.module_of(compiler)
            return cls(backend, module, False, True, mode, *_plain(given, dynamic), compiler)
        name, module = str(getattr(backend, "__qualname__", backend)), str(getattr(backend, "__module__", ""))
        # A script can import neither from `__main__` nor a nested function.
        importable = module != "__main__" and getattr(sys.modules.get(module), name, None) is backend
        return cls(name, module, True, importable, mode, *_plain(given, dynamic), compiler)

    @classmethod
    def from_request(cls, request: CompileRequest) -> CompileSpec:
        """From what Dynamo calls."""
        return cls.from_arguments(request.backend, request.mode, request.options, request.dynamic, request.wrapper)

    @classmethod
    def by_inductor(cls, options: Mapping[str, Any]) -> CompileSpec:
        """By Inductor with these settings, those of a mode among them."""
        return cls(INDUCTOR, "", False, True, None, *_plain(dict(options), None))

    @classmethod
    def from_text(cls, text: str) -> CompileSpec:
        """What `text` gave.

        Raises:
            ValueError: It is no such text.
        """
        try:
            read = json.loads(text)
            compile_spec = cls(
                str(read["name"]),
                str(read["module"]),
                bool(read["is_function"]),
                bool(read["importable"]),
                None if read["mode"] is None else str(read["mode"]),
                {str(k): v for k, v in dict(read["options"]).items()},
                None if read["dynamic"] is None else bool(read["dynamic"]),
                tuple(map(str, read["left_out"])),
            )
        except (KeyError, TypeError, RecursionError) as error:
            raise ValueError(repr(error)[:200]) from None
        names = [
            *compile_spec.module.split("."),
            *([compile_spec.name] if compile_spec.is_function and compile_spec.importable else []),
        ]
        has_names = compile_spec.module or compile_spec.is_function
        if has_names and not all(n.isidentifier() and not keyword.iskeyword(n) for n in names):
            raise ValueError(f"{compile_spec.module} {compile_spec.name}")  # it would become a line of a script
        return compile_spec

    @property
    def label(self) -> str:
        """As a reader knows it, ``inductor mode=max-autotune``."""
        return self.name + (f" mode={self.mode}" if self.mode else "")

    def text(self) -> str:
        """As text, to be read again by `from_text`."""
        # Without `compiler`, which is of this process.
        names = ("name", "module", "is_function", "importable", "mode", "options", "dynamic", "left_out")
        return json.dumps({name: getattr(self, name) for name in names})

    def refuse_what_cannot_be_imported(self) -> None:
        """A script needs a backend with a name.

        Raises:
            UsageError: It has none.
        """
        if self.is_function and not self.importable:
            raise UsageError(
                f"A script cannot import the backend {self.name!r} of {self.module!r}: define it at the top of a "
                "module, by its own name.",
                slug="no-repro",
            )

    def from_file(self, allowed: Permissions) -> CompileSpec:
        """This spec as far as a file may ask for it.

        Args:
            allowed: What the user named.

        Raises:
            UsageError: It would import a module or call a function that the user did not name, or there is no such
                mode.
        """
        words = ("", "default", "max-autotune", "max-autotune-no-cudagraphs", "reduce-overhead")
        if (self.mode or "") not in words:
            raise UsageError(f"There is no mode {ascii(self.mode)[:80]} of torch.compile.", slug="no-repro")
        is_own = not self.is_function and self.name in torchcompile.OWN_BACKENDS
        compile_spec = replace(self, module="") if is_own else self  # torch knows where it is
        if allowed.modules:
            # In the process that recorded the run the options are those of the program, not of a file.
            return compile_spec
        missing = [] if is_own else sorted(name for name in self._brought_by() if name not in allowed.imports)
        if missing:
            what = ascii(missing[0] or "MODULE")[1:-1][:200]
            raise UsageError(
                f"The backend {ascii(self.name)[:80]} is in module {what.partition(':')[0]}, and only the data file "
                "names it, which may come from another person: it is not imported. If you know what it is, name it: "
                f"--import {what} (in Python: allow=[{what!r}]).",
                slug="module-refused",
            )
        return compile_spec._with_known_options()

    def _brought_by(self) -> set[str]:
        """What the user has to name: the function, or the modules that torch has the name from or would look in."""
        if self.is_function:
            # Not its module alone: a file could choose any function there, `os.system` among them.
            self.refuse_what_cannot_be_imported()
            return {f"{self.module}:{self.name}"}
        # The import of a module that the user named does not stop torch from looking for the name in other packages.
        return {self.module, *torchcompile.modules_of_backend(self.name)}

    def _with_known_options(self) -> CompileSpec:
        """The same with the options that a file may set: others name compilers, folders and remote caches."""
        kept = {k: v for k, v in self.options.items() if torchcompile.is_plain_option(self.name, k, v)}
        left = (*self.left_out, *(k for k in self.options if k not in kept))
        return replace(self, options=kept, left_out=tuple(ascii(k)[1:-1][:80] for k in left))

    def look_for_compiler(self) -> Callable[..., Any]:
        """What compiles so, on this machine; it raises whatever importing and asking for it raises."""
        if self.compiler is not None:
            return self.compiler
        backend: Any = self.name
        if self.module:
            # The import registers the name, or has the function; `from_file` has refused what only a file names.
            module = importlib.import_module(self.module)
            backend = getattr(module, self.name) if self.is_function else self.name
        compiler: Callable[..., Any] = torchcompile.resolve_backend(backend, self.mode, self.options, self.dynamic)
        return compiler

    def folder(self) -> Path | None:
        """Folder of a backend function's module, which a script has to import; None for an installed backend."""
        file = getattr(sys.modules.get(self.module), "__file__", None) if self.is_function else None
        # The folder that has the top package: `a.b` is imported from the folder above `a`.
        return None if file is None else Path(file).parents[self.module.count(".")]


def _plain(options: dict[str, Any], dynamic: bool | None) -> tuple[dict[str, Any], bool | None, tuple[str, ...]]:
    """Options that can be written into a script, whether sizes are symbols, and the names of the other options."""
    kept = {k: v for k, v in options.items() if _is_plain(v)}
    return kept, dynamic, tuple(k for k in options if k not in kept)


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(k, str) and _is_plain(v) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return type(value) in _PLAIN
