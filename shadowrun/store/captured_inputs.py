"""Captured inputs of failing calls, in files that hold only tensors and plain values.

The folder ``run.shadowrun.tensors``, next to the data file, has one file for each call. Loading one runs no code:
``torch.load`` gets ``weights_only=True``, and values other than tensors, numbers and texts are stored as text. The data
file holds bare file names; a name that leads out of the folder is refused.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import struct
import tempfile
import warnings
import weakref
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from shadowrun.errors import DataFileError
from shadowrun.store import plain_json
from shadowrun.store.atomic_write import atomic_write
from shadowrun.store.plain_json import NotStorable

if TYPE_CHECKING:
    from shadowrun.store.datafile import DataFile

__all__ = [
    "NOT_KEPT",
    "NotStorable",
    "StoredCall",
    "captured_calls",
    "check_number",
    "clear",
    "decode_value",
    "encode_value",
    "file_of",
    "folder_of",
    "free_number",
    "load",
    "save",
    "temporary_folder",
    "write_private",
]

NOT_KEPT = "inputs not kept: "
"""Prefix in the evidence of a call whose inputs could not be kept."""

_FORMAT = 1
_MAX_VALUES = 1_000_000
_NAME = re.compile(r"\d{1,9}\.pt")

_CAPTURED = """
select seq, context_id, outcome_id, file
from capture join call using (seq) join verdict on verdict.id = verdict_id order by seq
"""


@dataclass(frozen=True, slots=True)
class StoredCall:
    """The inputs of one call before it ran, copied to the CPU.

    Attributes:
        op: ``aten::add.Tensor``.
        args, kwargs: Arguments of the call. An argument ``device`` is the CPU.
    """

    op: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def folder_of(path: Path) -> Path:
    """Folder of the captured inputs of a data file."""
    return path.with_name(path.name + ".tensors")


def temporary_folder(owner: object) -> Path:
    """A folder that is removed when its owner is garbage collected."""
    path = Path(tempfile.mkdtemp(prefix="shadowrun-"))
    weakref.finalize(owner, _remove, path, os.getpid())
    return path


def _remove(path: Path, pid: int) -> None:
    if pid == os.getpid():  # the finalizer also runs in a forked child, whose parent still uses the folder
        shutil.rmtree(path, ignore_errors=True)


def free_number(folder: Path) -> int:
    """The first number that no file of the folder has."""
    numbers = [int(p.stem) for p in folder.glob("*.pt") if _NAME.fullmatch(p.name)] if folder.is_dir() else []
    return max(numbers, default=-1) + 1


def clear(path: Path) -> None:
    """Remove the captured inputs of an earlier run, and no other file."""
    folder = folder_of(path)
    # Through a symbolic link, files of another folder would be deleted, and the inputs written there.
    if folder.is_symlink():
        with contextlib.suppress(OSError):
            folder.unlink()
    if not folder.is_dir() or folder.is_symlink():
        return
    for file in folder.iterdir():
        if _NAME.fullmatch(file.name.removesuffix(".part")):  # `.part`: of a process that was killed while it wrote
            with contextlib.suppress(OSError):
                file.unlink()
    with contextlib.suppress(OSError):
        folder.rmdir()


def save(folder: Path, name: str, call: StoredCall) -> int:
    """Write the inputs of one call, atomically.

    Returns:
        Size of the file in bytes.

    Raises:
        NotStorable: An argument is neither a tensor nor a plain value.
        OSError: The file cannot be written.
    """
    tensors: list[Any] = []
    content = {
        "format": _FORMAT,
        "op": call.op,
        "args": [encode_value(a, tensors) for a in call.args],
        "kwargs": {k: encode_value(v, tensors) for k, v in call.kwargs.items()},
        "tensors": tensors,
    }
    # For this user only: the files hold values of the program.
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.is_symlink():
        raise NotADirectoryError(errno.ENOTDIR, "it is a link, which is not followed", str(folder))
    write_private(content, folder / name)
    return (folder / name).stat().st_size


def write_private(content: Any, path: Path) -> None:
    """Write tensors to a file, atomically, readable for this user only: values of a program may be private.

    Raises:
        OSError: The file cannot be written.
    """
    import torch

    with atomic_write(path, 0o600) as file:
        torch.save(content, file)


def file_of(folder: Path, name: str) -> Path:
    """The file of a name in a data file.

    Raises:
        DataFileError: The name leads out of the folder, or the file is gone.
    """
    path = folder / name
    # A link could lead to any file of the user's.
    if not _NAME.fullmatch(name) or path.is_symlink() or folder.is_symlink():
        raise DataFileError(
            f"{name!r} is not a name of captured inputs: the data file was not written by shadowrun, or was changed.",
            slug="captured-inputs",
        )
    if not path.is_file():
        raise DataFileError(
            f"The captured inputs {str(path)!r} are gone: keep the folder {folder.name!r} next to the data file, "
            "or record the run again.",
            slug="captured-inputs",
        )
    return path


def load(folder: Path, name: str) -> StoredCall:
    """Read the inputs of one call.

    Raises:
        DataFileError: The file is missing, damaged, or holds a value that shadowrun does not write.
    """
    path = file_of(folder, name)
    try:
        file = os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)), "rb")
    except OSError as error:
        raise DataFileError(
            f"The captured inputs {str(path)!r} cannot be read ({error.strerror}).", slug="captured-inputs"
        ) from error
    with file:  # torch gets the open file, so that it reads what was checked, even if the path is replaced in between
        return _read(file, path)


def _read(file: BinaryIO, path: Path) -> StoredCall:
    import torch

    try:
        _check_size(file)
        file.seek(0)
        # Operators do not check the indices of a sparse tensor: wrong ones would access memory anywhere. The warnings
        # are torch's, about sparse layouts; with `-W error` they would be exceptions.
        with warnings.catch_warnings(), torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
            warnings.simplefilter("ignore")
            content = torch.load(file, map_location="cpu", weights_only=True)
        op, args, kwargs, tensors = (_of_type(content[k], t) for k, t in _PARTS.items())
        _check_plain(tensors)
        check_number([args, list(kwargs.values())])
        return StoredCall(
            op,
            tuple(decode_value(a, tensors) for a in args),
            {_of_type(k, str): decode_value(v, tensors) for k, v in kwargs.items()},
        )
    except Exception as error:  # torch raises exceptions of many types for a hostile file
        raise DataFileError(
            f"The captured inputs {str(path)!r} cannot be read ({type(error).__name__}). Record the run again.",
            slug="captured-inputs",
        ) from error


# Keys of a file of captured inputs, and the types of their values.
_PARTS = {"op": str, "args": list, "kwargs": dict, "tensors": list}
_VALUES = (type(None), bool, int, float, str)


def _of_type(value: Any, *types: type) -> Any:
    """The value, if it has one of these types; a subclass does not count.

    Raises:
        ValueError: It has another type.
    """
    if type(value) not in types:
        raise ValueError(type(value).__name__)
    return value


def _check_size(file: BinaryIO) -> None:
    """Refuse a compressed archive (a zip bomb): `torch.save` compresses nothing.

    Raises:
        ValueError: The members are larger than the file, or `torch.save` does not write such an archive.
    """
    with zipfile.ZipFile(file) as archive:
        _check_is_one(file, archive.start_dir)
        # Entries may overlap: many names for one stretch of the file would unpack to far more than it has.
        n_bytes = sum(entry.file_size for entry in archive.infolist())
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in archive.infolist()):
            raise ValueError("compressed")
        # torch takes capitals in names for small letters, and either of two entries of one name.
        pickles = [entry for entry in archive.infolist() if entry.filename.lower().endswith("data.pkl")]
    if n_bytes > os.fstat(file.fileno()).st_size:
        raise ValueError(f"{n_bytes} bytes in it")
    with zipfile.ZipFile(file) as archive:
        for entry in pickles:
            _check_pickle(archive.read(entry))


class _Held:
    """What a value of a pickle holds: other such values, and how many plain ones."""

    __slots__ = ("inside", "n_plain", "size")

    def __init__(self, values: list[_Held | None]) -> None:
        self.inside: list[_Held] = []
        self.n_plain = 1  # itself
        self.size = -1  # with all that is inside, once it is known; 0 while it is counted
        self.add(values)

    def add(self, values: list[_Held | None]) -> None:
        """Hold more of them; None stands for a plain one."""
        held = [v for v in values if v is not None]
        self.inside += held
        self.n_plain += len(values) - len(held)


def _check_pickle(pickled: bytes) -> None:
    """Refuse functions and classes of others, and values in values without end.

    To encode a text, torch's reader imports the module of any encoding. To hash a tuple that is a key, and to print an
    argument that does not fit, Python calls itself for each value that it holds, also for the same one twice.

    Raises:
        ValueError: A name is none, or a tuple or an argument holds more than any, that `torch.save` writes of captured
            inputs.
    """
    import pickletools

    # Of what is on the stack, and where the marks are. None is a plain value.
    stack: list[_Held | None] = []
    marks: list[int] = []
    memo: dict[Any, _Held | None] = {}
    bounded: list[_Held] = []
    for opcode, number, _ in pickletools.genops(pickled):
        name, before, n_after = opcode.name, opcode.stack_before, len(opcode.stack_after)
        if name == "MARK":
            marks.append(len(stack))
            continue
        if name == "GLOBAL" and not _is_written(str(number)):
            raise ValueError(f"{str(number)[:80]} in it")
        n_before = len(before)
        if pickletools.markobject in before:
            n_before = len(stack) - marks.pop() + before.index(pickletools.markobject)
        given = stack[len(stack) - n_before :]
        del stack[len(stack) - n_before :]
        if name.endswith("PUT"):
            memo[number] = stack[-1]
        made: _Held | None = None
        if name.endswith("GET"):
            made = memo[number]
        elif name in _FILL:
            made = given[0] or _Held([None])
            made.add(given[1:])
        elif n_after and (given or name in _EMPTY):
            made = _Held(given)
        # Lists, dictionaries and sets have no hash, and are no arguments.
        if made is not None and name not in _MAY_BE_LONG and not name.endswith("GET"):
            bounded.append(made)
        stack += [made] * n_after
    # At the end: a list may be in another before anything is in it.
    if any(_size(held) > _MAX_IN_TUPLE for held in bounded):
        raise ValueError("values in values")


def _size(whole: _Held) -> int:
    """How many values one holds with all that is inside of it, each as often as it is there.

    Raises:
        ValueError: It is inside of itself.
    """
    waiting = [whole]
    while waiting:
        held = waiting[-1]
        if held.size > 0:
            waiting.pop()
        elif held.size < 0:
            held.size = 0
            if any(inner.size == 0 for inner in held.inside):
                raise ValueError("values in themselves")
            waiting += [inner for inner in held.inside if inner.size < 0]
        else:
            # Beyond the bound the number does not matter, and would have as many digits as there are levels.
            held.size = min(held.n_plain + sum(inner.size for inner in held.inside), _MAX_IN_TUPLE + 1)
            waiting.pop()
    return whole.size


def _is_written(name: str) -> bool:
    """Whether `torch.save` writes this function, class or constant into captured inputs: ``torch FloatStorage``."""
    import torch

    if name in _WRITTEN or _STORAGE.fullmatch(name):
        return True
    # Not `getattr`: torch has a module `__getattr__`, which imports submodules by name.
    return isinstance(vars(torch).get(name.removeprefix("torch ")), (torch.dtype, torch.qscheme))


def _check_is_one(file: BinaryIO, start: int) -> None:
    """Refuse a file that Python and torch would read as different archives.

    Args:
        file: A zip archive.
        start: Offset of the central directory that Python found.

    Raises:
        ValueError: The records disagree on that offset, or other bytes follow the central directory.
    """
    # Python reads the central directory just before the end record. torch reads the one at the offset that the end
    # record names, and reads a file with another magic number as the legacy format.
    file.seek(0)
    begins, n = file.read(4), file.seek(0, os.SEEK_END)
    file.seek(max(0, n - _END.size))
    end = file.read().rjust(_END.size)
    large, size, place, locator, large_at, last, short_size, short_place, comment = _END.unpack(end)
    marks = begins, large, locator, last, comment
    # torch writes zip64 records always; below 4 GiB, the small end record repeats both numbers.
    is_same = short_size in (size, _IN_LARGE) and short_place in (place, _IN_LARGE)
    if marks != _MARKS or not is_same or (place, place + size, large_at) != (start, n - len(end), n - len(end)):
        raise ValueError("no archive that torch.save writes")


# End of an archive: the zip64 end record with size and offset of the central directory, its locator, and the plain end
# record with both numbers again.
_END = struct.Struct("<4s36xQQ4s4xQ4x4s8xIIH")
# Magic numbers of the file and of these records, and the length of the comment.
_MARKS = (b"PK\3\4", b"PK\6\6", b"PK\6\7", b"PK\5\6", 0)
# Values in a tuple or an argument, and in those that it holds; torch writes the sizes and strides of a tensor or two.
_MAX_IN_TUPLE = 1000
# Codes of a pickle that put values into one that is there; that make one of no values; that make one of any length.
_FILL = ("APPEND", "APPENDS", "SETITEM", "SETITEMS", "ADDITEMS", "BUILD")
_EMPTY = ("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET")
_MAY_BE_LONG = {*_FILL, *_EMPTY, "LIST", "DICT"} - {"BUILD"}
_WRITTEN = {
    *("collections OrderedDict", "torch Size", "torch.serialization _get_layout", "torch.storage UntypedStorage"),
    *(f"torch._utils _rebuild_{name}" for name in ("tensor_v2", "tensor_v3", "sparse_tensor", "nested_tensor")),
    *(f"torch._utils _rebuild_{name}" for name in ("qtensor", "parameter", "meta_tensor_no_storage")),
}
_STORAGE = re.compile(r"torch [A-Z]\w*Storage")
# Stands in the end record for a number that only the zip64 record can hold.
_IN_LARGE = 0xFFFFFFFF


def _check_plain(tensors: Any) -> None:
    """Refuse subclasses of tensors, tensors with instance attributes (which could hide methods), and meta tensors."""
    import torch

    from shadowrun.torch_private import has_hooks

    for t in tensors:
        if type(t) not in (torch.Tensor, torch.nn.Parameter) or t.__dict__ or has_hooks(t):
            raise ValueError(type(t).__name__)
        if t.device.type != "cpu":  # `map_location` leaves "meta", which claims any size and has no memory
            raise ValueError(t.device.type)
        # torch lets these lie anywhere; a kernel that reads one number from its argument would read there.
        if t.layout is torch.strided and not t.is_nested and not t.numel() and t.storage_offset():
            raise ValueError("no elements, and a place for them")
    _check_apart(tensors)


def _check_apart(tensors: list[Any]) -> None:
    """Refuse sparse tensors whose indices share memory with values: an operator could overwrite checked indices."""
    # Two sparse tensors may share their indices.
    places: set[int] = set()
    values: set[int] = set()
    for t in tensors:
        inner, outer = _parts_of(t)
        places.update(part.untyped_storage().data_ptr() for part in inner if part.numel())
        values.update(part.untyped_storage().data_ptr() for part in outer if part.numel())
    if places & values:
        raise ValueError("shared indices")


def _parts_of(t: Any) -> tuple[list[Any], list[Any]]:
    """The tensors that hold the indices of a tensor, and those that hold its values."""
    import torch

    from shadowrun.torch_private import sizes_of_nested, sparse_parts

    if t.is_nested and t.layout is torch.strided:
        return sizes_of_nested(t), [t.values()]
    if t.layout is torch.strided:
        return [], [t]
    if t.layout is torch.sparse_coo:
        indices, values = sparse_parts(t)
        return [indices], [values]
    if t.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [t.crow_indices(), t.col_indices()], [t.values()]
    if t.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [t.ccol_indices(), t.row_indices()], [t.values()]
    return [], []


def check_number(values: list[Any]) -> None:
    """Refuse nested lists that grow exponentially: in the file, each may hold one other list twice."""
    waiting: list[Any] = [values]
    n = 0
    while waiting:
        inner = waiting.pop()
        n += len(inner)
        if n > _MAX_VALUES:
            raise ValueError("values")
        waiting += [v for v in inner if isinstance(v, (list, tuple))]


def captured_calls(data: DataFile) -> dict[int, tuple[int, int, str]]:
    """Calls with captured inputs: call number to context, outcome and file name."""
    sql = "select 1 from sqlite_master where type = 'table' and name = 'capture'"
    if next(data.query(sql), None) is None:  # a file of an older schema
        return {}
    return {seq: (context, outcome, str(file)) for seq, context, outcome, file in data.query(_CAPTURED)}


def encode_value(value: Any, tensors: list[Any]) -> Any:
    """An argument as JSON-like values; a tensor becomes its index in `tensors`."""
    import torch

    if isinstance(value, torch.Tensor):
        # By identity: arguments that are one tensor are one tensor again when they are loaded.
        known = next((i for i, t in enumerate(tensors) if t is value), None)
        if known is None:
            known = len(tensors)
            tensors.append(value)
        return {"tensor": known}
    if isinstance(value, (list, tuple)):
        return [encode_value(v, tensors) for v in value]
    return plain_json.encode(value)


def decode_value(value: Any, tensors: list[Any]) -> Any:
    """Inverse of `encode_value`; tensors come only from the checked list."""
    if type(value) is list:
        return [decode_value(v, tensors) for v in value]
    if type(value) is not dict:
        return _of_type(value, *_VALUES)
    ((kind, content),) = value.items()
    return tensors[_of_type(content, int)] if kind == "tensor" else plain_json.decode(kind, content)
