"""DataLoader under a comparison: the same batches, whoever makes them, and no trace of the workers in the data file."""

import os
import sqlite3

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import shadowrun
from shadowrun import Status

N_ITEMS = 12
WORKERS = [(0, None), (2, "fork"), (2, "spawn")]


class Items(Dataset):
    """Augmented with torch operators and random draws, as users do; says in which process it was made."""

    def __len__(self):
        return N_ITEMS

    def __getitem__(self, k):
        x = torch.arange(4.0) * k + torch.rand(4)
        return x.softmax(0), (x @ x).sqrt(), os.getpid(), shadowrun.current() is not None


def batches(workers, method, **options):
    torch.manual_seed(3)
    loader = DataLoader(
        Items(), batch_size=4, shuffle=True, num_workers=workers, multiprocessing_context=method, timeout=0, **options
    )
    made = [batch for _ in range(2) for batch in loader]
    tensors = [t.clone() for xs, ns, _, _ in made for t in (xs, ns)]
    return [*tensors, torch.get_rng_state()], made


@pytest.mark.parametrize(("workers", "method"), WORKERS, ids=["none", "fork", "spawn"])
@pytest.mark.parametrize("persistent", [False, True])
def test_batches_are_the_same(workers, method, persistent, tmp_path):
    if persistent and method != "fork":
        pytest.skip("of fork only: spawning takes seconds")
    options = {"persistent_workers": persistent}
    plain, _ = batches(workers, method, **options)
    path = tmp_path / "run.shadowrun"
    # Other threads than the program's: a forked worker that replayed would hang in OpenMP.
    with shadowrun.compare("cpu[threads=2]", file=path) as run:
        torch.ones(3000, 300).sum(0)
        observed, made = batches(workers, method, **options)
        (torch.ones(4) * 2).sum()
    for p, o in zip(plain, observed, strict=True):
        assert torch.equal(p, o)
    pids = {int(pid) for batch in made for pid in batch[2]}
    compared = {bool(c) for batch in made for c in batch[3]}
    assert compared == {not workers}, "a worker is another program"
    assert (os.getpid() in pids) is (not workers)
    softmax = sum(r.call.op == "aten::_softmax" for r in run.records())
    assert softmax == (0 if workers else 2 * N_ITEMS), "what a worker does is not in the file of its parent"
    assert run.counts()[Status.MISMATCH] == run.counts()[Status.ERROR] == 0
    seqs = [r.call.seq for r in shadowrun.load(path).records()]
    assert seqs == list(range(len(seqs)))
    assert run.info.complete
    check = sqlite3.connect(path).execute("pragma integrity_check").fetchone()
    assert check == ("ok",)
