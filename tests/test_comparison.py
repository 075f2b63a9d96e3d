"""`compare()`: its three uses, what it selects, what it does with exceptions, and that it leaves no trace."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shadowrun
from shadowrun import Cause, Phase, Status, UsageError
from shadowrun.replay.paths import native_handler, same_device


def only(records):
    (record,) = records
    return record


def test_context_manager_decorator_and_object_record_alike():
    def work():
        return torch.ones(3) + 1

    with shadowrun.compare("cpu") as run:
        work()
    assert [r.call.op for r in run.records()] == ["aten::ones", "aten::add.Tensor"]

    decorated = shadowrun.compare("cpu")(work)
    decorated()
    decorated()
    steps = [r.call.step for r in decorated.run.records() if r.call.op == "aten::add.Tensor"]
    assert steps == [0, 1], "each call of a decorated function is a step"

    run = shadowrun.compare("cpu")
    run.start()
    work()
    run.stop()
    work()
    assert [r.call.op for r in run.records()].count("aten::add.Tensor") == 1


def test_a_decorated_loop_counts_its_own_steps():
    run = shadowrun.compare("cpu")

    @run
    def loop():
        for _ in range(3):
            torch.ones(2).mul(2)
            run.step()

    loop()
    assert [r.call.step for r in run.records(op="aten::mul*")] == [0, 1, 2]


def test_starting_again_adds_up():
    run = shadowrun.compare("cpu")
    for _ in range(2):
        with run:
            torch.ones(2).neg()
    assert [r.call.op for r in run.records()].count("aten::neg") == 2


def test_nesting_says_why_not():
    with shadowrun.compare("cpu"), pytest.raises(shadowrun.NestingError, match=r"cpu against cpu.*cannot be nested"):
        shadowrun.compare("cpu[threads=1]").start()
    with shadowrun.compare("cpu"):
        assert shadowrun.current() is not None
    assert shadowrun.current() is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"on_unsuported": "raise"}, "no option 'on_unsuported'. Did you mean 'on_unsupported'"),
        ({"on_unsupported": "ignore"}, "on_unsupported='ignore': use one of 'fallback', 'raise'"),
        ({"rtol": 1e-3}, "rtol and atol together"),
        ({"rtol": -1.0, "atol": 0.0}, "rtol=-1.0: use a finite number"),
        ({"schedule": 3}, "schedule=3 is not callable"),
        ({"steps": "first"}, "steps='first'"),
        ({"ops": []}, r"ops=\[\]"),
        ({"max_records": 0}, "max_records=0"),
    ],
)
def test_wrong_options_are_named(options, text):
    with pytest.raises(UsageError, match=text):
        shadowrun.compare("cpu", **options)


def test_a_forgotten_platform_and_a_generator_are_refused():
    with pytest.raises(TypeError, match="Name the target platform"):
        shadowrun.compare(lambda: None)

    def batches():
        yield 1

    with pytest.raises(TypeError, match="coroutine or generator"):
        shadowrun.compare("cpu")(batches)


def test_schedule_steps_ops_and_modules_select():
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=1)
    with shadowrun.compare("cpu", schedule=schedule) as run:
        for _ in range(5):
            torch.ones(2).neg()
            run.step()
    assert {r.call.step for r in run.records(op="aten::neg", status=Status.MATCH)} == {2}
    assert run.counts()[Status.SKIPPED] >= 4

    with shadowrun.compare("cpu", ops="aten::neg") as run:
        torch.ones(2).neg().exp()
    assert {r.call.op for r in run.records(status=Status.MATCH)} == {"aten::neg"}

    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with shadowrun.compare("cpu", modules="*.1") as run:
        model(torch.ones(1, 2))
    assert {r.call.op for r in run.records(status=Status.MATCH)} == {"aten::relu"}


def test_every_call_has_a_place():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    x = torch.ones(2, 4)
    with shadowrun.compare("cpu") as run:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
    by_op = {}
    for record in run.records():
        by_op.setdefault(record.call.op, record.call)
    assert by_op["aten::addmm"].module == "Sequential.0"
    assert by_op["aten::addmm"].phase is Phase.FORWARD
    assert by_op["aten::threshold_backward"].module == "Sequential.1"
    assert by_op["aten::threshold_backward"].phase is Phase.BACKWARD
    assert by_op["aten::add_.Tensor"].phase is Phase.OPTIMIZER
    line = by_op["aten::addmm"].site
    assert "test_comparison.py" in line
    assert line.endswith("in test_every_call_has_a_place")
    assert by_op["aten::threshold_backward"].site == line, "backward carries the line of its forward call"


def test_an_exception_of_the_program_passes_and_the_records_stay():
    with pytest.raises(ZeroDivisionError), shadowrun.compare("cpu") as run:
        torch.ones(2).neg()
        raise ZeroDivisionError
    assert run.counts()[Status.MATCH] >= 1
    assert shadowrun.current() is None

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied") as plain:
        torch.ones(2, 3) @ torch.ones(2, 3)
    with pytest.raises(RuntimeError) as compared, shadowrun.compare("cpu[threads=1]"):
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert str(compared.value) == str(plain.value)
    assert type(compared.value) is type(plain.value)


def test_an_interrupt_passes_and_the_report_stands():
    with pytest.raises(KeyboardInterrupt), shadowrun.compare("cpu") as run:
        torch.ones(2).neg()
        raise KeyboardInterrupt
    assert [r.call.op for r in run.records()].count("aten::neg") == 1


def test_a_failure_of_ours_is_a_record_and_one_warning(monkeypatch):
    def broken(*_):
        raise OSError("planted")

    ones = torch.ones(2)
    monkeypatch.setattr(same_device, "with_isolated_warnings", broken)
    monkeypatch.setattr(native_handler, "_replay", broken)
    expected = pytest.warns(shadowrun.ShadowrunWarning, match=r"planted.*Your program continues unchanged")
    with expected as warned, shadowrun.compare("cpu") as run:
        result = ones.neg().neg()
    assert result.tolist() == [1.0, 1.0]
    assert len(warned) == 1
    failures = [r for r in run.records() if r.verdict.status is Status.ERROR]
    assert len(failures) == 2, [r.call.op for r in failures]
    assert all(r.verdict.cause is Cause.HARNESS for r in failures)
    assert run.findings() == []


def test_nothing_of_torch_stays_changed(clean_sim):
    import warnings

    before = (nn.Module.__call__, warnings._showwarnmsg, torch._C._len_torch_dispatch_stack())
    with shadowrun.compare("sim"):
        nn.Linear(2, 2)(torch.ones(1, 2))
        assert nn.Module.__call__ is not before[0]
    assert (nn.Module.__call__, warnings._showwarnmsg, torch._C._len_torch_dispatch_stack()) == before


def test_tensors_of_the_program_die_when_they_would():
    gc.collect()
    gc.disable()
    try:
        with shadowrun.compare("cpu[threads=1]", ref="cpu"):
            x = torch.randn(64, 300, requires_grad=True)
            y = F.softmax(x @ torch.randn(300, 64), dim=0).sum()
            hidden = weakref.ref(x)
            y.backward()
            value = weakref.ref(y)
            del x, y
            assert value() is None
            assert hidden() is None
    finally:
        gc.enable()


def test_gradients_are_stolen_as_without_us():
    """AccumulateGrad clones a gradient that has another reference: then one more operator would run."""
    conv = nn.Conv2d(3, 16, 3, padding=1)
    x = torch.randn(16, 3, 32, 32)
    for target in ("cpu", "cpu[mkldnn=off]"):
        conv.zero_grad()
        with shadowrun.compare(target, ref="cpu") as run:
            conv(x).square().mean().backward()
        assert not {"aten::copy_", "aten::clone"} & {r.call.op for r in run.records()}, target


def test_custom_operators_run_once_unless_named():
    calls = []

    @torch.library.custom_op("shadowrun_test::count", mutates_args=())
    def count(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x + 1

    with shadowrun.compare("cpu") as run:
        count(torch.ones(2))
    assert len(calls) == 1
    record = only(run.records(op="shadowrun_test::*"))
    assert record.verdict.status is Status.UNVERIFIED
    assert "side effects" in record.verdict.explanation
    with shadowrun.compare("cpu", ops="shadowrun_test::*", slow_ratio=1e9) as run:
        count(torch.ones(2))
    assert len(calls) == 4  # the program's, its replay, and once more on guarded copies for memory effects
    assert only(run.records(op="shadowrun_test::*")).verdict.status is Status.MATCH


def test_calls_beyond_the_budget_are_unverified():
    with shadowrun.compare("cpu", max_bytes=100) as run:
        x = torch.ones(100)
        x.add_(1)
        x[:10].mul_(2)
    assert x[0] == 4
    assert x[99] == 2
    by_op = {r.call.op: r.verdict for r in run.records()}
    assert by_op["aten::add_.Tensor"].status is Status.UNVERIFIED
    assert "budget" in by_op["aten::add_.Tensor"].explanation
    assert by_op["aten::mul_.Tensor"].status is Status.MATCH


def test_random_streams_stay_and_draws_are_compared():
    def draw():
        torch.manual_seed(3)
        generator = torch.Generator().manual_seed(5)
        values = [torch.randn(5), torch.rand(5, generator=generator), torch.ones(50).bernoulli_(0.3), torch.randperm(9)]
        return [*values, F.dropout(torch.ones(40), 0.5), torch.get_rng_state(), generator.get_state()]

    plain = draw()
    with shadowrun.compare("cpu[threads=1]", ref="cpu") as run:
        compared = draw()
    assert all(torch.equal(a, b) for a, b in zip(plain, compared, strict=True))
    assert run.counts()[Status.MATCH] >= 5
    assert run.counts()[Status.MISMATCH] == 0


def test_inference_mode_is_seen_operator_by_operator():
    model = nn.Linear(3, 3)
    with torch.inference_mode(), shadowrun.compare("cpu") as run:
        result = model(torch.ones(2, 3))
    with torch.inference_mode():
        assert torch.equal(result, model(torch.ones(2, 3)))
    assert "aten::addmm" in {r.call.op for r in run.records()}


def test_aliasing_arguments_are_replayed_as_they_are():
    def work():
        x = torch.arange(6.0)
        x.add_(x)
        y = x.as_strided((3, 2), (1, 1))
        x[1:].copy_(x[:-1].clone())
        torch.sum(x.expand(4, 6), 0, out=x[:6].clone())
        torch._foreach_add_([x[:3], x[3:]], [x[3:].clone(), x[:3].clone()])
        return x, y.contiguous()

    plain = work()
    with shadowrun.compare("cpu") as run:
        compared = work()
    assert all(torch.equal(a, b) for a, b in zip(plain, compared, strict=True))
    assert {s for s, n in run.counts().items() if n} <= {Status.MATCH, Status.SKIPPED}


def test_overlapping_memory_raises_the_program_s_own_error():
    x = torch.zeros(1).expand(3)
    with pytest.raises(RuntimeError, match="more than one element of the written-to tensor") as plain:
        x.add_(1)
    with pytest.raises(RuntimeError) as compared, shadowrun.compare("cpu[threads=1]"):
        x.add_(1)
    assert str(compared.value) == str(plain.value)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_odd_tensors_are_counted_and_break_nothing():
    with shadowrun.compare("cpu[threads=1]", ref="cpu") as run:
        sparse = torch.eye(3).to_sparse()
        total = (sparse @ torch.ones(3, 2)).sum()
        quantized = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8).dequantize()
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)
        summed = (nested * 2).values().sum()
        z = torch.zeros(2, requires_grad=True)
        (gradient,) = torch.autograd.grad(z.sgn().sum(), z)
        conj = (torch.ones(2, dtype=torch.complex64) * 1j).conj() + 1
        empty = torch.empty(0, 3).sum(0)
    assert (total, quantized.sum(), summed) == (6, 4, 10)
    assert gradient._is_zerotensor(), "as without us"
    assert conj.tolist() == [1 - 1j, 1 - 1j]
    assert empty.tolist() == [0, 0, 0]
    assert run.counts()[Status.MISMATCH] == run.counts()[Status.ERROR] == 0


def test_drift_is_recorded_in_addition_to_the_isolated_error():
    torch.manual_seed(0)
    with shadowrun.compare("cpu[mkldnn=off]", ref="cpu", drift=True) as run:
        x = torch.randn(4, 8, 16, 16)
        for _ in range(3):
            x = F.conv2d(x, torch.full((8, 8, 3, 3), 0.01), padding=1).tanh()
    # The program runs on the reference, so it is the target's chain that drifts.
    assert 0 < max(r.drift_rel for r in run.records()) < 1e-4


def test_drift_grows_where_the_target_is_wrong(clean_sim):
    with clean_sim.flaws("matmul-in-bf16"), shadowrun.compare("sim", drift=True) as run:
        x = torch.randn(8, 8).to("sim")
        for _ in range(4):
            x = x @ torch.eye(8).to("sim") + 1
    drifts = [r.drift_abs for r in run.records(op="aten::mm")]
    isolated = [max(d.max_abs for d in r.diffs) for r in run.records(op="aten::mm") if r.diffs]
    assert len(drifts) == 4
    assert drifts[0] == pytest.approx(isolated[0])
    assert drifts[-1] > 0
    assert [r.drift_abs for r in run.records(op="aten::add.Tensor")][-1] > 0, "the error lives on in right operators"


def test_the_reports_say_what_the_run_cost():
    with shadowrun.compare("cpu") as run:
        for _ in range(50):
            torch.ones(10).exp()
    assert 0 < run.info.own_s < run.info.wall_s
    assert "same platform" in run.info.notes[0]


def test_memory_does_not_grow_with_steps():
    model = nn.Linear(4, 4)
    x = torch.ones(2, 4)
    with shadowrun.compare("cpu", max_records=100) as run:
        sizes = []
        for _ in range(30):
            model(x).sum().backward()
            run.step()
            sizes.append(len(run._attribution._links) + len(run._recorder._contexts))
    assert sizes[-1] == sizes[2], "forward calls of used graphs are forgotten"
    assert len(list(run.records())) < 300
    assert sum(s.n_calls for s in run.summary()) > 200, "what was folded is still counted"


def test_a_full_disk_ends_the_recording_and_not_the_program(tmp_path):
    run = shadowrun.compare("cpu", file=tmp_path / "run.shadowrun").start()
    pages = run._data.connection.execute("pragma page_count").fetchone()[0]
    run._data.connection.execute(f"pragma max_page_count = {pages + 2}")
    x = torch.zeros(3)
    for _ in range(5000):
        x.add_(1)
    with pytest.warns(shadowrun.ShadowrunWarning, match=r"could not record everything.*full.*not affected"):
        run.stop()
    assert x.tolist() == [5000] * 3
    assert any("recording ended early" in note for note in run.info.notes)


@pytest.mark.parametrize("ended", [True, False], ids=["ended", "running"])
@pytest.mark.parametrize("in_file", [True, False], ids=["file", "memory"])
@pytest.mark.parametrize(("name", "n_reads"), [("x.txt", 1), ("x.json", 1), ("x.html", 1)])
def test_a_report_reads_the_calls_once(clean_sim, tmp_path, ended, in_file, name, n_reads):
    """Though what the run is, is written again before each of its parts, and HTML has pictures of calls in order."""
    seen = []
    with shadowrun.compare("sim", file=tmp_path / "x.shadowrun" if in_file else None) as run:
        for _ in range(100):
            torch.sin(torch.ones(2))
        if not ended:
            run._data.connection.set_trace_callback(seen.append)
            run.write(tmp_path / name)
            run._data.connection.set_trace_callback(None)
    if ended:
        run._data.connection.set_trace_callback(seen.append)
        run.write(tmp_path / name)
        run._data.connection.set_trace_callback(None)
    assert sum("select seq, step, context_id" in sql for sql in seen) == n_reads


def test_a_report_of_a_run_that_goes_on_has_what_came_since(clean_sim):
    ones = torch.ones(2)
    with shadowrun.compare("sim") as run:
        torch.sin(ones)
        before = run.counts()[Status.MATCH]
        torch.sin(ones)
        assert (before, run.counts()[Status.MATCH]) == (1, 2)
