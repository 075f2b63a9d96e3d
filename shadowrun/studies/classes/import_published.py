"""Recordings out of the published results of Schlögl et al., NeurIPS 2023.

The paper is *Causes and Effects of Unanticipated Numerical Deviations in Neural Network Inference Frameworks*. The
authors' repository (uibk-iNNference/unaNNticipated, folder ``results``) has one JSON file for each machine, model and
sample: ``cpu_info`` (py-cpuinfo), ``device`` (TensorFlow's), ``prediction`` (base64 bytes, dtype, shape), and
``all_predictions`` where the inference was repeated. A source is that folder, or a file of lines
``{"path": …, "data": …}``, also compressed (``.jsonl``, ``.jsonl.xz``).

Each machine becomes one recording: its calls have the operator ``prediction``, the model as module, and the sample as
step. Repeats are rows of one call with equal position. A batch dimension of 1 is dropped, since the GPU files lack it.
Weights and inputs were not published with the results, so that these recordings have no provenance.

Example:
    >>> recordings = read_published("recordings.jsonl.xz")  # doctest: +SKIP
    >>> recordings[0].name  # doctest: +SKIP
    'aws/c4.xlarge-Intel_Xeon__E5-2666_v3_'
"""

from __future__ import annotations

import base64
import binascii
import json
import lzma
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from shadowrun.errors import DataFileError, UsageError, brief
from shadowrun.limits import read_text
from shadowrun.numerics.hash_ladder import ladder, mantissa_of
from shadowrun.recording.file_format.recording_file import in_memory
from shadowrun.recording.file_format.recording_writer import SUFFIX, Block, Writer
from shadowrun.recording.model import CALL, NONE, RESULT, Context, Form, Kind, Process, sample_positions
from shadowrun.report.sanitize import clip
from shadowrun.store.codec import storable
from shadowrun.types import Phase

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from shadowrun.recording.model import Recording

__all__ = ["EXPERIMENTS", "OPERATOR", "read_published", "save_published"]

EXPERIMENTS: Final = ("equivalence_classes", "precision", "race_conditions", "raw_simd")
"""Folders of the results that hold one prediction per file."""

OPERATOR: Final = "prediction"
_DTYPES: Final = ("float16", "float32", "float64")
# A few kilobytes may unpack to any size, without a line break; lists of a line take twenty times as much.
_MAX_LINE: Final = 1 << 24
_MIN_BYTES: Final = 1 << 26
# Bytes of lines for each byte of a compressed file; the published ones have 26.
_MAX_RATIO: Final = 64
# Of all files: each is digested, which takes 0.1 ms.
_MAX_RESULTS: Final = 1 << 18
# Results of one call in a recording.
_MAX_REPEATS: Final = 65_535
_MAX_DIMENSIONS: Final = 64
_MAX_STEP: Final = 2**31 - 2
_ERRORS: Final = (
    *(ValueError, LookupError, TypeError, AttributeError, EOFError, OSError, lzma.LZMAError),
    # A number without end, and lists of lists without end.
    *(OverflowError, RecursionError),
)

# Model of family 6 to microarchitecture; 85 is two, by stepping.
_INTEL: Final = {
    **dict.fromkeys((42, 45), "Sandy Bridge"),
    **dict.fromkeys((58, 62), "Ivy Bridge"),
    **dict.fromkeys((60, 63, 69, 70), "Haswell"),
    **dict.fromkeys((61, 71, 79, 86), "Broadwell"),
    **dict.fromkeys((78, 94), "Skylake"),
    **dict.fromkeys((142, 158), "Kaby Lake"),
    **dict.fromkeys((106, 108), "Ice Lake"),
}


@dataclass(frozen=True, slots=True)
class _Inference:
    """All repeats of one inference: `results` has the bytes of each."""

    model: str
    sample: int
    dtype: str
    shape: tuple[int, ...]
    results: tuple[bytes, ...]


@dataclass(slots=True)
class _Machine:
    """What the files of one machine hold."""

    fingerprint: dict[str, Any]
    inferences: list[_Inference] = field(default_factory=list)


def read_published(source: str | Path, experiment: str = EXPERIMENTS[0]) -> list[Recording]:
    """Read published results as recordings, one for each machine, in the order of the files.

    Args:
        source: Folder with the authors' results, or a file of lines; see above.
        experiment: One of `EXPERIMENTS`.

    Raises:
        DataFileError: The source is missing, damaged, or has no results of this experiment.
        UsageError: Unknown experiment.
    """
    return [
        in_memory(process.name, process, block, contexts, forms)
        for process, contexts, forms, block in map(_columns, *_sorted_out(Path(source), experiment))
    ]


def save_published(source: str | Path, folder: str | Path, experiment: str = EXPERIMENTS[0]) -> list[Path]:
    """Write published results as ``.shadowrec`` files; returns their paths. See `read_published`."""
    paths = []
    for process, contexts, forms, block in map(_columns, *_sorted_out(Path(source), experiment)):
        path = Path(folder) / (re.sub(r"[^\w.-]+", "_", process.name) + SUFFIX)
        writer = Writer(path, process)
        for number, context in enumerate(contexts):
            writer.context(number, context)
        for number, form in enumerate(forms):
            writer.form(number, form)
        writer.block(block)
        writer.finish(process)
        paths.append(path)
    return paths


def _sorted_out(source: Path, experiment: str) -> tuple[list[str], list[_Machine]]:
    """Names of the machines, and what their files hold."""
    if experiment not in EXPERIMENTS:
        raise UsageError(
            f"There is no published experiment {experiment!r}; use one of {', '.join(EXPERIMENTS)}.", slug="bad-option"
        )
    machines: dict[str, _Machine] = {}
    n_results = 0
    try:
        for path, data in _files(source, experiment):
            records = data if isinstance(data, list) else [data]
            name, model, sample = _named(path, experiment, records[0].get("model_type"))
            # The cloud is the folder above the machine's files; the folders of `precision` are models.
            place = path.split("/")[1] if path.count("/") > 1 and experiment != "precision" else ""
            machine = machines.setdefault(name, _Machine(_fingerprint(name, records[0], place)))
            machine.inferences.append(_inference(model, sample, records))
            n_results += len(machine.inferences[-1].results)
            if n_results > _MAX_RESULTS:
                raise ValueError(f"more than {_MAX_RESULTS:,} results")
    except _ERRORS as error:
        raise DataFileError(
            f"The published results {str(source)!r} cannot be read ({type(error).__name__}: {clip(str(error))}). Use "
            'the folder `results` of the authors\' repository, or lines of {"path": …, "data": …}.',
            slug="data-file-corrupt",
        ) from error
    if not machines:
        raise DataFileError(
            f"{str(source)!r} has no results in a folder {experiment!r}. Use the folder `results` of the authors' "
            'repository, or lines of {"path": …, "data": …}.',
            slug="data-file-corrupt",
        )
    return list(machines), list(machines.values())


def _files(source: Path, experiment: str) -> Iterator[tuple[str, Any]]:
    """Path below the results and content of each JSON file of an experiment."""
    if source.is_dir():
        for file in sorted((source / experiment).rglob("*.json")):
            yield file.relative_to(source).as_posix(), json.loads(read_text(file))
        return
    if source.exists() and not source.is_file():
        raise ValueError("no folder and no file")
    n_bytes, most = 0, max(_MIN_BYTES, _MAX_RATIO * source.stat().st_size)
    with lzma.open(source) if source.suffix == ".xz" else source.open("rb") as lines:
        # A few kilobytes may unpack to any size, without a line break; lists of a line take twenty times as much.
        while line := lines.readline(_MAX_LINE + 1):
            n_bytes += len(line)
            if len(line) > _MAX_LINE or n_bytes > most:
                raise ValueError(f"a line of more than {_MAX_LINE >> 20} MiB, or {most >> 20} MiB in all")
            if not line.strip():
                continue
            entry = json.loads(line)
            path = str(entry["path"])
            # Files that Git LFS keeps elsewhere are text here.
            if path.startswith(f"{experiment}/") and path.endswith(".json") and not isinstance(entry["data"], str):
                yield path, entry["data"]


def _named(path: str, experiment: str, model: str | None) -> tuple[str, str, int]:
    """Machine, model and sample of a file; the name of a machine begins with its cloud, if there is one."""
    folders, stem = path.split("/")[1:-1], path.rpartition("/")[2].removesuffix(".json")
    # There a file is named by its machine only, and the folder is the model.
    if experiment == "precision":
        return stem, storable(str(model or folders[-1])), 0
    sample = 0
    if model is not None and (match := re.fullmatch(rf"(.+)-{re.escape(model)}-i(\d+)", stem)):
        stem, sample = match[1], int(match[2])
    return "/".join([*folders[:1], stem]), storable(str(model or experiment)), sample


def _fingerprint(name: str, record: dict[str, Any], cloud: str) -> dict[str, Any]:
    cpu, device = record["cpu_info"], record.get("device", {})
    flags = sorted(str(flag) for flag in cpu["flags"])
    facts = {
        "platform": name,
        "device": str(device.get("device_type", "CPU")).lower(),
        "vendor": str(cpu["vendor_id_raw"]),
        "cpu": str(cpu["brand_raw"]),
        "architecture": _architecture(cpu),
        "cores": int(cpu["count"]),
        "cpu_flag_list": flags,
        "cloud": cloud,
    }
    accelerator = device.get("physical_description")
    if isinstance(accelerator, dict):
        facts |= {
            "device_name": str(accelerator["name"]),
            "device_capability": str(accelerator["compute capability"]),
        }
    return facts


def _architecture(cpu: dict[str, Any]) -> str:
    """Microarchitecture of a processor by family, model and stepping; its brand if unknown."""
    family, model, stepping = (int(cpu.get(name, 0)) for name in ("family", "model", "stepping"))
    if cpu["vendor_id_raw"] == "GenuineIntel" and family == 6:
        # Skylake and Cascade Lake servers share a model.
        found = ("Cascade Lake" if stepping >= 5 else "Skylake") if model == 85 else _INTEL.get(model)
    elif cpu["vendor_id_raw"] == "AuthenticAMD":
        found = {23: "Zen 2" if model >= 48 else "Zen", 25: "Zen 3"}.get(family)
    else:
        found = None
    return found or str(cpu["brand_raw"])


def _inference(model: str, sample: int, records: Sequence[dict[str, Any]]) -> _Inference:
    predictions = [prediction for record in records for prediction in _predictions(record)]
    dtype, shape = predictions[0][0], predictions[0][1]
    if any(p[:2] != (dtype, shape) for p in predictions):
        raise ValueError(f"repeats of {model} in several forms")
    if len(predictions) > _MAX_REPEATS or sample > _MAX_STEP:
        raise ValueError(f"{len(predictions)} repeats of {clip(model)}, sample {sample}")
    return _Inference(model, sample, dtype, shape, tuple(p[2] for p in predictions))


def _predictions(record: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...], bytes]]:
    """Dtype, shape and bytes of each repeat of a record."""
    # `prediction` is the most frequent of `all_predictions`, where there are any.
    given = record.get("all_predictions", record["prediction"])
    several = isinstance(given, dict) and "all_predictions" in record
    for prediction in given if isinstance(given, list) else [given]:
        dtype, shape = str(prediction["dtype"]), tuple(int(size) for size in prediction["shape"])
        if dtype not in _DTYPES:
            raise ValueError(f"a prediction of dtype {brief(dtype)}")
        # Before any product: that of thousands of numbers of thousands of digits takes minutes.
        if len(shape) > _MAX_DIMENSIONS or not all(0 <= size < 2**63 for size in shape):
            raise ValueError(f"a prediction of shape {brief(shape[:_MAX_DIMENSIONS])}")
        data = base64.b64decode(prediction["bytes"], validate=True)
        n_repeats = shape[0] if several else 1
        if several or shape[:1] == (1,):
            shape = shape[1:]
        size = math.prod(shape) * np.dtype(dtype).itemsize
        if n_repeats > _MAX_REPEATS:
            raise ValueError(f"{brief(n_repeats)} results of shape {brief(shape)}")
        # A result has elements: nothing would bound the repeats of nothing.
        if size * n_repeats != len(data) or not data:
            raise binascii.Error(
                f"{len(data)} bytes for {brief(n_repeats)} results of shape {brief(shape)} and dtype {dtype}"
            )
        # `all_predictions` is one array of all repeats, stacked along a new first dimension.
        yield from ((dtype, shape, data[i * size : (i + 1) * size]) for i in range(n_repeats))


def _columns(name: str, machine: _Machine) -> tuple[Process, list[Context], list[Form], Block]:
    """A machine's recording as the columns of a file."""
    inferences = sorted(machine.inferences, key=lambda i: i.sample)
    models = {model: n for n, model in enumerate(dict.fromkeys(i.model for i in inferences))}
    # Sorted by sample, models come in the order of their first sample, which is equal on all machines.
    contexts = [Context(OPERATOR, model, Phase.FORWARD, "", machine.fingerprint["device"], "[]") for model in models]
    forms = [
        Form(dtype, shape, _stride(shape)) for dtype, shape in dict.fromkeys((i.dtype, i.shape) for i in inferences)
    ]
    numbers = {(form.dtype, form.shape): number for number, form in enumerate(forms)}
    calls = np.zeros(len(inferences), CALL)
    calls["kernel"] = NONE
    rows: list[npt.NDArray[Any]] = []
    rungs, samples = [], []
    for call, inference in zip(calls, inferences, strict=True):
        call["step"], call["context"] = inference.sample, models[inference.model]
        call["n_results"] = len(inference.results)
        for data in inference.results:
            row, row_rungs, row_samples = _digest(data, inference.dtype)
            row["form"] = numbers[inference.dtype, inference.shape]
            rows.append(row)
            rungs.append(row_rungs)
            samples.append(row_samples)
    results = np.concatenate(rows)
    block = Block(
        calls,
        results,
        np.empty(0, np.int64),
        np.concatenate(rungs),
        np.concatenate(samples),
        np.empty(0, np.uint64),
    )
    # The file cannot say which calls are outputs: here all are.
    process = Process(
        name, complete=True, fingerprint=machine.fingerprint, options={"outputs": [f"*/{OPERATOR}"]}, n_calls=len(calls)
    )
    return process, contexts, forms, block


def _stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _digest(data: bytes, dtype: str) -> tuple[npt.NDArray[Any], npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Row, ladder and samples of a tensor's bytes."""
    # The published machines are little-endian; this one may not be.
    values = np.frombuffer(data, np.dtype(dtype).newbyteorder("<"))
    bits = np.frombuffer(data, f"<u{values.itemsize}")
    row = np.zeros(1, RESULT)
    row["kind"], row["base"] = Kind.RESULT, NONE
    rungs, samples = ladder(bits, mantissa_of(dtype)), bits[sample_positions(bits.size)].astype(np.uint64)
    row["n_rungs"], row["n_samples"] = len(rungs), len(samples)
    wide, negative = values.astype(np.float64), np.signbit(values)
    finite = wide[np.isfinite(wide)]
    row["n_nan"] = np.isnan(wide).sum()
    row["n_pos_inf"], row["n_neg_inf"] = (wide == np.inf).sum(), (wide == -np.inf).sum()
    row["n_zero"], row["n_neg_zero"] = ((wide == 0) & ~negative).sum(), ((wide == 0) & negative).sum()
    row["n_subnormal"] = ((wide != 0) & (np.abs(values) < np.finfo(dtype).smallest_normal)).sum()
    row["min"], row["max"] = (finite.min(), finite.max()) if finite.size else (np.nan, np.nan)
    row["norm"] = np.sqrt(np.square(finite).sum()) if finite.size else np.nan
    return row, rungs, samples
