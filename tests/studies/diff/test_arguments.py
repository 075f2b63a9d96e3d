"""Arguments of calls: two spellings of one call are no difference, two calls are."""

import pytest
import torch

import shadowrun
from shadowrun.recording.file_format.recording_file import read
from shadowrun.studies.diff.recordings import diff_recordings
from shadowrun.studies.diff.values import _Arguments, normalised

aten = torch.ops.aten
X = torch.arange(24.0).view(2, 3, 4)

SAME = {
    "split": (lambda x: aten.split(x, 2, 2), lambda x: aten.split(x, 2, -1)),
    "sum of dimensions": (lambda x: aten.sum(x, [0, 2]), lambda x: aten.sum(x, [-1, -3])),
    "sum of all": (lambda x: aten.mean(x, [0, 1, 2]), lambda x: aten.mean(x, [])),
    "keyword": (lambda x: aten.amax(x, [1], True), lambda x: aten.amax(x, dim=[-2], keepdim=True)),
    "default": (lambda x: aten.sum(x, [1], False), lambda x: aten.sum(x, [1])),
    "number": (lambda x: aten.pow(x, 2), lambda x: aten.pow(x, 2.0)),
    "factor": (lambda x: aten.add(x, x, alpha=2), lambda x: aten.add(x, x, alpha=2.0)),
    "dtype": (lambda x: aten.sum(x, [1], dtype=torch.float32), lambda x: aten.sum(x, [1])),
    "transpose": (lambda x: aten.transpose(x, 0, 2), lambda x: aten.transpose(x, -1, -3)),
    "flip": (lambda x: aten.flip(x, [0, 1]), lambda x: aten.flip(x, [-2, -3])),
    "unsqueeze": (lambda x: aten.unsqueeze(x, 3), lambda x: aten.unsqueeze(x, -1)),
    "stack": (lambda x: aten.stack([x, x], 3), lambda x: aten.stack([x, x], -1)),
    "cat": (lambda x: aten.cat([x, x], 2), lambda x: aten.cat([x, x], -1)),
    "view": (lambda x: aten.view(x, [-1, 4]), lambda x: aten.view(x, [6, 4])),
    "expand": (lambda x: aten.expand(x, [5, -1, -1, -1]), lambda x: aten.expand(x, [5, 2, 3, 4])),
    "select": (lambda x: aten.select(x, -1, -1), lambda x: aten.select(x, 2, 3)),
    "slice": (lambda x: aten.slice(x, 1, 1, 3), lambda x: aten.slice(x, -2, -2)),
    "softmax": (lambda x: aten._softmax(x, -1, False), lambda x: aten._softmax(x, 2, False)),
    "permute": (lambda x: aten.permute(x, [2, 0, 1]), lambda x: aten.permute(x, [-1, 0, -2])),
    "clone": (aten.clone, lambda x: aten.clone(x, memory_format=torch.preserve_format)),
}
OTHER = {
    "split": (lambda x: aten.split(x, 2, 2), lambda x: aten.split(x, 2, 0)),
    "permute": (lambda x: aten.permute(x, [2, 0, 1]), lambda x: aten.permute(x, [2, 1, 0])),
    "select": (lambda x: aten.select(x, 0, 0), lambda x: aten.select(x, 0, -1)),
    "slice": (lambda x: aten.slice(x, 2, 0, 2), lambda x: aten.slice(x, 2, 1, 3)),
    "sum": (lambda x: aten.sum(x, [0], True), lambda x: aten.sum(x, [1], True)),
    "sign of zero": (lambda x: aten.fill(x, 0.0), lambda x: aten.fill(x, -0.0)),
    "alpha": (lambda x: aten.add(x, x, alpha=2), lambda x: aten.add(x, x, alpha=3)),
    "step": (lambda x: aten.slice(x, 2, 0, 4, 1), lambda x: aten.slice(x, 2, 0, 4, 3)),
}


def outcome(tmp_path, *calls):
    """Of the first call; the second reads what it made, so that views count too."""
    recordings = []
    for name, call in zip("ab", calls, strict=True):
        path = tmp_path / f"{name}.shadowrec"
        with shadowrun.record(path):
            made = call(X)
            torch.neg(made[0] if isinstance(made, (list, tuple)) else made)
        recordings.append(read(path))
    found = diff_recordings(*recordings)
    assert len(found.difference.alignment.pairs) == 2
    return [str(found.difference.outcome(pair)) for pair in (0, 1)]


@pytest.mark.parametrize("name", SAME)
def test_two_spellings_are_one_call(tmp_path, name):
    assert outcome(tmp_path, *SAME[name]) == ["equal", "equal"]


@pytest.mark.parametrize("name", OTHER)
def test_two_calls_are_two(tmp_path, name):
    first, _ = outcome(tmp_path, *OTHER[name])
    assert first in ("arguments", "form")


@pytest.mark.parametrize(
    "text", ["", "[", "[" * 50_000, "null", "[]", '{"dim": {"a": []}}', '{"dim": [1, "x"]}', '{"dim": 99, "index": 7}']
)
@pytest.mark.parametrize("op", ["aten::sum.dim_IntList", "aten::select.int", "aten::transpose.int", "no operator"])
@pytest.mark.parametrize("shape", [None, (), (2, 3)])
def test_any_text_has_a_form(text, op, shape):
    assert hash(normalised(op, text, shape)) == hash(normalised(op, text, shape))


def test_an_argument_that_depends_on_the_shape_is_told_apart_call_by_call(tmp_path):
    recordings, part = [], X[0]
    for name, dims in (("a", (2, 1)), ("b", (-1, -1))):
        path = tmp_path / f"{name}.shadowrec"
        with shadowrun.record(path):
            for x, dim in zip((X, part), dims, strict=True):
                aten.cumsum(x, dim)
        recordings.append(read(path))
    found = diff_recordings(*recordings)
    assert [str(found.difference.outcome(pair)) for pair in (0, 1)] == ["equal", "equal"]
    assert len({int(code) for code in found.difference.first.arguments}) == 2


@pytest.mark.parametrize(("left", "right"), [("[", "]"), ('{"a": ', "}")])
def test_arguments_of_hundreds_of_levels_are_text(left, right):
    text = '{"size": ' + left * 600 + "1" + right * 600 + "}"
    assert _Arguments.parse("aten::zeros", text).form(None) == text
