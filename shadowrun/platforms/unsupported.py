"""Reading an exception: does the target lack the operator, or did something else go wrong?

Vendors report a missing kernel by many exception types and texts. The table is ordered; the first line
whose type and pattern fit decides. Sources: torch's dispatcher and `AT_DISPATCH` macros, MPS, XPU,
torch_npu (ERR01007, aclnn EZ1001), lazy/XLA, tinygrad, torchax, mojo, DIPU; see `docs/design.md`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shadowrun.types import Cause

__all__ = ["Failure", "classify", "first_sentence", "limit_of_host"]


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


_NAME = r"((?:\w+::)?[A-Za-z_]\w*(?:\.\w+)?)"

# (exception types, pattern, cause). A name in the pattern's first group is the missing kernel.
_TABLE: tuple[tuple[tuple[str, ...], re.Pattern[str], Cause], ...] = tuple(
    (types, re.compile(pattern, re.DOTALL), cause)
    for types, pattern, cause in (
        # Dispatcher: CUDA, PrivateUse1, XLA, and every backend that registers kernels one by one.
        (
            ("NotImplementedError",),
            rf"Could not run '{_NAME}' with arguments from the '\w+' backend",
            Cause.MISSING_OPERATOR,
        ),
        # Dtype not compiled into a kernel: the AT_DISPATCH macros of CPU and CUDA.
        (("NotImplementedError", "RuntimeError"), r"\"[\w:.]+\" not implemented for '\w+'", Cause.MISSING_DTYPE),
        # MPS and XPU, and backends modelled on them.
        (
            ("NotImplementedError", "RuntimeError"),
            rf"The operator '{_NAME}' is not (?:currently|current) (?:implemented|supported) (?:for|on) the",
            Cause.MISSING_OPERATOR,
        ),
        (
            ("TypeError", "RuntimeError"),
            r"[Cc]annot convert a \w+ Tensor to \w+ dtype as the \w+ framework",
            Cause.MISSING_DTYPE,
        ),
        # torch_npu: fallback disabled, sparse, aclnn kernels.
        (("RuntimeError",), r"not implemented for DT_\w+|should be in dtype support list", Cause.MISSING_DTYPE),
        (
            ("RuntimeError",),
            rf"The operator '{_NAME}' would execute its main computation on CPU",
            Cause.MISSING_OPERATOR,
        ),
        (("RuntimeError",), r"ERR\d{5} OPS feature not supported", Cause.MISSING_OPERATOR),
        # The kernel's own check refuses what the reference accepts.
        (("RuntimeError",), r"\bEZ1001\b|error code is 161002", Cause.MISSING_OPERATOR),
        # lazy and XLA, torchax, mojo, tinygrad.
        (
            ("RuntimeError",),
            rf"The operator {_NAME} appears to be a view operator, but it has no",
            Cause.MISSING_OPERATOR,
        ),
        (("OperatorNotFound",), rf"Operator with name {_NAME} has no lowering", Cause.MISSING_OPERATOR),
        (
            ("Exception",),
            rf"[Oo]perator (?:with name )?'?{_NAME}'? (?:has no lowering|is not supported)",
            Cause.MISSING_OPERATOR,
        ),
        (("NotImplementedError", "RuntimeError"), rf"^{_NAME} is not supported by \w+", Cause.MISSING_OPERATOR),
        (("KeyError",), r"^'?torch\.(?:\w+)'?$", Cause.MISSING_DTYPE),
        (
            ("RuntimeError", "TypeError"),
            r"[Uu]nsupported (?:data ?)?type|dtype .* (?:is )?not supported",
            Cause.MISSING_DTYPE,
        ),
        (("RuntimeError",), r"convolution_overrideable not implemented", Cause.MISSING_OPERATOR),
        (("RuntimeError", "NotImplementedError"), r"[Uu]nsupported tensor layout", Cause.MISSING_OPERATOR),
        # Whatever else calls itself not implemented.
        (("NotImplementedError",), rf"(?:.*?'{_NAME}')?", Cause.MISSING_OPERATOR),
    )
)


_NO_MEMORY = ("can't allocate memory", "out of memory", "not enough memory")


def limit_of_host(error: BaseException) -> str:
    """Which limit of this machine or process an exception tells of, no fault of a platform's; empty if of none."""
    if isinstance(error, RecursionError) or "RecursionError" in str(error):  # ctypes makes it an error of its own
        return "the program is at Python's limit of recursion"
    names = {t.__name__ for t in type(error).__mro__}
    lacking = isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)
    return "there is no memory for it" if lacking or names & {"MemoryError", "OutOfMemoryError"} else ""


def classify(error: BaseException) -> Failure:
    """Say what a platform's exception means. Subclasses count as their bases."""
    names = {t.__name__ for t in type(error).__mro__}
    text = str(error)
    message = f"{type(error).__name__}: {first_sentence(text)}"
    for types, pattern, cause in _TABLE:
        if not names.intersection(types):
            continue
        found = pattern.search(text)
        if found is None:
            continue
        kernel = (found.group(1) or "") if pattern.groups else ""
        if kernel and "::" not in kernel:
            kernel = f"aten::{kernel}"
        return Failure(supported=False, cause=cause, missing_kernel=kernel, message=message)
    return Failure(supported=True, cause=Cause.IMPLEMENTATION, missing_kernel="", message=message)


def first_sentence(text: str, limit: int = 300) -> str:
    """The first sentence of a message; dispatcher errors go on for 10 KB."""
    line = " ".join(text.strip().split("\n", 1)[0].split())
    end = re.search(r"[.!?](?= [A-Z])", line)
    sentence = line[: end.end()] if end else line
    return sentence if len(sentence) <= limit else sentence[: limit - 1] + "…"
