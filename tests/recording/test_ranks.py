"""Each rank writes its own file, and they are read as one recording."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys

import pytest

import shadowrun
from shadowrun.cli.main import main
from shadowrun.recording.file_format.captured_reader import CapturedFile
from shadowrun.recording.file_format.recording_file import read, read_all
from shadowrun.recording.model import Kind
from shadowrun.studies.diff.compare import Outcome
from shadowrun.studies.diff.recordings import diff_recordings

PROGRAM = """
import sys, torch, shadowrun
import torch.distributed as dist
rank, folder = int(sys.argv[1]), sys.argv[2]
with shadowrun.record(folder + "/a.shadowrec", capture=10_000) as run:
    x = torch.full((4,), float(rank + 1))
    dist.init_process_group("gloo", init_method="file://" + folder + "/store", rank=rank, world_size=2)
    dist.all_reduce(x)
    (x * 2).sum()
    run.step()
    dist.barrier()
    dist.destroy_process_group()
"""


DISTRIBUTED = """
import sys, torch, shadowrun
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

rank, folder, placements = int(sys.argv[1]), sys.argv[2], {"columns": [Shard(0)], "whole": [Replicate()]}[sys.argv[3]]
dist.init_process_group("gloo", init_method="file://" + folder + "/store." + sys.argv[3], rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

def program():
    torch.manual_seed(0)
    layer = nn.Linear(8, 6)
    for name, p in list(layer.named_parameters()):
        setattr(layer, name, nn.Parameter(distribute_tensor(p.detach(), mesh, placements)))
    x = distribute_tensor(torch.rand(4, 8), mesh, [Replicate()])
    y = layer(x).relu()
    y.sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).step()
    with torch.inference_mode():
        z = layer(x) + 1
    with_error = None
    try:
        x @ x
    except RuntimeError as error:
        with_error = type(error).__name__
    return [t.full_tensor() for t in (y.detach(), layer.weight.grad, layer.weight.detach(), z)], with_error

plain, error = program()
with shadowrun.record(folder + "/" + sys.argv[3] + ".shadowrec") as run:
    results, same_error = program()
assert all(map(torch.equal, plain, results)) and error == same_error == "RuntimeError", (error, same_error)
assert "failure of shadowrun" not in run.skipped, run.skipped
dist.barrier()
dist.destroy_process_group()
"""


def run_ranks(folder, program, *arguments):
    """Run a program in two processes, with their rank and the folder for their first arguments."""
    script = folder / "ranks.py"
    script.write_text(program)
    without = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(folder), *arguments], env=without, stderr=subprocess.PIPE
        )
        for rank in (0, 1)
    ]
    for process in processes:
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said.decode()


@pytest.fixture
def files(tmp_path):
    run_ranks(tmp_path, PROGRAM)
    return [tmp_path / f"a.{rank}.shadowrec" for rank in (0, 1)]


def test_each_rank_keeps_its_own_inputs(files):
    for path in files:
        recording = read(path)
        with CapturedFile(path) as captured:
            kept = {recording.context_of(call).op: captured.load(call, 1000) for call in captured.calls()}
        # After the sum over both ranks; the collective itself takes objects, which are not kept.
        assert kept["aten::mul.Tensor"].args[0].tolist() == [3.0] * 4
        assert not any(op.startswith("c10d::") for op in kept)


def test_each_rank_has_its_file_and_they_are_read_as_one(files):
    parts = [read(path) for path in files]
    assert [(p.processes[0].rank, p.processes[0].world_size, p.processes[0].name) for p in parts] == [
        (0, 2, "a.0.shadowrec"),
        (1, 2, "a.1.shadowrec"),
    ]
    whole = read_all(files[::-1])
    assert [process.rank for process in whole.processes] == [0, 1]
    assert list(whole.call_keys()) == [key for part in parts for key in part.call_keys()]
    first = len(parts[0].calls)
    assert whole.process_of(first).rank == 1
    for c in range(len(parts[1].calls)):
        ours, theirs = first + c, c
        assert whole.context_of(ours) == parts[1].context_of(theirs)
        rows = list(zip(whole.inputs_of(ours).tolist(), parts[1].inputs_of(theirs).tolist(), strict=True))
        rows += zip(whole.results_of(ours), parts[1].results_of(theirs), strict=True)
        for row, other in rows:
            assert whole.form_of(row) == parts[1].form_of(other)
            assert whole.ladder(row).tolist() == parts[1].ladder(other).tolist()
            assert whole.samples_of(row).tolist() == parts[1].samples_of(other).tolist()


def test_a_recording_is_finished_where_the_name_of_its_rank_cannot_be_locked(tmp_path):
    (tmp_path / "a.1.shadowrec-lock").mkdir()
    run_ranks(tmp_path, PROGRAM)
    (kept,) = set(tmp_path.glob("*.shadowrec")) - {tmp_path / "a.0.shadowrec"}
    (process,) = read(kept).processes
    assert (process.rank, process.complete) == (1, True)


def test_what_a_collective_wrote_is_a_leaf(files):
    for path in files:
        r = read(path)
        (product,) = (c for c, key in enumerate(r.call_keys()) if key.op == "aten::mul.Tensor")
        assert r.results["max"][r.inputs_of(product)[0]] == 3


def test_two_files_of_one_rank_are_refused(files):
    with pytest.raises(shadowrun.DataFileError, match="several are of rank 0"):
        read_all([files[0], files[0]])


def test_one_file_is_that_file(files):
    assert read_all(files[:1]).name == "a.0.shadowrec"


@pytest.fixture(scope="module")
def placed(tmp_path_factory):
    """Recordings of both ranks of one program, with its weights in columns and whole."""
    folder = tmp_path_factory.mktemp("placed")
    for placements in ("columns", "whole"):
        run_ranks(folder, DISTRIBUTED, placements)
    return {name: [folder / f"{name}.{rank}.shadowrec" for rank in (0, 1)] for name in ("columns", "whole")}


def made_by(recording, op):
    """Placements of the first result of each call of an operator, or of what it wrote to."""
    rows = (recording.results_of(c) for c, key in enumerate(recording.call_keys()) if key.op == op)
    kept = ([row for row in own if recording.results["kind"][row] != Kind.LEAF] for own in rows)
    return [recording.form_of(own[0]).placement for own in kept if own]


def test_local_parts_have_mesh_and_placements(placed):
    whole, sharded = "tp=2: Replicate()", "tp=2: Shard(dim=1)"
    for rank in (0, 1):
        columns = read(placed["columns"][rank])
        assert made_by(columns, "aten::relu") == [sharded]
        assert set(made_by(columns, "aten::addmm")) == {sharded}
        placements = {"placement:parameter:Linear.weight": "tp=2: Shard(dim=0)", "placement:input": whole}
        assert columns.processes[0].provenance.items() >= placements.items()
        assert made_by(read(placed["whole"][rank]), "aten::relu") == [whole]


def test_other_placements_are_another_provenance(placed, capsys):
    columns, whole = (str(placed[name][0]) for name in ("columns", "whole"))
    found = diff_recordings(read(placed["columns"][0]), read(placed["whole"][0])).provenance
    assert "placements of distributed tensors (placement:parameter:Linear.weight" in found.line
    assert ("placement:parameter:Linear.bias", "tp=2: Shard(dim=0)", "tp=2: Replicate()") in [
        dataclasses.astuple(fact) for fact in found.facts
    ]
    assert main(["classes", columns, whole]) == 0
    assert "placement:" in capsys.readouterr().out


def test_equal_placements_are_no_difference(placed):
    again = [read(placed["whole"][0])] * 2
    found = diff_recordings(*again)
    assert found.provenance.is_same
    assert found.difference.count(Outcome.EQUAL) == len(again[0].calls)


def test_the_same_bytes_in_another_placement_are_another_form(placed):
    first = read(placed["whole"][0])
    moved = [f._replace(placement=f.placement.replace("Replicate()", "Partial(sum)")) for f in first.forms]
    found = diff_recordings(first, dataclasses.replace(first, forms=tuple(moved)))
    assert found.difference.count(Outcome.FORM) > 3
