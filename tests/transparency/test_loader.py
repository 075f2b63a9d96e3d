"""DataLoader under a comparison: the same batches, whoever makes them, and no trace of the workers in the data file."""

import contextlib
import os
import random
import sqlite3
import threading

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

import shadowrun
from shadowrun import Status

N_ITEMS = 8
N_EPOCHS = 2
CASES = {
    "in the program": {"num_workers": 0},
    "fork": {"num_workers": 2, "multiprocessing_context": "fork"},
    "fork, persistent": {"num_workers": 2, "multiprocessing_context": "fork", "persistent_workers": True},
    # One worker that lives on: each that is spawned imports torch.
    "spawn, persistent": {"num_workers": 1, "multiprocessing_context": "spawn", "persistent_workers": True},
}


class Items(Dataset):
    """Augmented with torch operators and random draws, as users do; says in which process it was made."""

    def __len__(self):
        return N_ITEMS

    def __getitem__(self, k):
        x = torch.arange(4.0) * k + torch.rand(4)
        return x.softmax(0), (x @ x).sqrt(), os.getpid(), shadowrun.current() is not None


class Batch:
    """What a collate function of the user's makes; pins itself, and says on which thread."""

    def __init__(self, tensors, pids, compared):
        self.tensors, self.pids, self.compared = tensors, pids, compared
        self.pinned_by = ""

    def pin_memory(self):
        self.tensors = [t.clone() for t in self.tensors]
        self.pinned_by = threading.current_thread().name
        return self


def collate(items):
    """Augments a whole batch: crops by Python's generator, noise and an order by torch's."""
    xs, ns, pids, compared = zip(*items, strict=True)
    first = random.randrange(2)
    x = torch.stack(xs)[torch.randperm(len(xs)), first : first + 3]
    return Batch([x + torch.randn_like(x) * 0.1, torch.stack(ns)], pids, compared)


def batches(**options):
    torch.manual_seed(3)
    random.seed(4)
    loader = DataLoader(Items(), batch_size=4, shuffle=True, collate_fn=collate, **options)
    made = [batch for _ in range(N_EPOCHS) for batch in loader]
    return [*(t for batch in made for t in batch.tensors), torch.get_rng_state()], made


def same(plain, observed):
    return len(plain) == len(observed) and all(torch.equal(p, o) for p, o in zip(plain, observed, strict=True))


@pytest.mark.parametrize("case", CASES)
def test_batches_are_the_same(case, tmp_path):
    options = CASES[case]
    plain, _ = batches(**options)
    path = tmp_path / "run.shadowrun"
    # Other threads than the program's: a forked worker that replayed would hang in OpenMP. No operator is called slow:
    # two threads wait long for each other on a busy machine, and the inputs of such a call are kept.
    with shadowrun.compare("cpu[threads=2]", file=path, slow_ratio=1e9) as run:
        torch.ones(3000, 300).sum(0)
        observed, made = batches(**options)
        (torch.ones(4) * 2).sum()
    assert same(plain, observed)
    workers = options["num_workers"]
    pids = {pid for batch in made for pid in batch.pids}
    assert len(pids) == max(workers, 1) * (1 if not workers or options.get("persistent_workers") else N_EPOCHS)
    assert {c for batch in made for c in batch.compared} == {not workers}, "a worker is another program"
    assert (os.getpid() in pids) is (not workers)
    softmax = sum(r.call.op == "aten::_softmax" for r in run.records())
    assert softmax == (0 if workers else N_EPOCHS * N_ITEMS), "what a worker does is not in the file of its parent"
    assert run.counts()[Status.MISMATCH] == run.counts()[Status.ERROR] == 0
    seqs = [r.call.seq for r in shadowrun.load(path).records()]
    assert seqs == list(range(len(seqs)))
    assert run.info.complete
    assert run.info.notes == ()
    assert [p.name for p in tmp_path.iterdir()] == ["run.shadowrun"]
    with contextlib.closing(sqlite3.connect(path)) as connection:  # Python 3.13 warns of one that is left open
        check = connection.execute("pragma integrity_check").fetchone()
    assert check == ("ok",)


def test_the_thread_that_pins_memory(monkeypatch):
    """It needs an accelerator; that this machine has one is all that is pretended here."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda *_, **__: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_, **__: torch.device("cpu"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda _: None)
    options = {"pin_memory": True, **CASES["fork"]}
    threads = torch.get_num_threads()
    plain, pinned = batches(**options)
    with shadowrun.compare("cpu[threads=1]", slow_ratio=1e9) as run:
        observed, made = batches(**options)
    assert same(plain, observed)
    assert torch.get_num_threads() == threads
    assert all(batch.pinned_by not in ("", threading.current_thread().name) for batch in (*pinned, *made))
    clones = [r for r in run.records(op="aten::clone") if "pin_memory" in r.call.site]
    assert len(clones) == 2 * len(made), "pinned once in the program, on a thread that is followed"
    assert not run.findings()
