"""Small recordings made by hand: a platform is a list of calls with their results."""

from __future__ import annotations

import numpy as np
import pytest

from shadowrun.numerics.hash_ladder import ladder, mantissa_of
from shadowrun.recording.file_format.recording_file import in_memory
from shadowrun.recording.file_format.recording_writer import Block, Writer
from shadowrun.recording.model import CALL, RESULT, Context, Form, Kind, Process, sample_positions
from shadowrun.types import Phase


def columns(calls):
    """Contexts, forms and block of calls (module, op, inputs, arrays): inputs are numbers of earlier calls."""
    contexts, forms, rows, rungs, samples, inputs, first = [], [], [], [], [], [], []
    made = np.zeros(len(calls), CALL)
    made["kernel"] = -1
    seen = {}
    for call, (module, op, given, arrays) in zip(made, calls, strict=True):
        context = Context(op, module, Phase.FORWARD, "net.py:1", "cpu", "[]")
        if context not in contexts:
            contexts.append(context)
        call["context"] = contexts.index(context)
        call["occurrence"] = seen[context] = seen.get(context, -1) + 1
        call["n_results"], call["n_inputs"] = len(arrays), len(given)
        inputs += [first[number] for number in given]
        first.append(len(rows))
        for array in arrays:
            form = Form(str(array.dtype), array.shape, (1,) * array.ndim)
            if form not in forms:
                forms.append(form)
            bits = array.view(f"u{array.itemsize}").reshape(-1)
            row = np.zeros(1, RESULT)
            row["form"], row["base"], row["kind"] = forms.index(form), -1, Kind.RESULT
            found, sampled = ladder(bits, mantissa_of(form.dtype)), bits[sample_positions(bits.size)].astype(np.uint64)
            row["n_rungs"], row["n_samples"] = len(found), len(sampled)
            row["n_nan"] = np.isnan(array).sum()
            row["n_neg_zero"] = ((array == 0) & np.signbit(array)).sum()
            row["n_zero"] = ((array == 0) & ~np.signbit(array)).sum()
            finite = array[np.isfinite(array)]
            row["min"], row["max"] = (finite.min(), finite.max()) if finite.size else (np.nan, np.nan)
            rows.append(row)
            rungs.append(found)
            samples.append(sampled)
    block = Block(
        made,
        np.concatenate([np.empty(0, RESULT), *rows]),
        np.array(inputs, np.int64),
        np.concatenate([np.empty(0, np.uint64), *rungs]),
        np.concatenate([np.empty(0, np.uint64), *samples]),
        np.empty(0, np.uint64),
    )
    return contexts, forms, block


def recorded(name, calls, fingerprint=None, **process):
    contexts, forms, block = columns(calls)
    described = Process(name, complete=True, fingerprint=fingerprint or {}, n_calls=len(calls), **process)
    return in_memory(name, described, block, contexts, forms)


@pytest.fixture
def write(tmp_path):
    """Write a recording; returns its path."""

    def write(name, calls, fingerprint=None, **process):
        contexts, forms, block = columns(calls)
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        described = Process(path.name, complete=True, fingerprint=fingerprint or {}, **process)
        writer = Writer(path, described)
        for number, context in enumerate(contexts):
            writer.context(number, context)
        for number, form in enumerate(forms):
            writer.form(number, form)
        if len(calls):
            writer.block(block)
        writer.finish(described)
        return path

    return write


@pytest.fixture
def make():
    """Make a recording in memory."""
    return recorded
