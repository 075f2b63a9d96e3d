"""What is decided about an operator: representative ones by hand, and all that torch has registered."""

import pytest
import torch

from shadowrun.intercept import plan as plans
from shadowrun.intercept.plan import Action, make_plan


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
    ("name", "short"),
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
def test_which_calls_take_the_short_way(name, short):
    assert plan(name).short is short


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
    assert plan("aten::rand.generator").has_generator
    assert not plan("aten::rand").has_generator


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
        assert (made.custom, made.short, made.action) == (True, False, Action.REPLAY)
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
        if p.short:
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
        if made.short:
            assert returned in (["Tensor"], ["number"], ["bool"]), made.name
        listed = [a for a in made.mutated if a.is_list]
        assert all("List" in str(func._schema.arguments[a.position].type) for a in listed), made.name


ABSENT = {
    # Names in the tables that the dispatcher does not list, and why they stay.
    "aten::empty.names": "_EMPTY",
    "prim::device": "_PASS",  # TorchScript's: subclasses with `dispatch_device=True` are asked by it
    "prim::layout": "_PASS",  # the same, `dispatch_layout=True`
}
GONE = {"aten::empty.names"}
"""Of these, those that torch 2.11 has and 2.13 has not."""

TABLES = {
    "_PASS": plans._PASS,
    "_VIEW": plans._VIEW,
    "_EMPTY": plans._EMPTY,
    "_UNINITIALISED_RETURNS": plans._UNINITIALISED_RETURNS,
    "_HIDDEN_MUTATIONS": plans._HIDDEN_MUTATIONS,
    "_ON_CPU": plans._ON_CPU,
    "_UNSTABLE": plans._UNSTABLE,
}


@pytest.mark.parametrize("table", TABLES)
def test_every_name_in_the_tables_exists(table):
    known = set(torch._C._dispatch_get_all_op_names())
    missing = {n for n in TABLES[table] if n not in known}
    assert missing - GONE == {n for n, t in ABSENT.items() if t == table} - GONE


def test_the_tables_name_returns_and_arguments_that_exist():
    for name, numbers in plans._UNINITIALISED_RETURNS.items():
        if name not in ABSENT:
            assert max(numbers) < len(plan(name).func._schema.returns), name
    for name, arguments in plans._ON_CPU.items():
        assert set(arguments) <= {a.name for a in plan(name).func._schema.arguments}, name
    for name, arguments in plans._HIDDEN_MUTATIONS.items():
        if name not in ABSENT:
            assert set(arguments) <= {a.name for a in plan(name).func._schema.arguments}, name
            assert set(arguments) <= set(plan(name).mutated_names)


def test_the_tables_do_not_contradict_each_other():
    names = [n for t in ("_PASS", "_VIEW", "_EMPTY") for n in TABLES[t]]
    assert len(names) == len(set(names))
    views = {n for n in plans._VIEW if any(r.alias_info is not None for r in plan(n).func._schema.returns)}
    assert views == set(), "these say it in their schema: no entry needed"
