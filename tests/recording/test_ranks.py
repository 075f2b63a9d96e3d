"""Each rank writes its own file, and they are read as one recording."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

import shadowrun
from shadowrun.recording.captured_reader import CapturedFile
from shadowrun.recording.recording_file import read, read_all

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


@pytest.fixture
def files(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(PROGRAM)
    without = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    processes = [
        subprocess.Popen([sys.executable, str(script), str(rank), str(tmp_path)], env=without, stderr=subprocess.PIPE)
        for rank in (0, 1)
    ]
    for process in processes:
        _, said = process.communicate(timeout=300)
        assert process.returncode == 0, said.decode()
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
