"""One case on both platforms: what becomes of it, and what is blamed."""

import pytest
import torch

import shadowrun
from shadowrun.studies.sweep import opinfo
from shadowrun.studies.sweep.case_programs import program, varied
from shadowrun.studies.sweep.cases import Kind, Part
from shadowrun.studies.sweep.inputs import Sample
from shadowrun.studies.sweep.run_case import CaseRunner

pytestmark = pytest.mark.usefixtures("clean_sim")


class Bench:
    """Runs cases and returns their findings."""

    def __init__(self, target="sim", ref="cpu"):
        self.turns = []
        self.runner = CaseRunner(target, ref, 60.0, lambda: self.turns.append("target"))

    def run(self, part, prepare):
        return self.runner.run(part, prepare)

    def call(self, function, *inputs, part=Part.FORWARD):
        return self.run(part, program(function, part, 0, Sample(inputs[0], inputs[1:])))

    def entry(self, name, part, number=0, dtype="float32"):
        """A case of torch's database."""
        samples = opinfo.samples(name, dtype, 0, number + 1, grad=part is Part.BACKWARD)
        return self.run(part, program(opinfo.database()[name], part, number, samples[number]))


@pytest.fixture
def bench():
    return Bench()


X = torch.linspace(-2.0, 2.0, 48).reshape(6, 8)


def on(device, value, other):
    """A function that does one thing on a device and another elsewhere."""
    return lambda x, *_: value(x) if x.device.type == device else other(x)


def test_a_pass_shows_nothing(bench):
    assert bench.call(torch.exp, X) == []
    assert bench.turns == ["target"]
    for part in (Part.FORWARD, Part.BACKWARD, Part.INPLACE, Part.OUT):
        for number in range(2):
            assert bench.entry("exp", part, number) == [], part


@pytest.mark.parametrize(
    ("flaw", "name", "part", "dtype", "kind", "op", "kernel"),
    [
        ("softmax-error", "softmax", Part.FORWARD, "float32", Kind.MISMATCH, "aten::_softmax", ""),
        ("missing-cumsum", "cumsum", Part.FORWARD, "float32", Kind.UNSUPPORTED, "aten::cumsum", "aten::cumsum.out"),
        ("missing-cumsum", "cumsum", Part.OUT, "float32", Kind.UNSUPPORTED, "aten::cumsum.out", "aten::cumsum.out"),
        ("missing-cumsum", "cumsum", Part.INPLACE, "float32", Kind.UNSUPPORTED, "aten::cumsum_", "aten::cumsum.out"),
        (
            "missing-max-pool-backward", "nn.functional.max_pool2d", Part.BACKWARD, "float32", Kind.UNSUPPORTED,
            "aten::max_pool2d_with_indices_backward", "aten::max_pool2d_with_indices_backward.grad_input",
        ),
        ("argmax-int32", "argmax", Part.FORWARD, "float32", Kind.FORM, "aten::argmax", ""),
        ("topk-device-error", "topk", Part.FORWARD, "float32", Kind.ERROR, "aten::topk", ""),
        ("bincount-stays-on-cpu", "bincount", Part.FORWARD, "int64", Kind.SILENT_FALLBACK, "aten::bincount", ""),
        (
            "vector-norm-falls-back", "linalg.vector_norm", Part.FORWARD, "float32", Kind.WARNED_FALLBACK,
            "aten::linalg_vector_norm", "",
        ),
    ],
)  # fmt: skip
def test_flaws_of_the_device(bench, clean_sim, flaw, name, part, dtype, kind, op, kernel):
    clean_sim.enable(flaws=[flaw])
    found = bench.entry(name, part, dtype=dtype)
    assert [(f.kind, f.op, f.kernel) for f in found] == [(kind, op, kernel)]


@pytest.mark.parametrize("part", [Part.FORWARD, Part.STRIDED])
def test_a_dtype_that_cannot_be_made_there(bench, clean_sim, part):
    clean_sim.enable(flaws=["no-float64"])
    (found,) = bench.call(torch.exp, X.double(), part=part)
    assert (found.kind, found.op) == (Kind.UNSUPPORTED_DTYPE, "aten::_to_copy")


def test_a_forward_flaw_is_not_blamed_on_backward(bench, clean_sim):
    clean_sim.enable(flaws=["softmax-error"])
    assert bench.entry("softmax", Part.FORWARD)[0].kind is Kind.MISMATCH
    assert bench.entry("softmax", Part.BACKWARD) == []


def test_layout_matters(bench, clean_sim):
    clean_sim.enable(flaws=["leaky-relu-ignores-strides"])
    assert bench.entry("nn.functional.leaky_relu", Part.FORWARD) == []
    assert bench.entry("nn.functional.leaky_relu", Part.BACKWARD) == []
    ((number, sample),) = varied(
        opinfo.samples("nn.functional.leaky_relu", "float32", 0, 1, grad=False), Part.TRANSPOSED
    )
    entry = opinfo.database()["nn.functional.leaky_relu"]
    (found,) = bench.run(Part.TRANSPOSED, program(entry, Part.TRANSPOSED, number, sample))
    assert (found.kind, found.op) == (Kind.MISMATCH, "aten::leaky_relu")


def test_what_the_reference_refuses_is_not_counted(bench):
    def refuses(_):
        raise ValueError("no")

    assert [f.kind for f in bench.call(refuses, X)] == [Kind.HARNESS]
    assert [f.kind for f in bench.call(refuses, X, part=Part.ZERO_DIM)] == [Kind.NOT_VALID]
    assert bench.turns == []


def test_what_only_the_target_refuses_is_counted(bench):
    def vendor(_):
        raise RuntimeError("error code 561103")

    (found,) = bench.call(on("sim", vendor, torch.exp), X)
    assert (found.kind, found.explanation) == (Kind.ERROR, "RuntimeError")

    def memory(_):
        raise torch.OutOfMemoryError("out of memory")

    assert [f.kind for f in bench.call(on("sim", memory, torch.exp), X)] == [Kind.OUT_OF_MEMORY]


def test_what_raises_only_while_it_is_compared_is_not_the_targets(bench):
    def watched(x):
        if shadowrun.current() is not None:
            raise RuntimeError("a mode is in the way")
        return torch.exp(x)

    (found,) = bench.call(watched, X)
    assert (found.kind, found.message) == (Kind.HARNESS, "RuntimeError: a mode is in the way")


def test_results_as_a_whole(bench):
    """Each operator by itself is right, and together they make something else."""
    (found,) = bench.call(on("sim", torch.exp, torch.sin), X)
    assert (found.kind, found.explanation) == (Kind.MISMATCH, "as a whole")
    (found,) = bench.call(on("sim", lambda x: torch.exp(x)[:2], torch.exp), X)
    assert (found.kind, found.explanation) == (Kind.FORM, "as a whole")
    (found,) = bench.call(on("sim", lambda x: [torch.exp(x), x], torch.exp), X)
    assert found.kind is Kind.FORM


@pytest.mark.filterwarnings("ignore:.*other operators may also be overridden")
def test_statistics_in_another_precision(bench, give_sim):
    """CUDA keeps the statistics of 16-bit norms in float32: the results of the case have that dtype too."""

    def norm(x, shape, weight, bias, eps):
        out = torch.nn.functional.layer_norm(x.cpu(), shape, None, None, eps)
        mean = x.cpu().float().mean(-1, keepdim=True)
        rstd = (x.cpu().float().var(-1, correction=0, keepdim=True) + eps).rsqrt()
        return out.to(x.device), mean.to(x.device), rstd.to(x.device)

    give_sim("native_layer_norm", norm)
    assert bench.call(lambda x: torch.native_layer_norm(x, [8], None, None, 1e-5), X.bfloat16()) == []
    (found,) = bench.call(on("sim", lambda x: [x.exp(), x.float()], lambda x: [x.exp(), x]), X.bfloat16())
    assert found.kind is Kind.FORM


def test_another_way_to_the_same_result_is_no_mismatch(bench):
    """Torch has separate operators for some devices, which round differently."""
    assert bench.call(on("sim", lambda x: (x / 3).sum(0), lambda x: x.sum(0) / 3), X) == []


def test_uninitialised_memory_is_no_mismatch(bench):
    runs = []

    def grows(x):
        runs.append(x)
        return torch.exp(x) + len(runs)

    assert [f.kind for f in bench.call(grows, X)] == [Kind.UNVERIFIED]


def test_random_numbers_are_no_pass(bench):
    assert [f.kind for f in bench.entry("bernoulli", Part.FORWARD)] == [Kind.UNVERIFIED]


def test_invalid_input(bench):
    def refuse(kind, text="wrong"):
        def call(_):
            raise kind(text)

        return call

    def found(there, here):
        return [f.kind for f in bench.call(on("sim", there, here), X, part=Part.INVALID)]

    assert found(refuse(RuntimeError), refuse(RuntimeError, "other words")) == []
    assert found(refuse(ZeroDivisionError), refuse(ArithmeticError)) == []
    assert found(refuse(ValueError), refuse(RuntimeError)) == [Kind.WRONG_ERROR]
    assert found(torch.exp, refuse(RuntimeError)) == [Kind.MISSING_ERROR]
    assert found(refuse(RuntimeError), torch.exp) == [Kind.HARNESS]
    lacks = "Could not run 'aten::exp.out' with arguments from the 'sim' backend."
    assert found(refuse(NotImplementedError, lacks), refuse(RuntimeError)) == [Kind.UNSUPPORTED]


def test_invalid_inputs_of_the_database(bench):
    samples = opinfo.invalid("gather", 0, None)
    assert len(samples) > 3
    for number, sample in enumerate(samples):
        assert bench.run(Part.INVALID, program(opinfo.database()["gather"], Part.INVALID, number, sample)) == []


def test_nothing_to_differentiate_is_no_case(bench):
    assert bench.call(torch.exp, X, part=Part.BACKWARD) is None


@pytest.mark.parametrize("target", ["cpu[mkldnn=off]", "cpu[env:SHADOWRUN_TEST=1]"])
def test_settings_of_the_cpu(target):
    """The program runs on the reference, and the target repeats it; one of these has a separate process."""
    bench = Bench(target)
    for number in range(2):
        assert bench.entry("nn.functional.conv2d", Part.FORWARD, number) == []
        assert bench.entry("nn.functional.conv2d", Part.BACKWARD, number) == []

    def refuses(_):
        raise ValueError("no")

    assert [f.kind for f in bench.call(refuses, X)] == [Kind.HARNESS]


def test_samples_are_the_same_for_the_same_seed():
    def made(seed):
        torch.rand(3)  # whatever was drawn before
        return [s.input for s in opinfo.samples("exp", "float32", seed, 3, grad=False)]

    assert all(map(torch.equal, made(1), made(1)))
    assert not all(map(torch.equal, made(1), made(2)))
