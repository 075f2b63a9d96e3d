"""A question to a worker, and what its answer means."""

from __future__ import annotations

import builtins
import contextlib
import sys
from typing import Any

from shadowrun.platforms.worker.wire import Unsendable

__all__ = ["Answer", "Question", "WorkerDied"]

Answer = tuple[list[Any], list[Any], int]
"""Fresh returns (None for the others), mutated arguments, nanoseconds."""


class WorkerDied(RuntimeError):  # noqa: N818 - the record's word for it
    """The worker crashed or did not answer in time."""


class Question:
    """A call that was sent to a worker.

    Attributes:
        name: Of the operator.
        kernel_settings: The program's settings that it was sent under.
        answer: What came back, until it is read.
        error: Why there is no answer.
    """

    __slots__ = ("answer", "error", "kernel_settings", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.kernel_settings: tuple[Any, ...] = ()
        self.answer: tuple[Any, ...] | None = None
        self.error: Exception | None = None

    def result(self) -> Answer:
        """The results, once; raises what `client.Worker.answer` says."""
        if self.error is not None:
            raise self.error
        answer, self.answer = self.answer, None
        assert answer is not None
        if answer[0] == "ran":
            return answer[1], answer[2], answer[3]
        if answer[0] == "raised":
            # The same type as here: `classify` and the program's `except` go by it.
            raise _rebuild_exception(*answer[1:])
        if answer[0] == "unsendable":
            raise Unsendable(answer[1])
        if self.name.startswith("aten::"):
            raise NotImplementedError(
                f"The operator '{self.name}' is not currently implemented for the torch {answer[1]} there"
            )
        raise Unsendable(f"the worker has no operator {self.name}")


def _rebuild_exception(module: str, qualname: str, text: str) -> Exception:
    """An exception of the worker; a type of another package becomes a RuntimeError that names it."""
    home: Any = builtins if module == "builtins" else sys.modules.get(module) if module.startswith("torch") else None
    kind = getattr(home, qualname, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        # Some exception types take other arguments than a text.
        with contextlib.suppress(TypeError):
            return kind(text)
    return RuntimeError(f"{qualname}: {text}")
