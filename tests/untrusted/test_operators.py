"""What a file may have called, imported and allocated: the rules by themselves."""

import json
import sys
import warnings

import pytest
import torch

from shadowrun import limits as memory
from shadowrun.compiled import graph_text
from shadowrun.compiled.compile_spec import CompileSpec
from shadowrun.errors import DataFileError, PlatformError, UsageError
from shadowrun.intercept.untrusted import op_allowlist
from shadowrun.intercept.untrusted.checked_calls import check_call
from shadowrun.intercept.untrusted.op_allowlist import Refused, check_arguments, operator_named
from shadowrun.platforms.untrusted_specs import simulated_flaws, trusted_spec
from shadowrun.repro.quoting import in_docstring, literal
from shadowrun.types import Permissions
from tests.untrusted.unsampled_calls import unsampled

NAMES = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith(("aten::", "prims::"))]
HARMLESS = (
    *("aten::mm", "aten::native_batch_norm", "aten::convolution_backward", "aten::_foreach_add_.List", "aten::ones"),
    *("aten::div.Tensor_mode", "aten::gelu", "aten::einsum", "aten::_ctc_loss", "aten::lstm.input", "aten::randn"),
    *("aten::max_pool2d_with_indices_backward", "aten::randn.generator", "prims::convert_element_type"),
    *(
        "aten::_embedding_bag",
        "aten::_fused_adam_",
        "aten::linalg_svd",
        "aten::index_put_",
        "aten::_pack_padded_sequence",
    ),
)


@pytest.mark.parametrize("name", HARMLESS)
def test_operators_of_programs_are_called(name):
    assert operator_named(name).name() == name


def test_no_operator_takes_a_text_that_is_no_choice():
    """All of torch's: whoever adds one that opens a file adds it to what is refused."""
    free = {"equation", "assert_msg"}
    for name in NAMES:
        try:
            func = operator_named(name)
        except (Refused, AttributeError):
            continue
        for argument in func._schema.arguments:
            kind = str(argument.type)
            assert "torch.classes" not in kind
            assert not any(word in kind for word in ("Storage", "Stream", "Any", "Future", "Dict")), name
            if "str" in kind and argument.name not in free:
                for text in ("/etc/passwd", "x.so", "", "../a", "a b"):
                    assert not op_allowlist.is_word(text, argument.name), (name, argument.name)


def test_primitives_whose_kernels_believe_their_arguments_are_not_called():
    """A new one of a later torch is refused until it is read."""
    refused = set()
    for name in NAMES:
        try:
            operator_named(name)
        except (Refused, AttributeError) as error:
            if name.startswith("prims::") and "its kernel believes" in str(error):
                refused.add(name.removeprefix("prims::"))
    assert {"fft_c2r", "fft_c2c", "fft_r2c", "resize", "as_strided_scatter", "copy_strided", "svd"} <= refused
    assert not refused & {"convert_element_type", "add", "broadcast_in_dim", "sum", "iota"}


def test_calls_that_no_sample_of_torch_has_are_made():
    """Else `guarded_calls` changes calls that are refused as they are."""
    refused, calls = [], [(func, *given) for func, kept in unsampled().items() for given in kept]
    with torch.no_grad():
        for func, args, kwargs in calls:
            try:
                check_call(func, args, kwargs)
            except Refused as error:
                refused.append(f"{func.name()}: {error}")
    assert len(calls) > 150
    assert len(refused) < 3, refused


def test_custom_operators_of_this_process_follow_the_same_rule():
    with torch.library._scoped_library("untrustedtest", "DEF") as library:
        for schema in ("twice(Tensor x) -> Tensor", "read(str path) -> Tensor", "stop(int code) -> ()"):
            library.define(schema)
        assert operator_named("untrustedtest::twice")
        for name in ("read", "stop"):
            with pytest.raises(Refused):
                operator_named(f"untrustedtest::{name}")
    with pytest.raises(AttributeError):
        operator_named("untrustedtest::absent")


def test_texts_and_sizes_of_arguments():
    division = operator_named("aten::div.Tensor_mode")
    x = torch.ones(2)
    check_arguments(division, (x, x), {"rounding_mode": "trunc"})
    check_arguments(division, (x, x), {"rounding_mode": None})
    for bad in ("x", 1 << 70, object(), b"trunc", torch.device("meta")):
        with pytest.raises(Refused):
            check_arguments(division, (x, x), {"rounding_mode": bad})
    with pytest.raises(Refused, match="would make more"):
        check_arguments(operator_named("aten::full"), ([1 << 20, 1 << 20], 1), {})
    check_arguments(operator_named("aten::full"), ([1 << 20], 1), {})


X = torch.ones(2, 6)
WILD = {
    "a dimension far outside": ("aten::_fft_c2c", (X.to(torch.complex64), [-(1 << 31)], 0, True), {}),
    "a dimension just outside": ("aten::_fft_r2c", (X, [2], 0, True), {}),
    "a dimension from the end": ("aten::_fft_c2r", (X.to(torch.complex64), [-1], 0, 10), {}),
    "a spectrum of another size": ("aten::_fft_c2r", (torch.ones(5, 6, 4) + 0j, [2], 0, 3), {}),
    "a dimension twice": ("aten::_fft_c2c.out", (X.to(torch.complex64), [1, 1], 0, True), {"out": X}),
    "an index": ("aten::embedding_dense_backward", (X, torch.tensor([1, 7]), 3, -1, True), {}),
    "an index below 0": ("aten::embedding_dense_backward", (X, torch.tensor([1, -7]), 3, -1, True), {}),
    "an index of a sparse gradient": ("aten::embedding_sparse_backward", (X, torch.tensor([1, 7]), 3, -1, False), {}),
    "a composite's index": ("aten::embedding_backward", (X, torch.tensor([1, 7]), 3, -1, False, True), {}),
    "an index of what was gathered": ("aten::gather_backward", (X, X, 1, torch.full((2, 6), 6), True), {}),
    "one value for all": ("aten::_log_softmax.out", (X, 1, False), {"out": torch.ones(1).expand(2, 6)}),
    "rows within each other": ("aten::add_.Tensor", (torch.ones(9).as_strided((2, 6), (3, 1)), X), {}),
    "rows in one place": ("aten::_weight_norm_interface", (torch.ones(1).expand(2, 6), torch.ones(2, 1), 0), {}),
    "one size for all rows": ("aten::_weight_norm_interface", (X, torch.ones(1, 1).expand(2, 1), 0), {}),
    "channels": ("aten::native_batch_norm", (X, None, None, X[0, :1], X[0, :1], False, 0.1, 1e-5), {}),
}
"""What kernels take as a place in memory without a look; most end this process."""


@pytest.mark.parametrize("what", WILD)
def test_arguments_that_lead_outside_of_memory(what):
    name, args, kwargs = WILD[what]
    with pytest.raises(Refused):
        check_arguments(operator_named(name), args, kwargs)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of a beta state
    SPARSE, SQUARE = X.to_sparse_csr(), torch.eye(4).to_sparse_csr()
UNSIZED = {
    "no elements": ("rrelu_with_noise.out", (X, X, 0.0, 1.0, True), {"out": torch.ones(0)}),
    "one element for a product": ("mv.out", (SPARSE, X[0]), {"out": torch.ones(1)}),
    "a vector of one": ("mv.out", (SPARSE, torch.ones(1)), {"out": torch.ones(2)}),
    "a vector of one and a term": ("addmv.out", (torch.ones(2), SPARSE, torch.ones(1)), {"out": torch.ones(2)}),
    "columns": ("mv.out", (SPARSE.to_sparse_csc(), torch.ones(5)), {"out": torch.ones(2)}),
    "fewer rows": ("triangular_solve.X", (torch.ones(2, 2), SQUARE), {"X": torch.ones(2, 2), "M": torch.ones(0)}),
    "a small solution": ("triangular_solve.X", (torch.ones(4, 2), SQUARE), {"X": torch.ones(1, 2), "M": torch.ones(0)}),
}


@pytest.mark.parametrize("what", UNSIZED)
def test_results_that_are_not_resized(what):
    """Found beside guard pages; each is of memory of its own."""
    name, args, kwargs = UNSIZED[what]
    with pytest.raises(Refused, match=r"is sparse|not resized"):
        check_arguments(operator_named(f"aten::{name}"), args, kwargs)


def test_results_of_their_size_or_resized():
    out = {"out": torch.ones(2)}
    fits = {
        "rrelu_with_noise.out": ((X, X, 0.0, 1.0, True), {"out": X.clone()}),
        "mv.out": ((SPARSE, X[0]), out),
        "addmv.out": ((torch.ones(1), SPARSE, X[0]), {"out": torch.ones(0)}),
        "triangular_solve.X": ((torch.ones(4, 2), SQUARE), {"X": torch.ones(4, 2), "M": torch.ones(0)}),
        "linalg_eig.out": (
            (torch.ones(2, 5, 5),),
            {"eigenvalues": torch.ones(0) + 0j, "eigenvectors": torch.ones(0) + 0j},
        ),
    }
    for name, (args, kwargs) in fits.items():
        func = operator_named(f"aten::{name}")
        check_arguments(func, args, kwargs)
        func(*args, **kwargs)
    for matrix in (X, SPARSE):
        check_arguments(operator_named("aten::mv.out"), (matrix, torch.ones(6)), {"out": torch.ones(0)})


def test_results_take_no_place_that_was_looked_at():
    """Found beside guard pages: `searchsorted` looks at its sorter, writes its result there, and goes by it again."""
    order, rows, half = torch.arange(6), torch.ones(2, dtype=torch.int32), torch.ones(6)
    refused = {
        "aten::searchsorted.Tensor_out": ((X[0], X[0]), {"sorter": order, "out": order}),
        "aten::linalg_lu_solve.out": ((X[:, :2], rows, X[:, :2]), {"out": rows.view(torch.float32)}),
        "aten::sort.values": ((X,), {"values": half, "indices": half.view(torch.int32)}),
    }
    for name, (args, kwargs) in refused.items():
        with pytest.raises(Refused, match="shares memory with"):
            check_arguments(operator_named(name), args, kwargs)
    whole = torch.arange(8)
    with pytest.raises(Refused, match="shares memory with sorter"):  # it grows into what lies behind it
        given = {"sorter": whole[2:], "out": whole[:0]}
        check_arguments(operator_named("aten::searchsorted.Tensor_out"), (X[0], X[0]), given)
    nothing = torch.empty(0, dtype=torch.complex64)
    with pytest.raises(Refused, match="shares memory with"):  # both are resized, in one storage: values become vectors
        given = {"eigenvalues": nothing, "eigenvectors": nothing.view(0, 1, 1)}
        check_arguments(operator_named("aten::linalg_eig.out"), (torch.ones(2, 5, 5),), given)
    square = torch.ones(2, 2)
    check_arguments(operator_named("aten::addmm.out"), (square, square.clone(), square.clone()), {"out": square})
    check_arguments(operator_named("aten::mul.out"), (order, order), {"out": order})


PLANES, FAR = torch.ones(1, 2, 8, 8), torch.full((1, 2, 8, 8), 10**6)
CONFUSED = {
    "a tensor for a size": ("embedding_dense_backward", (X, torch.tensor([1, 7]), torch.tensor(3), -1, True)),
    "a truth for a size": ("embedding_dense_backward", (X, torch.tensor([1, 7]), True, -1, True)),
    "a dtype for a size": ("embedding_dense_backward", (X, torch.tensor([1, 7]), torch.float32, -1, True)),
    "a number for indices": ("embedding_dense_backward", (X[0], 7, 1, -1, False)),
    "a number for sizes": ("max_unpool2d", (PLANES, FAR, 8)),
    "an integer for a scale": ("_upsample_bilinear2d_aa", (PLANES, [8, 1 << 15], False, 1, 1)),
    "a tensor for a number": ("add.Tensor", (X, X), {"alpha": torch.ones(())}),
    "a tensor for a dtype": ("hamming_window", (3,), {"dtype": torch.ones(1)}),
    "a layout for a dtype": ("hamming_window", (3,), {"dtype": torch.strided}),
    "a dtype for a format": ("clone", (X,), {"memory_format": torch.float32}),
}


@pytest.mark.parametrize("what", CONFUSED)
def test_values_of_another_type_than_the_schema_has(what):
    """torch takes them, and a look at what they should be did not know them."""
    name, args, kwargs = (*CONFUSED[what], {})[:3]
    with pytest.raises(Refused):
        check_arguments(operator_named(f"aten::{name}"), args, kwargs)


def test_values_that_torch_takes_for_others():
    check_arguments(operator_named("aten::max_unpool2d"), (PLANES, FAR * 0, 8), {})
    check_arguments(operator_named("aten::add.Tensor"), (X, 2), {"alpha": True})
    check_arguments(operator_named("aten::sum.dim_IntList"), (X, 0, False), {"dtype": torch.float64})
    check_arguments(operator_named("aten::embedding_dense_backward"), (X[0], 0, True, -1, False), {})


def test_arguments_that_stay_within():
    x = X.to(torch.complex64)
    check_arguments(operator_named("aten::_fft_c2c"), (x, [1, 0], 0, True), {})
    check_arguments(operator_named("aten::_fft_c2c"), (None, [1], 0, True), {})  # of a graph: computed later
    for size in (10, 11):
        check_arguments(operator_named("aten::_fft_c2r"), (x, [0, 1], 0, size), {})
    check_arguments(operator_named("aten::embedding_dense_backward"), (X, torch.tensor([1, 2]), 3, -1, True), {})
    check_arguments(operator_named("aten::add_.Tensor"), (torch.ones(3, 8)[::2, ::2].t(), 1), {})
    check_arguments(operator_named("aten::unsqueeze_"), (torch.ones(1).expand(6), 0), {})
    check_arguments(operator_named("aten::native_batch_norm"), (X, X[0], None, X[0], X[0], False, 0.1, 1e-5), {})


@pytest.mark.parametrize(
    "name",
    [
        *("_log_softmax_backward_data.out", "_slow_conv2d_backward.output_mask_out", "_compute_linear_combination"),
        *("_foreach_copy", "_new_zeros_with_same_feature_meta", "_nnpack_spatial_convolution", "_stack"),
        *("_transform_bias_rescale_qkv", "choose_qparams_optimized"),
    ],
)
def test_operators_within_kernels_are_not_called(name):
    with pytest.raises(Refused):
        operator_named(f"aten::{name}")


@pytest.mark.parametrize(
    "text",
    ["plain", "it's", 'a"b', "\\", "\\'", "a\nb", "\u202e", "\ud800", "{x}", "${x}", "\x00", '"""', "é", "'\"\\\n"],
)
def test_texts_are_literals_in_ascii(text):
    code = literal(text)
    assert code.isascii()
    assert eval(code) == text
    assert eval(literal({text: text})) == {text: text}
    line = in_docstring(text)
    assert line.isascii()
    assert eval(f'"""{line}"""') == text.replace('"', "'")


@pytest.mark.parametrize(
    "value", [1, -0.0, float("inf"), 1 + 2j, complex("nan"), torch.float32, [1, [True, None]], slice(1)]
)
def test_values_are_literals(value):
    code = literal(value)
    assert repr(eval(code, {"torch": torch})) == repr(value)


def test_other_objects_are_no_code():
    class Evil:
        def __repr__(self):
            return "exit()"

    with pytest.raises(SyntaxError):
        compile(literal(Evil()), "", "eval")
    with pytest.raises(SyntaxError):
        compile(literal([1, Evil()]), "", "eval")


def test_what_an_assertion_says_is_no_code():
    """Its words are free, as torch makes them; here they quote and end the line that the script has them on."""
    evil = "Runtime assertion u0 >= 0'; import os  #\n;  a = None"
    call = "torch.ops.aten._assert_scalar.default"
    nodes = [
        ["placeholder", "p", "", [], {"dict": []}, ["", ""]],
        ["call_function", "f", call, [{"node": "p"}, evil], {"dict": []}, ["", ""]],
        ["output", "output", "", [{"tuple": [{"node": "p"}]}], {"dict": []}, ["", ""]],
    ]
    module = graph_text.from_text(json.dumps(nodes))
    (said,) = [n.args[1] for n in module.graph.nodes if n.name == "f"]
    assert said.startswith("Runtime assertion u0 >= 0")
    assert not set(said) & set("';#\n\"\\")


def test_options_of_inductor_that_name_a_compiler_are_left_out():
    options = {"cpp.cxx": "./evil", "max_autotune": True, "freezing": "./x", "fx_graph_remote_cache": True}
    how = CompileSpec("inductor", "evil", False, True, None, options, None).from_file(Permissions())
    assert how.options == {"max_autotune": True}
    assert how.left_out == ("cpp.cxx", "freezing", "fx_graph_remote_cache")
    assert how.module == ""
    own = CompileSpec("inductor", "", False, True, None, options, None).from_file(Permissions(modules=True))
    assert own.options == options


@pytest.mark.parametrize(
    ("n", "is_kept"), [(1, True), (-1, True), (20_000, False), (0, False), (1.5, False), (True, False)]
)
def test_a_file_asks_for_no_more_threads_than_processors(n, is_kept):
    """OpenMP ends the process where it cannot start them, with the exit status of a fault."""
    how = CompileSpec("inductor", "", False, True, None, {"cpp.threads": n}, None).from_file(Permissions())
    assert how.options == ({"cpp.threads": n} if is_kept else {})
    assert how.left_out == (() if is_kept else ("cpp.threads",))


def test_no_package_is_looked_for_in_the_place_of_a_simulated_device(sim_device):
    """Here it is called `sim`, so that the file's `npu` would be a real one; `xla` is torch's."""
    assert trusted_spec("sim", simulated=True) == "sim"
    for name in ("npu", "xla", "cuda"):
        with pytest.raises(PlatformError, match="only the data file names it"):
            trusted_spec(name, simulated=True)


def test_platforms_that_only_a_person_names(monkeypatch):
    monkeypatch.setattr("shadowrun.sim.is_enabled", lambda: False)
    assert trusted_spec("cpu[threads=1,isa=default]") == "cpu[isa=default,threads=1]"
    assert trusted_spec("npu", simulated=True) == "npu"
    assert trusted_spec('cpu[env:A="(a path)"]', ["os", "cpu[env:A=/x]"]) == "cpu[env:A=/x]"
    for text in ("cpu[env:A=1]", "cpu[python=/x]", "npu"):
        assert trusted_spec(text, [text]) == text
        with pytest.raises(PlatformError, match="only the data file names it") as caught:
            trusted_spec(text, ["cpu", "sim"])
        assert caught.value.slug == "platform-refused"
    with pytest.raises(DataFileError):
        trusted_spec(["cpu"])
    with pytest.raises(DataFileError):
        simulated_flaws({"simulated_flaws": ["no such flaw"]})
    with pytest.raises(UsageError):
        trusted_spec("cpu[threads=1")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is bounded")
def test_too_much_memory_is_an_error_and_the_bound_goes(monkeypatch):
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    monkeypatch.setattr(memory, "_available_bytes", lambda: 0)
    with memory.bounded_memory():
        torch.empty(1 << 20)
        with pytest.raises(RuntimeError, match="allocate"):
            torch.empty(1 << 40, dtype=torch.uint8)
        with pytest.raises(RuntimeError, match="allocate"):
            torch.empty(3 << 30, dtype=torch.uint8)  # there, but not within the bound
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    torch.empty(3 << 30, dtype=torch.uint8)


EMPTY_FAR_AWAY = torch.empty(0).set_(torch.empty(4).untyped_storage(), 10**11, (0,), (1,))


@pytest.mark.parametrize("argument", ["grad_scale", "found_inf"])
@pytest.mark.parametrize("given", [EMPTY_FAR_AWAY, torch.ones(2)], ids=["nothing", "two numbers"])
@pytest.mark.parametrize("name", ["_fused_sgd_", "_fused_adam", "_fused_adamw_", "_fused_adagrad"])
def test_fused_optimizers_read_one_number(name, given, argument):
    """Their kernels read it whatever the size, and a tensor without elements may lie anywhere."""
    lists = {"aten::_fused_sgd_": 3}.get(f"aten::{name}", 4)
    args = [[torch.ones(4)] for _ in range(lists)]
    options = {"lr": 0.1, "weight_decay": 0.0, "maximize": False}
    if "adam" in name:
        args += [[], [torch.ones(())]]
        options |= {"beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "amsgrad": False}
    elif "sgd" in name:
        options |= {"momentum": 0.9, "dampening": 0.0, "nesterov": False, "is_first_step": False}
    else:
        args[3] = [torch.ones(())]
        options |= {"lr_decay": 0.0, "eps": 1e-8}
    func = operator_named(f"aten::{name}")
    check_call(func, args, options | {argument: torch.ones(())})
    with pytest.raises(Refused, match="is not one number"):
        check_call(func, args, options | {argument: given})
