import json
import lzma
from dataclasses import replace

import pytest
import torch

from shadowrun.errors import DataFileError
from shadowrun.studies.zoo.graph import Graph, Input, Node, Ref
from shadowrun.studies.zoo.program import Stage, program_of, read_zoo, unique, write_zoo

aten = torch.ops.aten
X = Input("x", (2, 3))
RELU, NEG = (
    program_of(op, "test", Graph((X,), (Node(getattr(aten, op).default, (Ref(-1),)),), (Ref(0),)))
    for op in ("relu", "neg")
)
STAGES = (Stage("test", "captured", 3, 2, (("third", "no reason"),)),)


def test_a_zoo_comes_back_as_it_was_written(tmp_path):
    path = tmp_path / "my.zoo"
    write_zoo(path, [RELU, replace(NEG, made_from=(RELU.id,), count=3)], STAGES)
    zoo = read_zoo(path)
    assert list(zoo.programs) == [RELU.id, NEG.id]
    assert zoo.programs[RELU.id] == RELU
    assert zoo.programs[NEG.id].made_from == (RELU.id,)
    assert zoo.stages == STAGES
    write_zoo(path, [NEG, RELU], ())  # a zoo is replaced
    assert read_zoo(path).digest == zoo.digest


def test_one_graph_is_one_program():
    kept, left_out = unique([RELU, NEG, replace(RELU, name="again")])
    assert kept == [RELU, NEG]
    assert left_out == (("again", "the same graph as relu"),)


def test_other_files_are_not_replaced(tmp_path):
    path = tmp_path / "notes.txt"
    path.write_text("dear diary")
    with pytest.raises(DataFileError, match="not replaced"):
        write_zoo(path, [RELU], ())
    assert path.read_text() == "dear diary"
    with pytest.raises(DataFileError, match="cannot be written"):
        write_zoo(tmp_path / "no" / "such" / "folder", [RELU], ())


def packed(rows):
    return lzma.compress(b"".join(json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in rows))


HEADER = {"format": "shadowrun zoo", "version": 1}
HOSTILE = ["program", RELU.id, "x", "y", [], 1, [[], [["aten::from_file", ["a"], {}, ""]], []]]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xfd7zXZ\0",
        packed([{"format": "else"}]),
        packed([{**HEADER, "version": 99}]),
        packed([HEADER, ["stage", "x", "y", "many", 1, []]]),
        packed([HEADER, ["stage", "x", "y", 1, 10**4200, []]]),
        packed([HEADER, ["program", "no-number!!", "x"]]),
        packed([HEADER, 7]),
        packed([HEADER])[:-8],
        # Made when it is used: each process of the tests reads this list.
        lambda: lzma.compress(b'{"format":"shadowrun zoo","version":1}\n' + b" " * (1 << 26)),
        packed([HEADER]).replace(b"\n", b"")[:20],
    ],
)
def test_a_file_that_is_no_zoo_is_refused(tmp_path, content):
    path = tmp_path / "bad.zoo"
    path.write_bytes(content() if callable(content) else content)
    with pytest.raises(DataFileError):
        read_zoo(path)


@pytest.mark.parametrize("row", [HOSTILE, [*HOSTILE[:6], 3], ["program", RELU.id, "x"]])
def test_a_hostile_program_is_refused_when_it_is_used(tmp_path, row):
    path = tmp_path / "bad.zoo"
    path.write_bytes(packed([HEADER, row]))
    with pytest.raises(DataFileError, match="cannot be used"):
        read_zoo(path).programs[RELU.id]


def test_a_program_with_the_id_of_another_is_refused(tmp_path):
    path = tmp_path / "bad.zoo"
    write_zoo(path, [replace(NEG, id=RELU.id)], ())
    with pytest.raises(DataFileError, match=NEG.id):
        read_zoo(path).programs[RELU.id]


def test_a_missing_zoo_says_how_to_make_one(tmp_path):
    with pytest.raises(DataFileError, match="shadowrun zoo add"):
        read_zoo(tmp_path / "none")
