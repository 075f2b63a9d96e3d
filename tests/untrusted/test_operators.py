"""What a file may have called, imported and allocated: the rules by themselves."""

import json
import sys

import pytest
import torch

from shadowrun.compiled import graphtext
from shadowrun.compiled.how import How
from shadowrun.errors import DataFileError, PlatformError, UsageError
from shadowrun.intercept import untrusted
from shadowrun.intercept.untrusted import Refused, check_arguments, operator_named
from shadowrun.platforms.untrusted import accepted, simulated_flaws
from shadowrun.repro import memory
from shadowrun.repro.quoting import in_docstring, literal, mapping, quoted
from shadowrun.types import Allowed

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
                    assert not untrusted.is_word(text, argument.name), (name, argument.name)


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


@pytest.mark.parametrize(
    "text",
    ["plain", "it's", 'a"b', "\\", "\\'", "a\nb", "\u202e", "\ud800", "{x}", "${x}", "\x00", '"""', "é", "'\"\\\n"],
)
def test_texts_are_literals_in_ascii(text):
    code = quoted(text)
    assert code.isascii()
    assert eval(code) == eval(literal(text)) == text
    assert eval(mapping({text: text})) == {text: text}
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
    module = graphtext.from_text(json.dumps(nodes))
    (said,) = [n.args[1] for n in module.graph.nodes if n.name == "f"]
    assert said.startswith("Runtime assertion u0 >= 0")
    assert not set(said) & set("';#\n\"\\")


def test_options_of_inductor_that_name_a_compiler_are_left_out():
    options = {"cpp.cxx": "./evil", "max_autotune": True, "freezing": "./x", "fx_graph_remote_cache": True}
    how = How("inductor", "evil", False, True, None, options, None).from_file(Allowed())
    assert how.options == {"max_autotune": True}
    assert how.left_out == ("cpp.cxx", "freezing", "fx_graph_remote_cache")
    assert how.module == ""
    own = How("inductor", "", False, True, None, options, None).from_file(Allowed(modules=True))
    assert own.options == options


def test_no_package_is_looked_for_in_the_place_of_a_simulated_device(sim_device):
    """Here it is called `sim`, so that the file's `npu` would be a real one; `xla` is torch's."""
    assert accepted("sim", simulated=True) == "sim"
    for name in ("npu", "xla", "cuda"):
        with pytest.raises(PlatformError, match="only the data file names it"):
            accepted(name, simulated=True)


def test_platforms_that_only_a_person_names(monkeypatch):
    monkeypatch.setattr("shadowrun.platforms.sim.is_enabled", lambda: False)
    assert accepted("cpu[threads=1,isa=default]") == "cpu[isa=default,threads=1]"
    assert accepted("npu", simulated=True) == "npu"
    assert accepted('cpu[env:A="(a path)"]', ["os", "cpu[env:A=/x]"]) == "cpu[env:A=/x]"
    for text in ("cpu[env:A=1]", "cpu[python=/x]", "npu"):
        assert accepted(text, [text]) == text
        with pytest.raises(PlatformError, match="only the data file names it") as caught:
            accepted(text, ["cpu", "sim"])
        assert caught.value.slug == "platform-refused"
    with pytest.raises(DataFileError):
        accepted(["cpu"])
    with pytest.raises(DataFileError):
        simulated_flaws({"simulated_flaws": ["no such flaw"]})
    with pytest.raises(UsageError):
        accepted("cpu[threads=1")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is bounded")
def test_too_much_memory_is_an_error_and_the_bound_goes(monkeypatch):
    import resource

    before = resource.getrlimit(resource.RLIMIT_DATA)
    monkeypatch.setattr(memory, "_left", lambda: 0)
    with memory.bounded():
        torch.empty(1 << 20)
        with pytest.raises(RuntimeError, match="allocate"):
            torch.empty(1 << 40, dtype=torch.uint8)
        with pytest.raises(RuntimeError, match="allocate"):
            torch.empty(3 << 30, dtype=torch.uint8)  # there, but not within the bound
    assert resource.getrlimit(resource.RLIMIT_DATA) == before
    torch.empty(3 << 30, dtype=torch.uint8)
