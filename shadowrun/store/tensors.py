"""Captured inputs: what a failing call got, in files that hold tensors and plain values only.

They lie in a folder beside the data file, ``run.shadowrun.tensors``, one file for each call. Nothing that is loaded can
run code: ``torch.load`` is told ``weights_only=True``, and what is no tensor, number or text is written as text. The
data file holds bare names; one that would lead out of the folder is refused.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import warnings
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shadowrun.errors import DataFileError
from shadowrun.store import values
from shadowrun.store.values import Unkeepable

if TYPE_CHECKING:
    from shadowrun.store.datafile import DataFile

__all__ = [
    "NOT_KEPT",
    "Captured",
    "Unkeepable",
    "captured_calls",
    "clear",
    "file_of",
    "folder_of",
    "free_number",
    "load",
    "save",
    "temporary_folder",
]

NOT_KEPT = "inputs not kept: "
"""Begins what the evidence of a call says where its inputs were wanted and could not be kept."""

_FORMAT = 1
_NAME = re.compile(r"\d{1,9}\.pt")

_CAPTURED = """
select seq, context_id, outcome_id, file
from capture join call using (seq) join verdict on verdict.id = verdict_id order by seq
"""


@dataclass(frozen=True, slots=True)
class Captured:
    """The inputs of one call, as they were before it, on the CPU.

    Attributes:
        op: ``aten::add.Tensor``.
        args, kwargs: Its arguments. A ``device`` is the CPU.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def folder_of(path: Path) -> Path:
    """Where the captured inputs of a data file lie."""
    return path.with_name(path.name + ".tensors")


def temporary_folder(owner: object) -> Path:
    """A folder that goes with its owner, in the process that made it."""
    path = Path(tempfile.mkdtemp(prefix="shadowrun-"))
    weakref.finalize(owner, _remove, path, os.getpid())
    return path


def _remove(path: Path, pid: int) -> None:
    if pid == os.getpid():  # a forked child has it of its parent
        shutil.rmtree(path, ignore_errors=True)


def free_number(folder: Path) -> int:
    """The first number that no file of the folder has."""
    numbers = [int(p.stem) for p in folder.glob("*.pt") if _NAME.fullmatch(p.name)] if folder.is_dir() else []
    return max(numbers, default=-1) + 1


def clear(path: Path) -> None:
    """Remove what an earlier run left beside a data file; nothing else that lies there."""
    folder = folder_of(path)
    if not folder.is_dir() or folder.is_symlink():
        return
    for file in folder.iterdir():
        if _NAME.fullmatch(file.name.removesuffix(".part")):
            with contextlib.suppress(OSError):
                file.unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


def save(folder: Path, name: str, call: Captured) -> int:
    """Write one call; the file is there once it is whole.

    Returns:
        Its size in bytes.

    Raises:
        Unkeepable: An argument is no tensor and no plain value.
        OSError: It cannot be written.
    """
    import torch

    tensors: list[Any] = []
    content = {
        "format": _FORMAT,
        "op": call.op,
        "args": [_encode(a, tensors) for a in call.args],
        "kwargs": {k: _encode(v, tensors) for k, v in call.kwargs.items()},
        "tensors": tensors,
    }
    folder.mkdir(exist_ok=True)
    part = folder / f"{name}.part"
    try:
        torch.save(content, part)
        part.replace(folder / name)
    finally:
        part.unlink(missing_ok=True)
    return (folder / name).stat().st_size


def file_of(folder: Path, name: str) -> Path:
    """The file of a name that a data file gives.

    Raises:
        DataFileError: The name leads elsewhere, or the file is gone.
    """
    path = folder / name
    if not _NAME.fullmatch(name) or path.is_symlink() or folder.is_symlink():
        raise DataFileError(
            f"{name!r} is no name of captured inputs: the data file was not written by shadowrun, or was changed.",
            slug="captured-inputs",
        )
    if not path.is_file():
        raise DataFileError(
            f"The captured inputs {str(path)!r} are gone: keep the folder {folder.name!r} beside the data file, "
            "or record the run again.",
            slug="captured-inputs",
        )
    return path


def load(folder: Path, name: str) -> Captured:
    """Read one call.

    Raises:
        DataFileError: It is missing, damaged, or holds what it must not.
    """
    import torch

    path = file_of(folder, name)
    try:
        with warnings.catch_warnings():  # of torch, on how it makes sparse tensors; an error where the user asks for it
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location="cpu", weights_only=True)
        tensors = content["tensors"]
        return Captured(
            str(content["op"]),
            tuple(_decode(a, tensors) for a in content["args"]),
            {str(k): _decode(v, tensors) for k, v in content["kwargs"].items()},
        )
    except Exception as error:  # whatever a file that was not written by us makes torch raise
        raise DataFileError(
            f"The captured inputs {str(path)!r} cannot be read ({type(error).__name__}). Record the run again.",
            slug="captured-inputs",
        ) from error


def captured_calls(data: DataFile) -> dict[int, tuple[int, int, str]]:
    """Calls whose inputs were kept: call number to its context, its outcome and the name of its file."""
    sql = "select 1 from sqlite_master where type = 'table' and name = 'capture'"
    if next(data.query(sql), None) is None:  # a file of an older schema
        return {}
    return {seq: (context, outcome, str(file)) for seq, context, outcome, file in data.query(_CAPTURED)}


def _encode(value: Any, tensors: list[Any]) -> Any:
    """An argument of tensors, lists and plain values; a tensor as its place among them."""
    import torch

    if isinstance(value, torch.Tensor):
        known = next((i for i, t in enumerate(tensors) if t is value), None)
        if known is None:
            known = len(tensors)
            tensors.append(value)
        return {"tensor": known}
    if isinstance(value, (list, tuple)):
        return [_encode(v, tensors) for v in value]
    return values.encode(value)


def _decode(value: Any, tensors: list[Any]) -> Any:
    if isinstance(value, list):
        return [_decode(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    return tensors[content] if kind == "tensor" else values.decode(kind, content)
