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
import zipfile
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
    "write_private",
]

NOT_KEPT = "inputs not kept: "
"""Begins what the evidence of a call says where its inputs were wanted and could not be kept."""

_FORMAT = 1
_MOST_VALUES = 1_000_000
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
    tensors: list[Any] = []
    content = {
        "format": _FORMAT,
        "op": call.op,
        "args": [_encode(a, tensors) for a in call.args],
        "kwargs": {k: _encode(v, tensors) for k, v in call.kwargs.items()},
        "tensors": tensors,
    }
    folder.mkdir(mode=0o700, exist_ok=True)
    write_private(content, folder / name)
    return (folder / name).stat().st_size


def write_private(content: Any, path: Path) -> None:
    """Write tensors to a file that nobody else may read: they are values of a program. It is there once it is whole.

    Raises:
        OSError: It cannot be written.
    """
    import torch

    part = path.with_name(f"{path.name}.part")
    part.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            torch.save(content, file)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


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
        _check_size(path)
        # Of torch, on how it makes sparse tensors; an error where the user asks for it. Their indices are checked here.
        with warnings.catch_warnings(), torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
            warnings.simplefilter("ignore")
            content = torch.load(path, map_location="cpu", weights_only=True)
        op, args, kwargs, tensors = (_of_type(content[k], t) for k, t in _PARTS.items())
        _check_plain(tensors)
        _check_number([args, list(kwargs.values())])
        return Captured(
            op,
            tuple(_decode(a, tensors) for a in args),
            {_of_type(k, str): _decode(v, tensors) for k, v in kwargs.items()},
        )
    except Exception as error:  # whatever a file that was not written by us makes torch raise
        raise DataFileError(
            f"The captured inputs {str(path)!r} cannot be read ({type(error).__name__}). Record the run again.",
            slug="captured-inputs",
        ) from error


_PARTS = {"op": str, "args": list, "kwargs": dict, "tensors": list}
"""What a file of captured inputs has, and of which type."""
_VALUES = (type(None), bool, int, float, str)


def _of_type(value: Any, *types: type) -> Any:
    """The value, if it is of one of these types and of no class made of it.

    Raises:
        ValueError: It is not.
    """
    if type(value) not in types:
        raise ValueError(type(value).__name__)
    return value


def _check_size(path: Path) -> None:
    """Refuse an archive that is larger than its file: `torch.save` compresses nothing."""
    with zipfile.ZipFile(path) as archive:
        n_bytes = sum(entry.file_size for entry in archive.infolist())
    if n_bytes > path.stat().st_size:
        raise ValueError(f"{n_bytes} bytes in it")


def _check_plain(tensors: Any) -> None:
    """Refuse tensors of other classes, and those with attributes of their own, which would hide methods."""
    import torch

    for t in tensors:
        if type(t) not in (torch.Tensor, torch.nn.Parameter) or t.__dict__ or t._backward_hooks:
            raise ValueError(type(t).__name__)
    _check_apart(tensors)


def _check_apart(tensors: list[Any]) -> None:
    """Refuse indices of a sparse tensor that lie in another tensor too: who writes to that takes the checks away.

    Indices of two sparse tensors may be the same.
    """
    places: set[int] = set()
    values: set[int] = set()
    for t in tensors:
        inner, outer = _parts_of(t)
        places.update(part.untyped_storage().data_ptr() for part in inner if part.numel())
        values.update(part.untyped_storage().data_ptr() for part in outer if part.numel())
    if places & values:
        raise ValueError("shared indices")


def _parts_of(t: Any) -> tuple[list[Any], list[Any]]:
    """The tensors that tell where a tensor's values are, and those that hold values."""
    import torch

    if t.is_nested and t.layout is torch.strided:
        return [t._nested_tensor_size(), t._nested_tensor_strides(), t._nested_tensor_storage_offsets()], [t.values()]
    if t.layout is torch.strided:
        return [], [t]
    if t.layout is torch.sparse_coo:
        return [t._indices()], [t._values()]
    if t.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [t.crow_indices(), t.col_indices()], [t.values()]
    if t.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [t.ccol_indices(), t.row_indices()], [t.values()]
    return [], []


def _check_number(values: list[Any]) -> None:
    """Refuse lists that are few in their file and without number when they are read: each holds one twice."""
    waiting: list[Any] = [values]
    n = 0
    while waiting:
        inner = waiting.pop()
        n += len(inner)
        if n > _MOST_VALUES:
            raise ValueError("values")
        waiting += [v for v in inner if isinstance(v, (list, tuple))]


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
    """An argument again; tensors are only those of the list, which were looked at."""
    if type(value) is list:
        return [_decode(v, tensors) for v in value]
    if type(value) is not dict:
        return _of_type(value, *_VALUES)
    ((kind, content),) = value.items()
    return tensors[_of_type(content, int)] if kind == "tensor" else values.decode(kind, content)
