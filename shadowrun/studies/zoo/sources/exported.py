"""Programs that `torch.export.save` wrote, ``.pt2`` files.

`torch.export.load` unpickles. Here only the JSON of the graph is read from the archive, and its weights are not: values
are generated, as those of any program.
"""

from __future__ import annotations

import json
import math
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from shadowrun.errors import DataFileError
from shadowrun.studies.zoo.graph import Fill, Input
from shadowrun.studies.zoo.sources.foreign_graph import MAX_ELEMENTS, Rows, captured, plain
from shadowrun.studies.zoo.sources.isolated_readers import candidates_below, read_each
from shadowrun.studies.zoo.sources.source import Collected, LeftOut

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shadowrun.studies.zoo.graph import Graph

__all__ = ["EXPORTED", "collect_exported", "graph_of_file"]

EXPORTED: Final = "exported"
# The file in the archive, since torch 2.8 and before.
_GRAPHS: Final = ("models/model.json", "serialized_exported_program.json")
# An archive may unpack to any size, and only its JSON is read.
_MAX_BYTES: Final = 1 << 26
_MAX_FILES: Final = 100_000
# By the number of `torch._export.serde.schema.ScalarType`.
_DTYPES: Final = (
    *(None, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.float32),
    *(torch.float64, torch.complex32, torch.complex64, torch.complex128, torch.bool, torch.bfloat16),
)
_LAYOUT_STRIDED: Final = 7
_MEMORY_FORMATS: Final = (
    *(None, torch.contiguous_format, torch.channels_last, torch.channels_last_3d, torch.preserve_format),
)
# Kind of an argument that is given by keyword.
_BY_NAME: Final = 2
_PLAIN: Final = ("as_int", "as_float", "as_bool", "as_string")
_LISTS: Final = ("as_ints", "as_floats", "as_bools", "as_strings")


def collect_exported(
    path: Path, wanted: Callable[[str], bool], on_progress: Callable[..., None], *, isolated: bool = False
) -> Collected:
    """Programs of a ``.pt2`` file, or of all at or below a folder.

    Args:
        path: The file or folder.
        wanted: Whether a file, by its path below the folder, is.
        on_progress: Called with done, total and name.
        isolated: Read and run each in a worker process with limits.

    Raises:
        DataFileError: There is none.
    """
    files = sorted(path.rglob("*.pt2"))[:_MAX_FILES] if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise DataFileError(f"{str(path)!r} is no .pt2 file, and no folder with one.", slug="zoo-source-file")
    found = Collected(EXPORTED)
    read_each(found, graph_of_file, candidates_below(path, files, wanted), on_progress, isolated=isolated)
    return found


def graph_of_file(path: str) -> Graph:
    """The graph of a file.

    Raises:
        LeftOut: It is none, or has what no program can hold.
    """
    try:
        return _Reader(_content(Path(path))["graph_module"]).graph()
    except (KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
        raise LeftOut(f"its graph has another form: {type(error).__name__} {error}") from None


def _content(path: Path) -> Any:
    try:
        with zipfile.ZipFile(path) as archive:
            # By its end: the archive has a folder of its own name in front.
            names = [i for i in archive.infolist() if i.filename.endswith(_GRAPHS)]
            if len(names) != 1:
                raise LeftOut(f"it has {len(names)} graphs, not one: it is no archive of torch.export")
            # The size in the archive's list may be wrong: no more than this is unpacked.
            with archive.open(names[0]) as file:
                content = file.read(_MAX_BYTES + 1)
    except (OSError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise LeftOut(f"it is no archive of torch.export: {error}") from None
    if len(content) > _MAX_BYTES:
        raise LeftOut(f"its graph has more than {_MAX_BYTES >> 20} MiB")
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise LeftOut(f"its graph is no JSON: {error}") from None


class _Reader:
    """Reads a graph.

    Args:
        module: ``graph_module`` of the JSON.
    """

    def __init__(self, module: Mapping[str, Any]) -> None:
        self._data = module["graph"]
        self._specs = module["signature"]["input_specs"]
        self._rows = Rows()
        self._values: dict[str, Any] = {}

    def graph(self) -> Graph:
        """The graph, run on generated values.

        Raises:
            LeftOut: It has what no program can hold.
        """
        inputs = [i for i in map(self._input, self._specs) if i is not None]
        for node in self._data["nodes"]:
            self._node(node)
        self._rows.output({"tuple": [self._argument(a) for a in self._data["outputs"] if "as_tensor" in a]})
        return captured(self._rows, inputs)

    def _input(self, spec: Mapping[str, Any]) -> Input | None:
        # Unions of the schema are objects with one key, the kind.
        ((kind, content),) = spec.items()
        if kind == "constant_input":
            return None
        argument = content.get("arg", {})
        name = argument["name"] if "name" in argument else argument.get("as_tensor", {}).get("name")
        if name is None:
            self._size(argument)
            return None
        if kind not in ("parameter", "buffer", "tensor_constant", "user_input"):
            raise LeftOut(f"an input of the kind {str(kind)[:40]}")
        self._values[name] = self._rows.placeholder()
        role = kind if kind in ("parameter", "buffer") else "input"
        title = content.get(f"{kind}_name") or name
        return _described(str(title)[:200], self._data["tensor_values"][name], role)

    def _size(self, argument: Mapping[str, Any]) -> None:
        """A number among the inputs: a size that varies, of which a hint is known."""
        ((kind, content),) = argument.items()
        if kind == "as_sym_int" and "as_name" in content:
            value = self._data["sym_int_values"][content["as_name"]]
            self._values[content["as_name"]] = plain(_number(value))

    def _node(self, node: Mapping[str, Any]) -> None:
        target = node["target"]
        if not isinstance(target, str):
            raise LeftOut("a call of no operator")
        args, kwargs = [], {}
        for given in node["inputs"]:
            if given.get("kind") == _BY_NAME:
                kwargs[given["name"]] = self._argument(given["arg"])
            else:
                args.append(self._argument(given["arg"]))
        # `_operator.add`: Python's operators on sizes.
        made = self._rows.call(target.removeprefix("_"), args, kwargs)
        outputs = node["outputs"]
        if len(outputs) == 1 and "as_tensors" in outputs[0]:
            self._several(made, [{"as_tensor": t} for t in outputs[0]["as_tensors"]])
        elif len(outputs) == 1:
            self._know(outputs[0], made)
        else:
            self._several(made, outputs)

    def _several(self, made: Any, outputs: list[Any]) -> None:
        for k, output in enumerate(outputs):
            if "as_none" not in output:
                self._know(output, self._rows.call("operator.getitem", [made, k]))

    def _know(self, output: Mapping[str, Any], made: Any) -> None:
        ((kind, content),) = output.items()
        if kind == "as_tensor":
            self._values[content["name"]] = made
        elif kind in ("as_sym_int", "as_sym_bool", "as_sym_float"):
            self._values[content["as_name"]] = made
        else:
            raise LeftOut(f"a result of the kind {str(kind)[:40]}")

    def _argument(self, argument: Mapping[str, Any]) -> Any:
        ((kind, content),) = argument.items()
        if kind == "as_none":
            return None
        if kind == "as_tensor":
            return self._values[content["name"]]
        if kind == "as_tensors":
            return [self._values[t["name"]] for t in content]
        if kind in ("as_optional_tensors", "as_sym_ints", "as_sym_floats"):
            return [self._argument(t) if kind == "as_optional_tensors" else self._symbol(t) for t in content]
        if kind in ("as_sym_int", "as_sym_bool", "as_sym_float"):
            return self._symbol(content)
        if kind in _PLAIN:
            return plain(content)
        if kind in _LISTS:
            return [plain(v) for v in content]
        if kind == "as_scalar_type":
            return plain(_dtype(content))
        if kind == "as_device":
            return plain(torch.device("cpu"))
        if kind == "as_layout" and content == _LAYOUT_STRIDED:
            return plain(torch.strided)
        if kind == "as_memory_format":
            return plain(_MEMORY_FORMATS[content])
        raise LeftOut(f"an argument of the kind {str(kind)[:40]}")

    def _symbol(self, content: Mapping[str, Any]) -> Any:
        return self._values[content["as_name"]] if "as_name" in content else plain(_number(content))


def _dtype(number: Any) -> torch.dtype:
    found = _DTYPES[number] if type(number) is int and 0 <= number < len(_DTYPES) else None
    if found is None:
        raise LeftOut(f"a dtype with the number {str(number)[:20]}")
    return found


def _number(value: Mapping[str, Any]) -> int | float | bool:
    """A size: a number, or an expression with a hint."""
    ((kind, content),) = value.items()
    if kind == "as_expr":
        if not content.get("hint"):
            raise LeftOut("a size without a hint")
        return _number(content["hint"])
    if type(content) not in (int, float, bool):
        raise LeftOut("a size that is no number")
    number: int | float | bool = content
    return number


def _described(name: str, meta: Mapping[str, Any], role: str) -> Input:
    shape = tuple(_number(n) for n in meta["sizes"])
    if not all(type(n) is int and 0 <= n <= MAX_ELEMENTS for n in shape) or meta["layout"] != _LAYOUT_STRIDED:
        raise LeftOut(f"its input {name[:80]} is no dense tensor of a size that is known")
    sizes = tuple(int(n) for n in shape)
    dtype = _dtype(meta["dtype"])
    return Input(name, sizes, dtype, _fill(name, sizes, dtype, role), role=role)


def _fill(name: str, shape: tuple[int, ...], dtype: torch.dtype, role: str) -> Fill:
    """Values as modules have them at their start: the file has weights, which are not read."""
    if dtype is torch.bool:
        return Fill("bools", 0.5)
    if not (dtype.is_floating_point or dtype.is_complex):
        # Buffers of integers are positions; of other integers, 0 and 1 are valid in all but the smallest range.
        return Fill("arange", 0.0, 1.0) if role == "buffer" and shape else Fill("integers", 0, 1)
    last = name.rpartition(".")[2]
    # Variances and scales of norms are positive, and near 1 at the start.
    if "var" in last or (role == "parameter" and last == "weight" and len(shape) == 1):
        return Fill("uniform", 0.5, 1.5)
    if role == "parameter":
        fan_in = math.prod(shape[1:]) if len(shape) > 1 else 64
        return Fill("normal", 0.0, 2.0 ** round(math.log2(max(fan_in, 1)) * -0.5))
    return Fill()
