"""What is decided about an operator: representative ones by hand, and all that torch has registered."""

import pytest
import torch

from shadowrun.intercept.plan import Action, OpKind, make_plan
from shadowrun.operators.facts import facts

FAST = (OpKind.FUNCTIONAL, OpKind.IN_PLACE)


def plan(name):
    """The plan of ``aten::add.Tensor``, ``c10d::send``."""
    namespace, _, rest = name.partition("::")
    op, _, overload = rest.partition(".")
    return make_plan(getattr(getattr(getattr(torch.ops, namespace), op), overload or "default"), 0)


@pytest.mark.parametrize(
    ("name", "action"),
    [
        ("aten::add.Tensor", Action.REPLAY),
        ("aten::add_.Tensor", Action.REPLAY),
        ("aten::_local_scalar_dense", Action.REPLAY),
        ("aten::view", Action.VIEW),
        ("aten::transpose.int", Action.VIEW),
        ("aten::split.Tensor", Action.VIEW),
        ("aten::unbind.int", Action.VIEW),
        ("aten::detach", Action.VIEW),
        ("aten::_unsafe_view", Action.VIEW),
        ("aten::unsafe_split.Tensor", Action.VIEW),
        ("aten::t_", Action.VIEW),
        ("aten::squeeze_.dim", Action.VIEW),
        ("aten::bernoulli_.float", Action.RANDOM),
        ("aten::native_dropout", Action.RANDOM),
        ("aten::randn", Action.RANDOM),
        ("aten::normal_", Action.RANDOM),
        ("aten::rrelu_with_noise", Action.RANDOM),
        ("aten::empty.memory_format", Action.EMPTY),
        ("aten::new_empty_strided", Action.EMPTY),
        ("aten::resize_", Action.EMPTY),
        ("aten::resize_as", Action.EMPTY),
        ("aten::set_.source_Tensor", Action.PASS),
        ("aten::_efficientzerotensor", Action.PASS),
        ("aten::is_pinned", Action.PASS),
        ("c10d::allreduce_", Action.PASS),
        ("_c10d_functional::all_reduce", Action.PASS),
        ("profiler::_record_function_enter_new", Action.PASS),
    ],
)
def test_what_is_done_with_an_operator(name, action):
    made = plan(name)
    assert made.action is action
    assert made.name == name
    assert bool(made.reason) == (action is not Action.REPLAY), "what is not replayed says why"


@pytest.mark.parametrize(
    ("name", "mutated"),
    [
        ("aten::add.Tensor", []),
        ("aten::add_.Tensor", [("self", 0, False, False)]),
        ("aten::add.out", [("out", 3, True, False)]),
        ("aten::max.dim_max", [("max", 3, True, False), ("max_values", 4, True, False)]),
        ("aten::_foreach_add_.List", [("self", 0, False, True)]),
        ("aten::native_batch_norm", [("running_mean", 3, False, False), ("running_var", 4, False, False)]),
        ("aten::rrelu_with_noise", [("noise", 1, False, False)]),
    ],
)
def test_what_an_operator_writes_to(name, mutated):
    assert [(a.name, a.position, a.kwarg_only, a.is_list) for a in plan(name).mutated] == mutated
    assert plan(name).mutated_names == tuple(m[0] for m in mutated)


def test_fused_optimizers_write_to_all_their_lists():
    made = plan("aten::_fused_adamw_")
    assert made.mutated_names == ("self", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs")
    assert all(a.is_list for a in made.mutated)
    assert made.fresh == ()
    assert made.n_returns == 0


@pytest.mark.parametrize(
    ("name", "fast"),
    [
        ("aten::mm", True),
        ("aten::add_.Tensor", True),
        ("aten::copy_", True),
        ("aten::mm.out", False),  # the first argument is not the one written to
        ("aten::topk", False),  # two results
        ("aten::_foreach_add_.List", False),
        ("aten::_foreach_add.List", False),
        ("aten::native_batch_norm", False),
        ("aten::bernoulli_.float", False),
        ("aten::view", False),
        ("aten::_local_scalar_dense", True),  # a number
        ("aten::rrelu_with_noise", False),
    ],
)
def test_which_calls_take_the_fast_path(name, fast):
    assert (plan(name).kind in FAST) is fast


def test_returns_that_are_new_and_those_without_meaning():
    assert plan("aten::native_batch_norm").fresh == (0, 1, 2)
    assert plan("aten::add_.Tensor").fresh == ()
    assert plan("aten::max.dim_max").fresh == ()
    assert plan("aten::_ctc_loss").uninitialised == {1}
    assert plan("aten::mkldnn_rnn_layer").uninitialised == {3}
    assert plan("aten::add.Tensor").uninitialised == frozenset()


def test_keywords_that_need_care():
    assert plan("aten::ones").has_device
    assert not plan("aten::add.Tensor").has_device


def test_attention_without_dropout_draws_nothing():
    assert plan("aten::_scaled_dot_product_flash_attention_for_cpu").dropout == 3
    assert plan("aten::scaled_dot_product_attention").dropout == 4
    assert plan("aten::mm").dropout == -1


def test_composite_operators_are_told_from_those_with_kernels():
    assert plan("aten::linear").composite is not plan("aten::addmm").composite
    assert plan("aten::matmul").composite
    assert not plan("aten::add.Tensor").composite


def test_custom_operators_are_told_from_torch_s():
    with torch.library._scoped_library("shadowrun_plan", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.define("fill(Tensor(a!) x, Tensor(b!)[] more) -> ()")
        made = plan("shadowrun_plan::twice")
        assert (made.custom, made.kind, made.action) == (True, OpKind.SPECIAL, Action.REPLAY)
        assert [a.is_list for a in plan("shadowrun_plan::fill").mutated] == [False, True]
    assert not plan("aten::mm").custom


def test_an_operator_that_is_not_repeatable_says_so():
    assert "gelsy" in plan("aten::linalg_lstsq").unstable
    assert plan("aten::linalg_qr").unstable == ""


# -- all of them -------------------------------------------------------------------------------------


def registered():
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        op, _, overload = rest.partition(".")
        try:
            yield getattr(getattr(getattr(torch.ops, namespace), op), overload or "default")
        except (AttributeError, RuntimeError):  # TorchScript types that Python has no schema for
            continue


def test_every_registered_operator_gets_a_plan():
    made = [make_plan(func, i) for i, func in enumerate(registered())]
    assert len(made) > 3000
    by_action = {action: sum(p.action is action for p in made) for action in Action}
    assert all(by_action.values()), by_action
    for p in made:
        arguments = p.func._schema.arguments
        assert all(arguments[a.position].name == a.name for a in p.mutated), p.name
        assert all(i < p.n_returns for i in p.fresh), p.name
        if p.kind in FAST:
            assert p.n_returns == 1, p.name
            assert p.action is Action.REPLAY
            assert len(p.mutated) <= 1
        declared = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]
        assert {a.name for a in declared} <= set(p.mutated_names), p.name
        if torch.Tag.nondeterministic_seeded in p.func.tags:
            assert p.action is not Action.REPLAY, p.name


def test_no_operator_that_writes_or_returns_lists_is_taken_for_one_result():
    for func in registered():
        made = make_plan(func, 0)
        returned = [str(r.type) for r in func._schema.returns]
        if made.kind in FAST:
            assert returned in (["Tensor"], ["number"], ["bool"]), made.name
        listed = [a for a in made.mutated if a.is_list]
        assert all("List" in str(func._schema.arguments[a.position].type) for a in listed), made.name


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        *((f"aten::{op}", "action", Action.EMPTY) for op in ("resize.out", "resize_as.out", "_resize_output")),
        *((f"aten::{op}.out", "action", Action.EMPTY) for op in ("empty_quantized", "_empty_affine_quantized")),
        ("aten::_flash_attention_forward.quantized", "uninitialised", {2, 3, 4}),
        ("aten::_scaled_dot_product_flash_attention.quantized", "uninitialised", {6, 7, 8}),
        ("aten::_pack_padded_sequence.out", "on_cpu", ("lengths",)),
        ("aten::linalg_lstsq.out", "unstable", "LAPACK's gelsy driver is not repeatable by itself"),
    ],
)
def test_the_variants_of_an_operator_have_its_facts(name, field, value):
    assert getattr(plan(name), field) == value


@pytest.mark.parametrize("name", ["aten::_unsafe_view.out", "aten::_pin_memory.out", "aten::unsafe_split.Tensor_out"])
def test_what_is_written_to_out_is_compared(name):
    assert plan(name).action is Action.REPLAY


def test_what_a_row_says_of_returns_and_arguments_holds_for_all_overloads():
    for made in (make_plan(func, 0) for func in registered()):
        row = facts(made.name)
        assert made.uninitialised <= set(made.fresh), made.name
        assert set(made.on_cpu) == {a.name for a in made.func._schema.arguments} & set(row.on_cpu), made.name
        assert set(row.hidden_writes) <= set(made.mutated_names), made.name
