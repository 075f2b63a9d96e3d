"""Writes recordings of made-up programs: calls with given values, and digests by the specification."""

import dataclasses

import numpy as np

from shadowrun.numerics.hash_ladder import ladder, mantissa_of
from shadowrun.recording.file_format.recording_file import read
from shadowrun.recording.file_format.recording_writer import Block, Writer
from shadowrun.recording.model import CALL, NONE, RESULT, Context, Form, Kind, Process, output_name, sample_positions
from shadowrun.types import Phase


class Tape:
    """A program that is recorded by hand. Tensors are row numbers; their values are numpy arrays."""

    def __init__(self, path, **process):
        self.path = path
        self.process = Process(path.name, complete=True, **process)
        self._contexts, self._forms, self._kernels = {}, {}, {}
        self._calls, self._results, self._inputs = [], [], []
        self._rungs, self._samples, self._rows = [], [], []
        self._pending, self._counts, self._row_of = [], {}, {}
        self._outputs = {}

    def leaf(self, values):
        """A tensor that the program was given; it belongs to the next call."""
        self._pending.append(np.asarray(values))
        return ("leaf", len(self._pending) - 1)

    def call(self, op, inputs=(), results=(), *, module="", phase="forward", step=0, site="train.py:1", device="cpu",
             arguments="[]", kernel=None, written=(), views=(), digested=True, rows=0):  # fmt: skip
        """Record a call; gives the rows of its results, views and written arguments."""
        first = len(self._results)
        leaves = [self._result(Kind.LEAF, 0, values) for values in self._pending]
        self._pending = []
        given = [leaves[i[1]] if isinstance(i, tuple) else i for i in inputs]
        made = [
            self._result(Kind.RESULT, p, np.asarray(v), digested=digested, rows=rows) for p, v in enumerate(results)
        ]
        made += [self._result(Kind.VIEW, p, np.asarray(v), base=given[0], digested=False) for p, v in enumerate(views)]
        made += [self._result(Kind.WRITTEN, p, np.asarray(v)) for p, v in enumerate(written)]
        context = Context(op, module, Phase(phase), site, device, arguments)
        key = op, module, phase, step
        occurrence = self._counts.get(key, 0)
        self._counts[key] = occurrence + 1
        number = self._contexts.setdefault(context, len(self._contexts))
        kernel_number = NONE if kernel is None else self._kernels.setdefault(kernel, len(self._kernels))
        self._calls.append((step, number, occurrence, kernel_number, len(self._results) - first, len(given)))
        self._inputs += given
        self._leaves = leaves
        return made[0] if len(made) == 1 else made

    def leaf_row(self, number=0):
        """Row of a leaf of the last call, for later calls."""
        return self._leaves[number]

    def keep(self, row, values):
        """Keep all elements of a result, as of a step's last call."""
        self._outputs[row] = np.ascontiguousarray(values)

    def _result(self, kind, position, values, *, base=NONE, digested=True, rows=0):
        dtype = str(values.dtype)
        stride = tuple(s // values.itemsize for s in values.strides)
        form = self._forms.setdefault(Form(dtype, values.shape, stride), len(self._forms))
        row = np.zeros((), RESULT)
        row["form"], row["kind"], row["position"], row["base"] = form, kind, position, base
        row["min"] = row["max"] = row["norm"] = np.nan
        if digested:
            bits = np.ascontiguousarray(values).reshape(-1).view(f"u{values.itemsize}")
            rungs = ladder(bits, mantissa_of(dtype))
            samples = bits[sample_positions(len(bits))].astype(np.uint64)
            row["n_rungs"], row["n_samples"] = len(rungs), len(samples)
            self._rungs.append(rungs)
            self._samples.append(samples)
            if values.dtype.kind == "f":
                finite = values[np.isfinite(values)].astype(np.float64)
                row["n_nan"], row["n_pos_inf"] = np.isnan(values).sum(), np.isposinf(values).sum()
                row["n_neg_inf"] = np.isneginf(values).sum()
                row["norm"] = np.sqrt((finite**2).sum())
                row["min"], row["max"] = (finite.min(), finite.max()) if finite.size else (np.nan, np.nan)
        if rows and values.ndim > 1:
            parts = values.reshape(-1, values.shape[-1])[:rows]
            row["n_rows"] = len(parts)
            self._rows += [ladder(part.view(f"u{values.itemsize}"), mantissa_of(dtype)) for part in parts]
        self._results.append(row)
        return len(self._results) - 1

    def write(self):
        """Write the file; gives its path."""
        writer = Writer(self.path, self.process)
        for context, number in self._contexts.items():
            writer.context(number, context)
        for form, number in self._forms.items():
            writer.form(number, form)
        for kernel, number in self._kernels.items():
            writer.kernel(number, kernel)
        if self._calls:
            joined = [np.concatenate([np.zeros(0, np.uint64), *p]) for p in (self._rungs, self._samples, self._rows)]
            results = np.array(self._results, RESULT)
            writer.block(Block(np.array(self._calls, CALL), results, np.array(self._inputs, np.int64), *joined))
        for row, values in self._outputs.items():
            bits = values.reshape(-1).view(f"u{values.itemsize}")
            name = output_name(int(ladder(bits, mantissa_of(str(values.dtype)))[0]), values.nbytes)
            writer.content(name, str(values.dtype), values.shape, values.tobytes())
            writer.output(row, name)
        writer.finish(self.process)
        return self.path

    def read(self):
        """Write and read it."""
        return read(self.write())

    def changed(self, **process):
        """Change what is said of the process."""
        self.process = dataclasses.replace(self.process, **process)
        return self


def f32(*values):
    return np.array(values, np.float32)


def next_up(values, n=1):
    """Floats n units in the last place further from zero."""
    return (np.asarray(values).view(np.uint32) + np.uint32(n)).view(np.float32)
