"""What `shadowrun.record` writes: rows, data-flow parents, provenance; and what it leaves alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
import torch

import shadowrun
from shadowrun.recording.call_results import CallInputs
from shadowrun.recording.digests.tensor_digest import digest, pack
from shadowrun.recording.file_format.recording_file import read
from shadowrun.recording.model import Kind
from tests.models import assert_same, digits, tokens, train

pytestmark = pytest.mark.usefixtures("forked_processes")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "a.shadowrec"


def ops(recording):
    return [key.op for key in recording.call_keys()]


def call_of(recording, op, occurrence=0):
    return [c for c, key in enumerate(recording.call_keys()) if key.op == op][occurrence]


def results_of(recording, op, occurrence=0):
    return list(recording.results_of(call_of(recording, op, occurrence)))


def inputs_of(recording, op, occurrence=0):
    return recording.inputs_of(call_of(recording, op, occurrence)).tolist()


def kinds_of(recording, op, occurrence=0):
    return [Kind(recording.results["kind"][row]) for row in results_of(recording, op, occurrence)]


# -- rows ------------------------------------------------------------------------------------------


def test_inputs_are_the_rows_of_what_made_them(path):
    a, b = torch.rand(3, 4), torch.rand(4, 5)
    with shadowrun.record(path):
        c = a @ b
        d = c.t() + 1
    r = read(path)
    assert ops(r) == ["aten::mm", "aten::t", "aten::add.Tensor"]
    assert kinds_of(r, "aten::mm") == [Kind.LEAF, Kind.LEAF, Kind.RESULT]
    leaf_a, leaf_b, product = results_of(r, "aten::mm")
    assert inputs_of(r, "aten::mm") == [leaf_a, leaf_b]
    (view,) = results_of(r, "aten::t")
    assert (inputs_of(r, "aten::t"), r.source(view)) == ([product], product)
    assert inputs_of(r, "aten::add.Tensor") == [view]
    for row, tensor in ((leaf_a, a), (leaf_b, b), (product, c), (view, c), (results_of(r, "aten::add.Tensor")[0], d)):
        assert r.ladder(row).tolist() == digest(tensor).rungs.tolist()
        assert r.samples_of(row).tolist() == digest(tensor).samples.tolist()
    assert r.form_of(view).shape == (5, 3)


def test_a_written_argument_is_a_row_and_the_parent_of_what_reads_it(path):
    with shadowrun.record(path):
        x = torch.ones(4)
        x.add_(1)
        y = x * 2
    r = read(path)
    assert kinds_of(r, "aten::add_.Tensor") == [Kind.WRITTEN]
    (written,) = results_of(r, "aten::add_.Tensor")
    assert inputs_of(r, "aten::add_.Tensor") == results_of(r, "aten::ones")
    assert inputs_of(r, "aten::mul.Tensor") == [written]
    assert r.ladder(written).tolist() == digest(x).rungs.tolist()
    assert r.ladder(results_of(r, "aten::mul.Tensor")[0]).tolist() == digest(y).rungs.tolist()


def test_where_a_part_is_written_the_row_names_the_rest(path):
    with shadowrun.record(path):
        x = torch.zeros(4, 4)
        x[1].fill_(2)
        x + 1
        x.mul_(2)
    r = read(path)
    (zeros,), (part,) = results_of(r, "aten::zeros"), results_of(r, "aten::fill_.Scalar")
    assert r.results["base"][part] == zeros
    assert r.form_of(part).shape == (4,)
    assert inputs_of(r, "aten::add.Tensor") == [part]
    # All of it is written now: what it was before is an input, and no part of the result.
    assert r.results["base"][results_of(r, "aten::mul_.Tensor")[0]] == -1


def test_other_parts_of_a_partly_written_leaf_are_leaves(path):
    first, last = torch.arange(8.0).split(4)
    with shadowrun.record(path):
        first.mul_(2)
        last + 1
    r = read(path)
    assert kinds_of(r, "aten::add.Tensor") == [Kind.LEAF, Kind.RESULT]
    assert r.ladder(inputs_of(r, "aten::add.Tensor")[0]).tolist() == digest(last).rungs.tolist()


def test_out_is_written_and_not_read(path):
    a, out = torch.rand(3, 3), torch.empty(3, 3)
    with shadowrun.record(path):
        torch.mm(a, a, out=out)
        out + 1
    r = read(path)
    assert kinds_of(r, "aten::mm.out") == [Kind.LEAF, Kind.WRITTEN]
    assert inputs_of(r, "aten::mm.out") == [results_of(r, "aten::mm.out")[0]] * 2
    assert inputs_of(r, "aten::add.Tensor") == [results_of(r, "aten::mm.out")[1]]


def test_uninitialised_memory_has_a_form_and_no_digest(path):
    with shadowrun.record(path):
        torch.empty(7).fill_(1)
    r = read(path)
    (empty,) = results_of(r, "aten::empty.memory_format")
    assert (r.results["n_rungs"][empty], r.form_of(empty).shape) == (0, (7,))
    assert len(r.ladder(results_of(r, "aten::fill_.Scalar")[0])) == 24


def test_a_number_has_the_values_of_its_tensor(path):
    with shadowrun.record(path):
        total = torch.ones(3).sum()
        assert total.item() == 3
        assert torch.equal(total, total)
    r = read(path)
    assert inputs_of(r, "aten::_local_scalar_dense") == results_of(r, "aten::sum")
    (item,) = results_of(r, "aten::_local_scalar_dense")
    assert r.source(item) == results_of(r, "aten::sum")[0]
    (equal,) = results_of(r, "aten::equal")
    assert (r.form_of(equal).dtype, r.results["max"][equal]) == ("bool", 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64])
def test_dtypes(path, dtype):
    x = torch.arange(12).to(dtype).reshape(3, 4)
    with shadowrun.record(path):
        y = x + x
    r = read(path)
    _, row = results_of(r, "aten::add.Tensor")
    assert r.form_of(row).dtype == str(dtype).removeprefix("torch.")
    assert r.ladder(row).tolist() == digest(y).rungs.tolist()


def test_layouts_without_plain_values_have_a_form(path):
    x = torch.eye(3).to_sparse()
    with warnings.catch_warnings(), shadowrun.record(path) as run:
        warnings.simplefilter("ignore")
        y = x * 2
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    assert "failure of shadowrun" not in run.skipped
    assert torch.equal(y.to_dense(), 2 * torch.eye(3))
    assert "sparse_coo" in {form.layout for form in read(path).forms}


@pytest.mark.parametrize("leading", [(), (1,), (1, 1)])
def test_rows_have_ladders_of_their_own(path, leading):
    x = torch.rand(*leading, 6, 5)
    with shadowrun.record(path, rows=4):
        y = x * 2
    r = read(path)
    _, row = results_of(r, "aten::mul.Tensor")
    assert r.results["n_rows"][row] == 4
    assert r.ladder(row).tolist() == digest(y).rungs.tolist()
    ladders = r.row_rungs[r.first_row_rung[row] : r.first_row_rung[row + 1]].reshape(4, 24)
    for ladder, values in zip(ladders, y.reshape(6, 5), strict=False):
        assert ladder.tolist() == digest(values).rungs.tolist()


def test_occurrences_are_counted_for_each_step_module_and_phase(path):
    with shadowrun.record(path) as run:
        for _ in range(2):
            torch.ones(2) + 1
            torch.ones(2) + 1
            run.step()
    keys = [key for key in read(path).call_keys() if key.op == "aten::ones"]
    assert [(key.step, key.occurrence) for key in keys] == [(0, 0), (0, 1), (1, 0), (1, 1)]


def test_equal_numbers_of_other_kinds_are_other_arguments(path):
    with shadowrun.record(path):
        x = torch.ones(2)
        for number in (0.0, -0.0, float("nan"), float("inf")):
            torch.full((2,), number)
        x.sum(0), x.argmax(0, True)
    r = read(path)
    texts = [r.context_of(c).arguments for c, op in enumerate(ops(r)) if op == "aten::full"]
    assert len(set(texts)) == 4


def test_a_step_that_is_not_selected_is_counted(path):
    with shadowrun.record(path, steps=1) as run:
        for _ in range(3):
            torch.ones(2).add_(1)
            run.step()
    assert {key.step for key in read(path).call_keys()} == {1}
    assert run.skipped == {"step not selected": 4}
    assert read(path).processes[0].options == {"steps": [1]}


def test_what_an_unrecorded_call_wrote_to_is_a_leaf(path):
    x = torch.ones(3)
    with shadowrun.record(path, ops="aten::mul*"):
        x * 2
        x.add_(1)
        x * 2
    r = read(path)
    assert kinds_of(r, "aten::mul.Tensor", 1) == [Kind.LEAF, Kind.RESULT]
    assert r.ladder(inputs_of(r, "aten::mul.Tensor", 1)[0]).tolist() == digest(x).rungs.tolist()


@pytest.fixture
def true_inputs(monkeypatch):
    """For each recorded call, ladders and shapes of its inputs as they are."""
    seen = []
    original = CallInputs.note

    def note(self, noted, a, form):
        if isinstance(a, torch.Tensor):
            known = digest(a)
            seen.append((tuple(a.shape), None if known is None else known.rungs.tolist()))
        original(self, noted, a, form)

    monkeypatch.setattr(CallInputs, "note", note)
    monkeypatch.setattr("shadowrun.recording.native_calls.core", None)  # test_native_rows.py holds C against this
    return seen


@pytest.mark.parametrize("make", [digits, tokens])
@pytest.mark.parametrize("flags", [{}, {"foreach": True}, {"fused": True}])
def test_each_input_has_the_digest_of_its_row(path, true_inputs, make, flags):
    torch.manual_seed(0)
    model, _, loss_of = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **flags)
    with shadowrun.record(path) as run:
        for _ in range(3):
            optimizer.zero_grad()
            loss_of().backward()
            optimizer.step()
    r = read(path)
    assert len(true_inputs) == len(r.inputs)
    checked = 0
    for row, (shape, ladder) in zip(r.inputs.tolist(), true_inputs, strict=True):
        assert row != -1
        is_whole = r.results["kind"][row] != Kind.VIEW and r.results["base"][row] == -1
        if is_whole and r.form_of(row).shape == shape and r.results["n_rungs"][row]:
            checked += 1
            assert r.ladder(row).tolist() == ladder
    assert checked > len(true_inputs) / 2
    assert "failure of shadowrun" not in run.skipped


def test_an_address_that_comes_again_is_another_tensor(path, true_inputs):
    with shadowrun.record(path):
        for i in range(300):
            x = torch.from_numpy(np.full(1000, i, np.float32))  # a leaf, freed in each round
            x * 2
    r = read(path)
    assert [r.ladder(row).tolist() for row in r.inputs.tolist()] == [ladder for _, ladder in true_inputs]


# -- provenance ------------------------------------------------------------------------------------


def provenance_of(path, seed=0, change=None, scale=1.0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    if change is not None:
        with torch.no_grad():
            change(model)
    x = torch.linspace(0, scale, 15).reshape(5, 3)
    with shadowrun.record(path):
        model(x)
        torch.rand(2)
    return read(path).processes[0].provenance


def test_provenance_names_what_the_program_brought(path, monkeypatch):
    main = sys.modules["__main__"]
    monkeypatch.setattr(main, "__file__", __file__, raising=False)  # a worker of pytest-xdist has no script
    first = provenance_of(path)
    names = {f"parameter:Sequential.{name}" for name in ("0.weight", "0.bias", "1.weight", "1.bias")}
    names |= {f"buffer:Sequential.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert {name for name in first if name.startswith(("parameter", "buffer", "input"))} == {*names, "input:0"}
    assert {"script", "argv", "version:torch", "version:numpy", "version:python", "generator:cpu"} <= first.keys()
    assert provenance_of(path) == first


@pytest.mark.parametrize(
    ("changes", "changed"),
    [
        ({"change": lambda model: model[0].bias.add_(1)}, {"parameter:Sequential.0.bias"}),
        ({"change": lambda model: model[1].running_var.mul_(2)}, {"buffer:Sequential.1.running_var"}),
        ({"scale": 2.0}, {"input:0"}),
        (
            {"seed": 1},
            {"generator:cpu", "parameter:Sequential.0.weight", "parameter:Sequential.0.bias"},
        ),
    ],
)
def test_what_differs_is_named(path, changes, changed):
    first, second = provenance_of(path), provenance_of(path, **changes)
    assert {name for name in first if first[name] != second[name]} == changed


def test_the_fingerprint_has_the_flags_of_the_processor(path):
    provenance_of(path)
    facts = read(path).processes[0].fingerprint
    assert (facts["device"], facts["cores"]) == ("cpu", os.cpu_count())
    assert facts["cpu_flag_list"] == sorted(facts["cpu_flag_list"])


def test_the_fingerprint_is_that_of_the_device_where_the_tensors_live(path, clean_sim):
    with shadowrun.record(path):
        torch.ones(3, device="sim") + torch.ones(3, device="sim")
    process = read(path).processes[0]
    assert process.fingerprint["device"] == "sim"
    assert read(path).contexts[-1].device == "sim"


def draw(kind):
    """Draws of a program that seeds its generator itself, after the recording began."""
    if kind == "seeded":
        torch.manual_seed(7)
        return torch.randn(3)
    if kind == "own generator":
        return torch.randn(3, generator=torch.Generator().manual_seed(7))
    if kind == "attention":
        return torch.nn.functional.scaled_dot_product_attention(*[torch.ones(1, 1, 4, 4)] * 3)
    return torch.nn.functional.dropout(torch.ones(99), 0.5)


@pytest.mark.parametrize(
    ("kind", "has_state", "is_same"),
    [("seeded", True, True), ("own generator", False, True), ("attention", False, True), ("unseeded", True, False)],
)
def test_the_state_of_a_generator_is_that_before_the_first_draw(path, kind, has_state, is_same):
    states = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        with shadowrun.record(path):
            draw(kind)
            torch.manual_seed(seed)
            if has_state:
                torch.rand(3)  # not the first one
        states.append({n: d for n, d in read(path).processes[0].provenance.items() if n.startswith("generator")})
    assert list(states[0]) == (["generator:cpu"] if has_state else [])
    assert (states[0] == states[1]) is is_same


def test_each_device_has_the_state_of_its_generator(path, clean_sim):
    with shadowrun.record(path):
        torch.rand(3)
        torch.rand(3, device="sim")
    assert {"generator:cpu", "generator:sim:0"} <= read(path).processes[0].provenance.keys()


# -- the program is left alone ---------------------------------------------------------------------


@pytest.mark.parametrize("make", [digits, tokens])
@pytest.mark.parametrize("device", ["cpu", "sim"])
def test_training_is_unchanged(path, clean_sim, make, device):
    run = shadowrun.record(path)
    assert_same(train(make, device, steps=5, run=run), train(make, device, steps=5))
    assert run.n_calls > 200
    assert read(path).processes[0].complete


def test_an_exception_of_the_program_is_its_own_and_the_recording_ends(path):
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as caught, shadowrun.record(path) as run:
        torch.ones(2, 3) @ torch.ones(2, 3)
    with pytest.raises(RuntimeError) as plain:
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert str(caught.value) == str(plain.value)
    assert run.skipped == {"raised": 1}
    assert ops(read(path)) == ["aten::ones", "aten::ones"]
    assert read(path).processes[0].complete


def test_a_failure_of_ours_is_one_warning(path, monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("shadowrun.recording.call_results.digest_when_settled", broken)
    with warnings.catch_warnings(record=True) as warned, shadowrun.record(path) as run:
        warnings.simplefilter("always")
        x = torch.ones(3) + torch.ones(3)
        y = x.t()
    assert ["ours" in str(w.message) for w in warned] == [True]
    assert warned[0].category is shadowrun.ShadowrunWarning
    assert torch.equal(y, torch.full((3,), 2.0))
    assert run.skipped["failure of shadowrun"] >= 3
    assert "aten::add.Tensor" not in ops(read(path))


def test_a_file_that_cannot_be_written_ends_the_recording(path, monkeypatch):
    from shadowrun.recording.file_format.recording_writer import Writer

    def full(*_):
        raise OSError("no space left")

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with shadowrun.record(path) as run:
            monkeypatch.setattr(Writer, "block", full)
            x = torch.zeros(3)
            for _ in range(2500):
                x += 1
    assert x.tolist() == [2500.0] * 3
    assert {"no space left" in str(w.message) for w in warned if w.category is shadowrun.ShadowrunWarning} == {True}
    assert run.n_calls <= 2500


def test_an_interrupt_in_the_middle_of_a_call_leaves_whole_calls(path, monkeypatch):
    calls = []

    def interrupted(t, n_rows, _):
        calls.append(None)  # to hold the tensor would change what torch does with it
        if len(calls) == 4:
            raise KeyboardInterrupt
        return pack(t, n_rows)

    monkeypatch.setattr("shadowrun.recording.call_results.digest_when_settled", interrupted)
    with pytest.raises(KeyboardInterrupt), shadowrun.record(path):
        for _ in range(3):
            torch.ones(3).topk(2)
    r = read(path)
    assert ops(r) == ["aten::ones", "aten::topk"]  # the second `ones` was interrupted


def test_recordings_and_comparisons_cannot_be_nested(path, tmp_path):
    with shadowrun.record(path):
        with pytest.raises(shadowrun.NestingError, match="A recording"), shadowrun.compare("cpu"):
            pass
        with pytest.raises(shadowrun.NestingError), shadowrun.record(tmp_path / "b.shadowrec"):
            pass
        torch.ones(2)
    assert ops(read(path)) == ["aten::ones"]
    with shadowrun.compare("cpu"), pytest.raises(shadowrun.NestingError, match="cpu against cpu"):
        shadowrun.record(path).start()


def test_it_can_be_started_again(path):
    run = shadowrun.record(path)
    with run:
        torch.ones(2)
    first = read(path)
    torch.zeros(2)
    with run:
        torch.ones(2) + 1
    assert ops(first) == ["aten::ones"]
    assert ops(read(path)) == ["aten::ones", "aten::ones", "aten::add.Tensor"]


def test_a_decorated_function_is_a_step(path):
    @shadowrun.record(path)
    def double(x):
        return x * 2

    assert [double(torch.ones(1)).item() for _ in range(3)] == [2, 2, 2]
    assert [(key.step, key.op) for key in read(path).call_keys()] == [(i, "aten::mul.Tensor") for i in range(3)]


def test_threads_are_recorded(path):
    with shadowrun.record(path):
        threads = [threading.Thread(target=lambda: [torch.ones(5) + 1 for _ in range(50)]) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    r = read(path)
    assert ops(r).count("aten::add.Tensor") == 200
    for c, op in enumerate(ops(r)):
        if op == "aten::add.Tensor":
            (row,) = r.inputs_of(c).tolist()
            assert r.results["kind"][row] == Kind.RESULT


class Batches(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.full((2,), float(i)).sin()


def test_workers_of_a_loader_are_other_programs(path):
    with shadowrun.record(path):
        loader = torch.utils.data.DataLoader(Batches(), batch_size=4, num_workers=2)
        totals = [batch.sum().item() for batch in loader]
    plain = [batch.sum().item() for batch in torch.utils.data.DataLoader(Batches(), batch_size=4)]
    assert totals == plain
    r = read(path)
    assert ops(r).count("aten::sum") == 2
    assert "aten::sin" not in ops(r)


PROGRAM = """
import os, sys, signal, torch, shadowrun
"""


def run_program(tmp_path, body, *arguments):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM + body)
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
    )


def test_a_killed_process_leaves_its_blocks(tmp_path):
    body = """
x = torch.zeros(3)
with shadowrun.record("a.shadowrec"):
    for _ in range(4100):
        x += 1
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert run_program(tmp_path, body).returncode == -signal.SIGKILL
    r = read(tmp_path / "a.shadowrec")
    assert 2000 <= len(r.calls) <= 4100
    assert not r.processes[0].complete
    assert "input:0" in r.processes[0].provenance


def test_a_forked_child_leaves_the_recording_alone(tmp_path):
    body = """
run = shadowrun.record("a.shadowrec")
with run:
    torch.ones(2)
    pid = os.fork()
    if not pid:
        torch.zeros(2)
        assert shadowrun.current() is None
        run.stop()
        with run:  # its own file
            torch.full((2,), 3)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    torch.ones(2) + 1
"""
    done = run_program(tmp_path, body)
    assert (done.returncode, done.stderr) == (0, "")
    assert ops(read(tmp_path / "a.shadowrec")) == ["aten::ones", "aten::ones", "aten::add.Tensor"]
    (other,) = (p for p in tmp_path.glob("*.shadowrec") if p.name != "a.shadowrec")
    assert ops(read(other)) == ["aten::full"]


def test_many_steps_take_bounded_memory(new_processes, tmp_path):
    body = """
import resource
x, w = torch.rand(4, 4), torch.rand(4, 4, requires_grad=True)
def steps(n, run):
    for i in range(n):
        loss = (x @ w).sin().sum()
        loss.backward()
        with torch.no_grad():
            w.sub_(w.grad, alpha=1 / (i + 1))
        w.grad = None
        run.step()
with shadowrun.record("a.shadowrec") as run:
    steps(1000, run)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    steps(9000, run)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    done = run_program(tmp_path, body)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 20_000  # KiB
    assert set(read(tmp_path / "a.shadowrec").calls["step"].tolist()) == set(range(10_000))


def test_compiled_code_is_recorded_where_it_calls_operators_and_nothing_is_stale(tmp_path):
    body = """
from shadowrun.recording.call_results import CallInputs
from shadowrun.recording.digests.tensor_digest import digest
from shadowrun.recording.file_format.recording_file import read
from pathlib import Path
seen, note = [], CallInputs.note
def noting(self, noted, a, form):
    if isinstance(a, torch.Tensor):
        seen.append(digest(a).rungs.tolist())
    note(self, noted, a, form)
CallInputs.note = noting
import shadowrun.recording.native_calls as native_calls
native_calls.core = None
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))
compiled, x = torch.compile(lambda x: net(x).sin().sum()), torch.randn(3, 8)
def step():
    net.zero_grad()
    loss = compiled(x)
    loss.backward()
    return [loss.detach(), *(p.grad for p in net.parameters())]
step()
plain = step()
with shadowrun.record("a.shadowrec"):
    first, second = step(), step()
for got in (first, second):
    assert all(torch.equal(a, b) for a, b in zip(got, plain))
r = read(Path("a.shadowrec"))
assert len(seen) == len(r.inputs) > 20
assert [r.ladder(row).tolist() for row in r.inputs.tolist()] == seen
"""
    done = run_program(tmp_path, body)
    assert done.returncode == 0, done.stderr


def test_parents_are_known_around_compiled_code(tmp_path):
    body = """
from pathlib import Path
from shadowrun.recording.digests.tensor_digest import digest
from shadowrun.recording.model import Kind
from shadowrun.recording.file_format.recording_file import read
def compiled_part(x, state):
    state.add_(1)
    return (x @ x).sin() * state
def chain():
    a = torch.ones(3)
    return (a + 1) * 2
x, state = torch.randn(4, 4), torch.zeros(4)
with shadowrun.record("a.shadowrec"):  # Inductor is imported inside
    compiled = torch.compile(compiled_part)
    state * 2
    out = compiled(x, state)
    state * 2
    out + 1
    out + 2
    chain()
r = read(Path("a.shadowrec"))
calls = [(key.op, r.inputs_of(c).tolist(), list(r.results_of(c))) for c, key in enumerate(r.call_keys())]
muls = [call for call in calls if call[0] == "aten::mul.Tensor"]
adds = [call for call in calls if call[0] == "aten::add.Tensor"]
# What compiled code has written to is read anew.
assert r.results["kind"][muls[1][1][0]] == Kind.LEAF
assert r.ladder(muls[1][1][0]).tolist() == digest(torch.ones(4)).rungs.tolist()
# What it returned is recorded once, and is no input of the program.
assert r.results["kind"][adds[0][1][0]] == Kind.LEAF and adds[0][1] == adds[1][1]
assert r.ladder(adds[0][1][0]).tolist() == digest(out).rungs.tolist()
assert [name for name in r.processes[0].provenance if name.startswith("input:")] == ["input:0"]
# The rest is as without it.
assert adds[2][1] == [calls[-3][2][0]] and muls[2][1] == [adds[2][2][0]]
with shadowrun.record("b.shadowrec"):
    chain()
assert read(Path("b.shadowrec")).inputs.tolist() == [0, 1]
from torch._inductor.output_code import CompiledFxGraph
assert CompiledFxGraph.__call__.__code__.co_filename.endswith("output_code.py")
"""
    done = run_program(tmp_path, body)
    assert done.returncode == 0, done.stderr


# -- wrong use -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"rows": -1}, "rows=-1"),
        ({"rows": True}, "rows=True"),
        ({"steps": "x"}, "steps='x'"),
        ({"ops": "aten::mmm"}, "no operator is called so"),
        ({"drift": True}, "record\\(\\) has no option 'drift'"),
    ],
)
def test_wrong_options(path, options, said):
    with pytest.raises(shadowrun.UsageError, match=said):
        shadowrun.record(path, **options)


def test_wrong_names(tmp_path):
    with pytest.raises(shadowrun.UsageError, match="shadowrec"):
        shadowrun.record(tmp_path / "a.txt")
    with pytest.raises(TypeError, match="Name the file"):
        shadowrun.record(print)
    with pytest.raises(shadowrun.DataFileError, match="no folder"):
        shadowrun.record(tmp_path / "absent" / "a.shadowrec").start()
    assert shadowrun.current() is None
