"""Reading an exception: does the platform lack the operator or the dtype, or did it fail?

Backends report a missing kernel by many exception types and texts: those of torch and of packages that are no device
type are here, each vendor's own in its row of `backends`.
"""

from __future__ import annotations

import contextlib
import functools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shadowrun.errors import UsageError
from shadowrun.platforms import plugins
from shadowrun.platforms.backends import BACKENDS, backend_of
from shadowrun.platforms.plugin_file import FILE_GROUP
from shadowrun.types import Cause

if TYPE_CHECKING:
    from shadowrun.platforms.backends import ErrorPattern

__all__ = ["Failure", "classify", "first_sentence", "is_out_of_memory", "limit_of_host"]


@dataclass(frozen=True, slots=True)
class Failure:
    """What a platform's exception means.

    Attributes:
        supported: False if the platform lacks the operator or the dtype; True for any other failure.
        cause: MISSING_OPERATOR, MISSING_DTYPE, or IMPLEMENTATION.
        missing_kernel: Name in the message, ``aten::add.out``; empty if it names none.
        message: Type and first sentence.
    """

    supported: bool
    cause: Cause
    missing_kernel: str
    message: str


_KERNEL_NAME = r"((?:\w+::)?[A-Za-z_]\w*(?:\.\w+)?)"
_OPERATOR, _DTYPE = Cause.MISSING_OPERATOR, Cause.MISSING_DTYPE

_OF_TORCH: tuple[ErrorPattern, ...] = (
    # The dispatcher: CUDA, PrivateUse1, XLA, and every backend that registers kernels one by one.
    (("NotImplementedError",), r"Could not run 'NAME' with arguments from the '\w+' backend", _OPERATOR),
    # Dtype not compiled into a kernel: the AT_DISPATCH macros of CPU and CUDA.
    (("NotImplementedError", "RuntimeError"), r"\"[\w:.]+\" not implemented for '\w+'", _DTYPE),
)
_OF_OTHERS: tuple[ErrorPattern, ...] = (
    # Backends that are no device type of torch's own: torchax, mojo, tinygrad.
    (("OperatorNotFound",), r"Operator with name NAME has no lowering", _OPERATOR),
    (("Exception",), r"[Oo]perator (?:with name )?'?NAME'? (?:has no lowering|is not supported)", _OPERATOR),
    (("NotImplementedError", "RuntimeError"), r"^NAME is not supported by \w+", _OPERATOR),
    (("KeyError",), r"^'?torch\.(?:\w+)'?$", _DTYPE),
    (("RuntimeError", "TypeError"), r"[Uu]nsupported (?:data ?)?type|dtype .* (?:is )?not supported", _DTYPE),
    (("RuntimeError",), r"convolution_overrideable not implemented", _OPERATOR),
    (("RuntimeError", "NotImplementedError"), r"[Uu]nsupported tensor layout", _OPERATOR),
    # Anything else that calls itself not implemented.
    (("NotImplementedError",), r"(?:.*?'NAME')?", _OPERATOR),
)


@functools.cache
def _patterns() -> tuple[tuple[tuple[str, ...], re.Pattern[str], Cause], ...]:
    """Ordered: the first line whose type and pattern fit decides."""
    others = [entry.name for entry in plugins.entry_points(FILE_GROUP)]
    vendors: list[ErrorPattern] = []
    for name in dict.fromkeys([*BACKENDS, *others]):
        # The broken file of another device must not end this run; naming that device says what is wrong.
        with contextlib.suppress(UsageError):
            vendors += backend_of(name).missing_kernel
    lines = (*_OF_TORCH, *vendors, *_OF_OTHERS)
    return tuple(
        (types, re.compile(text.replace("NAME", _KERNEL_NAME), re.DOTALL), cause) for types, text, cause in lines
    )


_NO_MEMORY = ("can't allocate memory", "out of memory", "not enough memory")


def limit_of_host(error: BaseException) -> str:
    """Which limit of this machine or process an exception reports, which is no fault of a platform; empty if none."""
    if isinstance(error, RecursionError) or "RecursionError" in str(error):  # ctypes wraps it in another error
        return "the program is at Python's limit of recursion"
    return "there is no memory for it" if is_out_of_memory(error) else ""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception reports that an allocation failed."""
    # By name: exception types of packages that are not installed cannot be imported.
    names = {t.__name__ for t in type(error).__mro__}
    lacking = isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)
    return lacking or bool(names & {"MemoryError", "OutOfMemoryError"})


def classify(error: BaseException) -> Failure:
    """Classify an exception of a platform. Subclasses count as their bases."""
    names = {t.__name__ for t in type(error).__mro__}
    text = str(error)
    message = f"{type(error).__name__}: {first_sentence(text)}"
    for types, pattern, cause in _patterns():
        if not names.intersection(types):
            continue
        found = pattern.search(text)
        if found is None:
            continue
        kernel = (found.group(1) or "") if pattern.groups else ""
        # Messages name kernels with and without their namespace; records have one form.
        if kernel and "::" not in kernel:
            kernel = f"aten::{kernel}"
        return Failure(supported=False, cause=cause, missing_kernel=kernel, message=message)
    return Failure(supported=True, cause=Cause.IMPLEMENTATION, missing_kernel="", message=message)


def first_sentence(text: str, limit: int = 300) -> str:
    """The first sentence of a message; those of the dispatcher reach 10 KB."""
    line = " ".join(text.strip().split("\n", 1)[0].split())
    end = re.search(r"[.!?](?= [A-Z])", line)
    sentence = line[: end.end()] if end else line
    return sentence if len(sentence) <= limit else sentence[: limit - 1] + "…"
