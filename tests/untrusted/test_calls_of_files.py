"""Calls that a file describes: what they are when they run, and while their inputs are made smaller."""

from __future__ import annotations

import contextlib
import json
import math
import operator
import warnings

import pytest
import torch
from torch import fx
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._python_dispatch import TorchDispatchMode

import shadowrun
from shadowrun import sim
from shadowrun.cli.main import main
from shadowrun.compiled import graph_text
from shadowrun.compiled.graph import Graph, Snapshot
from shadowrun.compiled.rounding import RandomResults
from shadowrun.errors import DataFileError, UsageError
from shadowrun.intercept.plan import make_plan
from shadowrun.intercept.torchapi import as_in_handler
from shadowrun.intercept.untrusted import checked_calls
from shadowrun.intercept.untrusted.checked_calls import check_call
from shadowrun.intercept.untrusted.memory_bounds import has_bounds_check
from shadowrun.intercept.untrusted.op_allowlist import (
    Refused,
    check_arguments,
    depends_on_values,
    operator_named,
    trusts_its_arguments,
)
from shadowrun.operators.vendor_ops import COUNTERPARTS
from shadowrun.platforms.device import resolve
from shadowrun.repro.call_replayer import CallReplayer, captured_plan
from shadowrun.repro.minimise import minimised
from shadowrun.store.captured_inputs import StoredCall
from shadowrun.studies.campaign.metamorphic import Metamorphic
from shadowrun.studies.campaign.variants import compiled_variant
from shadowrun.studies.campaign.variants.recipe import Recipe
from shadowrun.studies.campaign.variants.variant import Execution, Variant
from shadowrun.studies.sweep.recorded_calls import UnreadableCall, sample
from shadowrun.studies.zoo.graph import Runner, from_json
from shadowrun.studies.zoo.input_values import make_inputs

aten = torch.ops.aten


@pytest.mark.parametrize("seed", range(3))
def test_indices_are_looked_at_after_they_are_drawn(monkeypatch, seed):
    """Before that they are what memory held: often zeros, which are inside of a table of one row."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).zero_())
    with pytest.raises(UnreadableCall, match="not below num_weights"):
        sample("aten::embedding_dense_backward", "f32[64, 3], i64[64], 1, -1, False", seed)
    given = sample("aten::embedding_dense_backward", "f32[64, 3], i64[64], 2, -1, False", seed)
    assert int(given.args[1].max()) == 1


def _smaller(func, *args):
    """The calls that are tried to make inputs smaller, where each shows the fault."""
    tried = []

    def judge(args, kwargs):
        tried.append(args)
        return "fault"

    notes = []
    _, (smallest, _) = minimised(func, "fault", (args, {}), judge, lambda kind: kind, 20.0, notes)
    return tried, smallest, notes


def test_sizes_are_not_made_smaller_than_indices():
    """The number of rows is a size of the gradient, too: with both smaller, the kernel wrote 16 MB further on."""
    gradient, indices = torch.ones(64, 3), torch.full((64,), 63)
    tried, smallest, _ = _smaller(aten.embedding_dense_backward.default, gradient, indices, 64, -1, False)
    assert tried
    for args in tried:
        assert not args[1].numel() or int(args[1].max()) < args[2]
    assert smallest[0].numel() < gradient.numel()


def test_inputs_of_a_kernel_that_looks_at_nothing_stay():
    x = torch.ones(1, 1, 8, 8)
    indices = torch.full((1, 1, 8, 8), 63)
    args = (x, x, [3, 3], [1, 1], [1, 1], [1, 1], False, indices)
    tried, smallest, notes = _smaller(aten.max_pool2d_with_indices_backward.default, *args)
    assert not tried
    assert smallest == args
    assert "not made smaller" in notes[0]


def test_other_inputs_are_made_smaller():
    _, smallest, notes = _smaller(aten.add.Tensor, torch.ones(64, 3), torch.ones(64, 3))
    assert smallest[0].numel() == 1
    assert not notes


@pytest.mark.parametrize(
    "name",
    [
        *("_ctc_loss", "_ctc_loss.Tensor", "_embedding_bag", "max_pool2d_with_indices_backward"),
        *("max_unpool2d", "_fused_adam_.tensor_lr", "native_group_norm_backward", "lu_unpack"),
        *("lstm.input", "lstm.data", "gru.input", "rnn_tanh.input", "rnn_relu.data", "mkldnn_rnn_layer", "_cudnn_rnn"),
        *("ctc_loss.IntList", "embedding_bag.padding_idx"),
    ],
)
def test_kernels_that_believe_their_arguments(name):
    assert trusts_its_arguments(operator_named(f"aten::{name}"))
    assert not trusts_its_arguments(aten.mm.default)
    assert not trusts_its_arguments(torch.relu)


ATTENTION = ("scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu")


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_has_a_key_for_each_value(name):
    """The kernel for the CPU reads as many keys as there are values."""
    func = operator_named(f"aten::{name}")
    query, value = torch.ones(1, 2, 4, 8), torch.ones(1, 2, 4000, 8)
    assert depends_on_values(func)
    with pytest.raises(Refused, match="key and value"):
        check_arguments(func, (query, query, value), {})
    check_arguments(func, (query, value, value), {})
    check_arguments(func, (query, None, value), {})  # of a graph: computed later


@pytest.mark.parametrize(
    ("name", "query", "key", "value"),
    [
        ("_scaled_dot_product_flash_attention", (1, 2, 4, 8), (1, 0, 4, 8), (1, 2, 4, 8)),
        ("scaled_dot_product_attention", (1, 2, 4, 8), (1, 2, 4, 8), (1, 0, 4, 8)),
        ("_scaled_dot_product_flash_attention_for_cpu", (2, 2, 0, 8), (2, 2, 4, 8), (2, 2, 4, 8)),
        ("_scaled_dot_product_flash_attention_for_cpu", (2, 2, 4, 8), (2, 2, 0, 8), (2, 2, 0, 8)),
    ],
)
def test_attention_of_nothing_ends_no_process(name, query, key, value):
    """Kernels divide integers by these sizes."""
    with pytest.raises(Refused, match=r"no heads|no length"):
        check_arguments(operator_named(f"aten::{name}"), tuple(map(torch.ones, (query, key, value))), {})


@pytest.mark.parametrize("command", ["explain", "repro", "replay"])
def test_what_is_made_of_calls_of_a_file_is_looked_at_inside_too(tmp_path, monkeypatch, clean_sim, command):
    """The judge changes arguments; a program's own composite calls were split, and cost no second run."""
    monkeypatch.chdir(tmp_path)
    x = torch.randn(4, 5)
    with sim.flaws("softmax-error"), shadowrun.compare("sim", file="x.shadowrun"):
        x.to("sim").softmax(1)
    with shadowrun.record("x.shadowrec", capture=1 << 20):
        x.softmax(1)
    seen = []
    for name in ("judge", "run"):
        monkeypatch.setattr(CallReplayer, name, lambda *_: seen.append(type(checked_calls.looks_of_file())))
    words = {
        "explain": ["x.shadowrun", "--finding", "1"],
        "repro": ["x.shadowrun", "--finding", "1"],
        "replay": ["x.shadowrec", "--target", "cpu"],
    }
    with contextlib.suppress(TypeError):  # of what was replayed, nothing is there
        main([command, *words[command]])
    assert set(seen) == {checked_calls.CheckedCalls}


# -- what composite operators call -------------------------------------------------------------------------

FAR = torch.full((8,), 10**9)
X = torch.ones(8, 4)
COMPOSITE = {
    "embedding_backward": (X, FAR, 3, -1, False, False),
    "embedding_bag": (X, FAR, torch.tensor([0]), False, 0),
    "_weight_norm": (torch.ones(64, 4), torch.ones(1, 1), 0),
    "ctc_loss.IntList": (torch.zeros(4, 1, 5), torch.tensor([[10**8]]), [4], [1]),
}


@pytest.mark.parametrize("below_autograd", [False, True])
@pytest.mark.parametrize("name", COMPOSITE)
def test_operators_inside_of_others_are_looked_at(name, below_autograd):
    """The recorder splits these, so that only a file names them; their own arguments fit.

    `replay` and `repro` run calls below autograd, where torch hands a mode the composite operator whole.
    """
    func = operator_named(f"aten::{name}")
    with as_in_handler() if below_autograd else contextlib.nullcontext(), pytest.raises(Refused):
        check_call(func, COMPOSITE[name], {})


_LSTM = [torch.ones(16, 3), torch.ones(16, 4), torch.ones(16), torch.ones(16)]
_STATE = torch.ones(1, 2, 4)
TWICE_DECOMPOSED = {
    "lstm.input": (torch.ones(5, 2, 3), [_STATE, _STATE], _LSTM, True, 1, 0.0, False, False, False),
    "stft": (torch.ones(20), 8, 4, 8, torch.ones(8), False, True, True),
}


@pytest.mark.parametrize("name", TWICE_DECOMPOSED)
def test_what_is_looked_at_is_what_the_call_makes(name):
    """torch has a second decomposition in Python, for compilers, which asks for other dtypes before it takes mkldnn."""
    func, args = operator_named(f"aten::{name}"), TWICE_DECOMPOSED[name]

    class Made(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made.append(func.name())
            return func(*args, **(kwargs or {}))

    class LookedAt(checked_calls.CheckedCalls):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.name())
            return super().__torch_dispatch__(func, types, args, kwargs)

    made, seen = [], []
    with torch.no_grad(), Made():
        func(*args)
    with torch.no_grad(), as_in_handler(), LookedAt():
        func(*args)
    assert seen[0] == func.name()
    assert [name for name in seen[1:] if not checked_calls._splits(operator_named(name, checked=False))] == made


def test_a_look_inside_sees_strides_and_shared_memory():
    """Its copies were contiguous; the kernel read every second label as if they were."""
    labels = torch.zeros(1, 4, dtype=torch.int64)[:, ::2]
    with pytest.raises(Refused, match="contiguous"):
        check_call(aten.ctc_loss.IntList, (torch.zeros(4, 1, 5), labels, [4], [2]), {})
    z = torch.randn(3, 4, dtype=torch.complex64)
    copies = checked_calls._Copies()
    for t in (z, z.conj(), z.t()[1:], torch._neg_view(z.imag), X[0].expand(5, 4), X[:0], X[0, 0], z.imag):
        copy = copies.copy(t)
        assert torch.equal(copy, t)
        assert (copy.stride(), copy.is_conj(), copy.is_neg()) == (t.stride(), t.is_conj(), t.is_neg())
    assert copies.copy(z).data_ptr() == copies.copy(z[:1]).data_ptr() != z.data_ptr()
    first, other = torch.empty(0), torch.empty(0)
    copies.copy(first).resize_(9)
    assert not copies.copy(other).untyped_storage().nbytes()  # at one address, in storages of their own


def test_a_look_inside_changes_nothing():
    x = torch.ones(2, 3, 4)
    before = torch.get_rng_state()
    check_call(
        aten.batch_norm.default, (x, None, None, mean := torch.zeros(3), torch.ones(3), True, 0.1, 1e-5, False), {}
    )
    check_call(aten.dropout.default, (x, 0.5, True), {})
    check_call(aten.linear.default, (x, torch.ones(9, 9)), {})  # wrong: it raises where it is called
    assert torch.equal(torch.get_rng_state(), before)
    assert not mean.any()


# -- what has to fit ---------------------------------------------------------------------------------------

ONE, MANY = torch.ones(1), torch.ones(1, 2, 8, 8)
PLACE = torch.full((1, 2, 8, 8), 10**6)
TWO, ROW, VOLUME, INDEX = torch.ones(2), torch.ones(4), torch.ones(1, 1, 2, 2, 2), torch.zeros(8, dtype=torch.int64)
PATHS = torch.zeros(1, 4, 5)
MISPLACED = {
    "max_pool2d_with_indices_backward": (MANY, MANY, [3, 3], [1, 1], [1, 1], [1, 1], False, PLACE),
    "adaptive_max_pool2d_backward": (MANY, MANY, PLACE),
    "fractional_max_pool2d_backward": (MANY, MANY, [1, 1], [8, 8], PLACE),
    "max_unpool2d": (MANY, PLACE, [8, 8]),
    "_softmax_backward_data": (ONE, MANY, 1, torch.float32),
    "_log_softmax_backward_data": (ONE, MANY, 1, torch.float32),
    "reflection_pad1d_backward": (MANY[0], MANY[0], []),
    "reflection_pad2d_backward": (MANY, MANY, [4, 4, 4, 4]),
    "_adaptive_avg_pool2d_backward": (torch.ones(9, 2, 8, 8), MANY),
    "_weight_norm_interface": (torch.ones(64, 4), torch.ones(1, 1), 0),
    "_cdist_backward": (ONE, X, X, 2.0, ONE),
    "_pdist_backward": (ONE, X, 2.0, ONE),
    "_fused_sgd_": ([X], [ONE], []),
    "native_group_norm": (X, None, None, 8, 400, 1, 1, 1e-5),
    "lu_unpack": (torch.ones(3, 3), torch.full((3,), 10**6, dtype=torch.int32)),
    "linalg_ldl_solve": (torch.ones(3, 3), torch.full((3,), 10**6, dtype=torch.int32), torch.ones(3, 3)),
    "_embedding_bag": (X, FAR, torch.tensor([0])),
    "_ctc_loss": (torch.zeros(4, 1, 5), torch.tensor([[10**8]]), [4], [1]),
    "_pad_packed_sequence": (X, torch.tensor([2, 10**6]), False, 0, -1),
    "_native_batch_norm_legit.no_stats": (MANY, None, None, False, 0.1, 1e-5),
    "_chunk_cat": ([torch.tensor(1.0)], -1, 4),
    # What follows read or wrote past its tensors without a word: found with pages around them that end the process.
    "native_layer_norm_backward": (X, X, [4], ONE, torch.ones(8, 1), ROW, ROW, [True] * 3),
    "native_batch_norm_backward": (MANY, MANY, None, None, None, ONE[:0], ONE[:0], True, 1e-5, [True] * 3),
    "batch_norm_backward": (MANY[:, :, 1:], MANY, TWO, TWO, TWO, TWO, TWO, False, 1e-5, [True] * 3, TWO.byte()),
    "grid_sampler_2d_backward": (MANY[:, :1], MANY, torch.zeros(1, 8, 8, 2), 0, 0, False, [True] * 2),
    "grid_sampler_3d_backward": (ONE.view(1, 1, 1, 1, 1), VOLUME, torch.zeros(1, 2, 2, 2, 3), 0, 0, False, [True] * 2),
    "cudnn_grid_sampler_backward": (MANY, torch.zeros(1, 8, 8, 2), MANY[:, :1]),
    "_scaled_dot_product_flash_attention_for_cpu": (torch.ones(2, 2, 8, 8), MANY, MANY),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (MANY, MANY, MANY, MANY, MANY, ONE, 0.0, False),
    "_adaptive_avg_pool3d_backward": (VOLUME, torch.ones(1, 1, 2, 0, 2)),
    "_upsample_bilinear2d_aa": (MANY, [8, 1 << 15], False, 1.0, 0.9),
    "_upsample_bilinear2d_aa_backward": (torch.ones(1, 2, 8, 64), [8, 64], [1, 2, 8, 8], False, 1.0, 0.9),
    "nll_loss_backward": (ONE[0], X, torch.full((8,), 10**8), None, 1, -100, ONE[0]),
    "multi_margin_loss_backward": (ONE[0], X, torch.full((8,), -1), 1, 1.0),
    "_embedding_bag_per_sample_weights_backward": (X, X, FAR, torch.arange(8), torch.zeros(8, dtype=int), 0),
    "_embedding_bag_dense_backward": (X, INDEX, INDEX + 10**8, INDEX, INDEX, 8, False, 0, None),
    "_embedding_bag_backward": (X, INDEX, INDEX, INDEX[:0], INDEX[:1], INDEX, 8, False, 1, False, None),
    "mkldnn_rnn_layer": (X.view(8, 1, 4), X, X, ROW, ROW, ONE, ONE, False, [], 2, 10**6, 1, True, False, False, True),
    "_ctc_loss.Tensor": (torch.zeros(4, 1, 5), INDEX[None, :2], INDEX[:1] + 4, INDEX[:1] + 3),
    "_ctc_loss_backward": (ONE, torch.zeros(4, 1, 5), INDEX[None, :2], [4], [2], ONE, torch.zeros(1, 4, 3), 0),
    "_ctc_loss_backward.Tensor": (ONE, torch.zeros(4, 1, 5), INDEX[:2], INDEX[:1] + 9, INDEX[:1] + 2, ONE, PATHS, 0),
    "unfold_backward": (torch.ones(2, 3), [5], 0, 4, 1),
    "_weight_int8pack_mm": (X.bfloat16(), X.to(torch.int8), ONE.bfloat16().expand(8)),
    "_weight_int4pack_mm_for_cpu": (torch.ones(4, 64), torch.ones(32, 32).byte(), 32, torch.ones(1, 32, 2)),
    "lstm.data": (X, INDEX[:0], [ONE, ONE], [X, X], False, 1, 0.0, False, False),
    "lstm.input": (torch.ones(5, 2, 3), [torch.ones(8, 2, 4), torch.ones(1, 2, 4)], [X], False, 1, 0.0, *[False] * 3),
    "gru.data": (X, INDEX[:1].expand(8), ONE, [X, X], False, 1, 0.0, False, False),
    "sum.dim_IntList": (X, [0], False),
    # A look at these raised what no command catches.
    "max_unpool3d": (VOLUME, VOLUME.to(torch.complex64), [4, 4, 4], [2, 2, 2], [0, 0, 0]),
    "upsample_nearest1d_backward": (torch.ones(1, 1, 4), [4], [-1, 1, 2]),
    "embedding_dense_backward": (X, FAR.to(torch.uint64), 9, -1, False),
}
NAMED = {
    "_fused_sgd_": {
        "weight_decay": 0.0,
        "momentum": 0.0,
        "lr": 0.1,
        "dampening": 0.0,
        "nesterov": False,
        "maximize": False,
        "is_first_step": True,
    },
    "sum.dim_IntList": {"dtype": 1000},
}


@pytest.mark.parametrize("name", MISPLACED)
def test_arguments_that_do_not_fit_each_other(name):
    with pytest.raises(Refused):
        check_arguments(operator_named(f"aten::{name}"), MISPLACED[name], NAMED.get(name, {}))


def test_states_of_a_layer_are_those_of_its_batch():
    """Steps come first where it is called, also for a module that takes batches first."""
    weights = [torch.ones(16, 3), torch.ones(16, 4), torch.ones(16), torch.ones(16)]
    for n, batch_first in ((2, False), (5, True)):
        states = [torch.zeros(1, n, 4)] * 2
        check_call(aten.lstm.input, (torch.ones(5, 2, 3), states, weights, True, 1, 0.0, False, False, batch_first), {})
        with pytest.raises(Refused, match="states"):
            check_call(aten.lstm.input, (torch.ones(5, 2, 3), states, weights, True, 1, 0.0, False, False, n == 2), {})


def test_scores_of_ctc_may_lie_in_any_order():
    scores = torch.zeros(1, 4, 5).transpose(0, 1)
    check_arguments(operator_named("aten::_ctc_loss"), (scores, INDEX[None, :2], [4], [2]), {})


@pytest.mark.parametrize("expanded", ["mean", "rstd"])
def test_saved_results_lie_dense_in_memory(expanded):
    """The kernel reads as many as the shape says. Gradients are often expanded."""
    saved = {name: torch.ones(1, 1).expand(8, 1) if name == expanded else torch.ones(8, 1) for name in ("mean", "rstd")}
    with pytest.raises(Refused, match=f"elements of {expanded}"):
        check_arguments(aten.native_layer_norm_backward.default, (X, X, [4], *saved.values(), ROW, ROW, [True] * 3), {})
    saved[expanded] = torch.ones(8, 2)[:, :1]
    given = (X[:1].expand(8, 4), X, [4], *saved.values(), ROW, ROW, [True] * 3)
    check_arguments(aten.native_layer_norm_backward.default, given, {})


EXPANDED = {
    "median.dim": ((4, 1), 1, False),
    "nanmedian.dim": ((4, 1), 1, False),
    "native_group_norm": (MANY, (1,), None, 1, 2, 64, 1, 1e-5),
    "native_group_norm_backward": ((1, 2, 1, 1), MANY, ONE[None], ONE[None], TWO, 1, 2, 64, 1, [True] * 3),
    "_scaled_dot_product_flash_attention_for_cpu": (MANY, MANY, (1, 2, 8, 1)),
}
WHOLE = {1: (2,), 2: (4, 4), 4: (1, 2, 8, 8)}


@pytest.mark.parametrize("name", EXPANDED)
def test_kernels_that_take_dense_memory_for_granted(name):
    """A median of five times 1 was NaN: it read what lies behind the one."""
    call = operator_named(f"aten::{name}")
    given = [torch.ones(v).expand(WHOLE[len(v)]) if type(v) is tuple else v for v in EXPANDED[name]]
    with pytest.raises(Refused, match="in the same place"):
        check_arguments(call, given, {})
    check_arguments(call, [v.contiguous() if isinstance(v, torch.Tensor) else v for v in given], {})


@pytest.mark.parametrize("dim", range(4))
def test_attention_has_strides_for_masks_and_all_dimensions_but_the_last(dim):
    """Each model expands its masks, and grouped queries their keys. Run beside guard pages, both passes."""
    call = aten._scaled_dot_product_flash_attention_for_cpu.default
    mask = torch.ones(2, 2, 8, 8).narrow(dim, 0, 1).expand(2, 2, 8, 8)
    check_arguments(call, (torch.ones(2, 2, 8, 8),) * 3, {"attn_mask": mask})
    few = torch.ones(2, 2, 8, 8).narrow(dim, 0, 1).expand(2, 2, 8, 8)
    with contextlib.nullcontext() if dim < 3 else pytest.raises(Refused, match="a row of key"):
        check_arguments(call, (torch.ones(2, 2, 8, 8), few, few), {})


@pytest.mark.parametrize("name", ["tanh_backward", "hardswish_backward", "mse_loss_backward"])
def test_elementwise_backward_passes_broadcast(name):
    """As they do for `torch.func.vmap`; their kernels look at shapes."""
    more = (torch.ones(8, 1), 0) if name.startswith("mse") else ()
    check_arguments(operator_named(f"aten::{name}"), (X[0], X, *more), {})


def test_bags_that_offsets_make_are_those_of_the_gradient():
    """With an empty `offset2bag`, it is made of the offsets."""
    call, none = operator_named("aten::_embedding_bag_backward"), INDEX[:0]
    for offsets, fits in (([0, 4], True), ([0, 4, 8], True), ([0, 2, 4], False), ([1, 4], False), ([], False)):
        given = (X[:2], INDEX, torch.tensor(offsets, dtype=torch.int64), none, none, none, 8, False, 0, False, None)
        with contextlib.nullcontext() if fits else pytest.raises(Refused):
            check_arguments(call, given, {})


@pytest.mark.parametrize("name", ["_embedding_bag", "_embedding_bag_forward_only"])
def test_indices_are_in_a_bag(name):
    """Without one, the kernel adds to the row before the first."""
    call = operator_named(f"aten::{name}")
    for indices, offsets, last in ((INDEX, INDEX[:0], False), (INDEX, INDEX[:1], True)):
        with pytest.raises(Refused, match="no bag"):
            check_arguments(call, (X, indices, offsets, False, 0, False, None, last), {})
    for indices, offsets, last in ((INDEX, INDEX[:1], False), (INDEX[:0], INDEX[:0], False), (INDEX, INDEX[:2], True)):
        check_arguments(call, (X, indices, offsets, False, 0, False, None, last), {})


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_results_of_sparse_products_are_places():
    call = operator_named("aten::_sparse_mm_reduce_impl_backward")
    table, grad, weight, places = X.to_sparse_csr(), torch.ones(8, 2), torch.ones(4, 2), torch.zeros(8, 2, dtype=int)
    check_arguments(call, (table, grad, weight, "amax", places, [True] * 2), {})
    for wrong in (places[0], places + 10**8, places.t()):
        with pytest.raises(Refused):
            check_arguments(call, (table, grad, weight, "amax", wrong, [True] * 2), {})


@pytest.mark.parametrize(
    "name",
    [
        *("_cholesky_solve_helper", "_cummax_helper", "_remove_batch_dim", "_slow_conv2d_backward.output_mask"),
        *("quantized_lstm_cell", "_thnn_differentiable_gru_cell_backward", "_dyn_quant_matmul_4bit"),
    ],
)
def test_what_only_kernels_call(name):
    with pytest.raises(Refused):
        operator_named(f"aten::{name}")


@pytest.mark.parametrize(
    "name",
    [
        *("mkldnn_convolution", "mkldnn_linear", "to_mkldnn", "_nested_select_backward", "quantize_per_channel"),
        *("_convert_weight_to_int4pack_for_cpu", "_weight_int4pack_mm_for_cpu", "_sparse_semi_structured_mm"),
        *("_wrapped_linear_prepack", "_saturate_weight_to_fp16", "_foobar", "slow_conv_transpose2d"),
    ],
)
def test_what_no_program_records(name):
    """An internal operator is called only if it has a line in the list of those that programs record."""
    with pytest.raises(Refused, match="no program records it"):
        operator_named(f"aten::{name}")


@pytest.mark.filterwarnings(
    "ignore:The PyTorch API of nested tensors", "ignore:torch.ao.quantization", "ignore:.*quantize"
)
def test_tensors_whose_kernels_no_look_knows():
    given = {
        "nested": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
        "quantized": torch.quantize_per_tensor(X, 0.1, 0, torch.quint8),
        "_mkldnn": X.to_mkldnn(),
    }
    for kind, t in given.items():
        with pytest.raises(Refused, match=f"self is {kind}"):
            check_arguments(aten.clone.default, (t,), {})
        check_arguments(aten.clone.default, (t,), {}, checked=False)  # of this process
    check_arguments(aten.clone.default, (X.to_sparse(),), {})


# -- what the CPU computes for operators of other devices ----------------------------------------------------

WEIGHTS = [torch.ones(16, 3), torch.ones(16, 4), torch.ones(16), torch.ones(16)]


def _cudnn_rnn(batch, states, cells, n_layers=1):
    x, hx, cx = torch.ones(5, batch, 3), torch.ones(n_layers, states, 4), torch.ones(cells, states, 4)
    how = (2, 4, 0, n_layers, False, 0.0, False, False, [], None)
    return (x, WEIGHTS * n_layers, 4, None, hx, cx, *how)


@pytest.mark.parametrize(("fits", "sizes"), [(True, (2, 2, 1)), (False, (200, 1, 1)), (False, (2, 2, 1, 3))])
def test_states_of_a_layer_of_another_device(fits, sizes):
    """The CPU computes it by its own layers, which read states of a batch of 200 where there was one."""
    call, own = operator_named("aten::_cudnn_rnn"), COUNTERPARTS["aten::_cudnn_rnn"]
    with contextlib.nullcontext() if fits else pytest.raises(Refused, match="state"):
        check_call(call, _cudnn_rnn(*sizes), {}, stand_in=own)


def test_a_thread_of_a_stand_in_is_looked_at(monkeypatch):
    """It runs in a thread, where a mode of this one does not see it."""
    call, own = operator_named("aten::_scaled_dot_product_efficient_attention"), COUNTERPARTS
    q, seen = torch.ones(1, 2, 4, 8), []
    look = checked_calls.check_arguments
    monkeypatch.setattr(checked_calls, "check_arguments", lambda *a, **k: seen.append(a[0].name()) or look(*a, **k))
    check_call(call, (q, q, q, None, False), {}, stand_in=own[call.name()])
    assert "aten::_scaled_dot_product_flash_attention_for_cpu" in seen


def test_recorded_calls_of_other_devices_are_looked_at(monkeypatch):
    """All that run calls of a file name the stand-in."""
    text = "f32[5, 200, 3], [f32[16, 3], f32[16, 4], f32[16], f32[16]], 4, None, f32[1, 1, 4], f32[1, 1, 4]"
    with pytest.raises(UnreadableCall, match="state"):
        sample("aten::_cudnn_rnn", f"{text}, 2, 4, 0, 1, False, 0.0, False, False, [], None", 0)
    given = StoredCall("aten::_cudnn_rnn", _cudnn_rnn(200, 1, 1), {})
    with pytest.raises(DataFileError, match="state"):
        captured_plan(given, checked=True)


def test_a_backward_pass_of_a_layer_gets_what_its_forward_call_returned():
    """Its workspace has a size that only the library knows."""
    weights, x, state = [torch.randn_like(w) for w in WEIGHTS], torch.randn(5, 2, 3), torch.zeros(1, 2, 4)
    how = (False, [], 2, 4, 1, True, False, False, True)
    out, hy, cy, space = aten.mkldnn_rnn_layer.default(x, *weights, state, state, *how)
    reverse, sizes, mode, hidden, n_layers, biases, both, first, train = how

    def given(out=out, hy=hy, cy=cy, grad=None, space=space):
        grads = (torch.ones(5, 2, 4) if grad is None else grad, None, None)
        rest = (reverse, mode, hidden, n_layers, biases, train, both, sizes, first, space)
        return (x, *weights, state, state, out, hy, cy, *grads, *rest)

    call = operator_named("aten::mkldnn_rnn_layer_backward")
    check_call(call, given(), {})
    for wrong in (
        *({"out": out[:1]}, {"hy": hy[:, :1]}, {"cy": cy[..., :1]}, {"grad": torch.ones(5, 2, 1).expand(5, 2, 4)}),
        *({"space": space[:8]}, {"space": space.to(torch.float64)}, {"grad": torch.ones(1, 2, 4)}),
    ):
        with pytest.raises(Refused):
            check_call(call, given(**wrong), {})


@pytest.mark.parametrize("point", [float("nan"), float("inf"), -1e30])
def test_points_of_a_grid_are_places(point):
    """The backward pass wrote where NaN is as an integer."""
    image, grid = torch.ones(2, 3, 8, 8), torch.zeros(2, 4, 4, 2)
    args = (torch.ones(2, 3, 4, 4), image, grid, 0, 1, False, [True, True])
    check_call(aten.grid_sampler_2d_backward.default, args, {})
    grid[1, 2, 3, 0] = point
    with pytest.raises(Refused, match="no place"):
        check_call(aten.grid_sampler_2d_backward.default, args, {})
    with pytest.raises(Refused, match="no place"):
        check_call(aten.grid_sampler.default, (image, grid, 0, 1, False), {})


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn_tanh", "rnn_relu", "miopen_rnn"])
def test_layers_are_no_functions_of_a_graph(name):
    """`torch.lstm` takes states of other layers before anything looks; `aten::lstm` is looked at."""
    text = json.dumps(
        [
            ["placeholder", "x", "", [], {"dict": []}, ["", ""]],
            ["call_function", "y", f"torch.{name}", [], {"dict": []}, ["", ""]],
        ]
    )
    with pytest.raises(UsageError, match="does more than compute"):
        graph_text.from_text(text)


# -- pairs of forms ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("relation", ["permutation", "slice"])
def test_a_form_that_no_file_may_give_is_not_run(monkeypatch, relation):
    """A campaign turns batches around and takes items out: what fits then need not have fitted before."""
    plan = make_plan(aten.nll_loss_backward.default, 0)
    scores, far = torch.randn(3, 4), torch.tensor([0, 10**9, 1])
    args = (torch.ones(3), scores, far, None, 0, -100, torch.tensor(3.0))
    checker, ran = Metamorphic(resolve("cpu")), []
    monkeypatch.setattr(checker._invariance._executor, "run_mirrored", lambda *a: ran.append(a))
    assert checker.first_mismatch(relation, plan, args, {}) is None
    assert not ran
    with pytest.raises(Refused, match="no class"):
        checker._invariance.results(plan, args, {}, first=True)


def test_a_compiled_variant_is_a_graph_of_a_file(monkeypatch):
    """Its runs in float64 are looked at (`test_each_run_of_a_graph_is_looked_at`)."""
    seen = []
    monkeypatch.setattr(
        compiled_variant, "compile_check", lambda *_, **__: seen.append(type(checked_calls.looks_of_file()))
    )
    graph = from_json(
        [
            [["x0", [3], "float32", ["normal", 0.0, 1.0], [], 0, 0, "input"]],
            [["aten::relu", [{"ref": [-1, 0]}], {}, ""]],
            [[0, 0]],
        ]
    )
    compiled_variant.compiled(Variant(Recipe("0a"), graph, Execution()), "eager", torch.device("cpu"))
    assert seen == [checked_calls.CheckedCalls]


class Seen(TorchDispatchMode):
    """Looks at each call of a program as a file's would be looked at."""

    def __init__(self):
        super().__init__()
        self.names, self.refused = set(), []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.name())
        try:
            check_arguments(func, args, kwargs or {})
        except Refused as error:
            self.refused.append((func.name(), str(error)))
        return func(*args, **(kwargs or {}))


PROGRAMS = (
    *("nn.functional.max_pool2d", "nn.functional.max_pool3d", "nn.functional.adaptive_max_pool2d", "pca_lowrank"),
    *("nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d", "nn.functional.max_unpool2d"),
    *("softmax", "log_softmax", "nn.functional.pad", "nn.functional.adaptive_avg_pool2d", "cdist"),
    *("nn.functional.pdist", "nn.functional.group_norm", "nn.functional.batch_norm", "nn.functional.embedding_bag"),
    *("nn.functional.ctc_loss", "nn.functional.scaled_dot_product_attention", "linalg.ldl_solve", "lu_unpack"),
    *("nn.functional.instance_norm", "fft.fft2", "nn.functional.embedding", "linalg.lu_solve", "_chunk_cat"),
    *("nn.functional.layer_norm", "nn.functional.grid_sample", "nn.functional.nll_loss", "nn.functional.interpolate"),
    *("nn.functional.multi_margin_loss", "nn.functional.multilabel_margin_loss", "nn.functional.logsigmoid"),
    *("nn.functional.conv2d", "nn.functional.glu", "nn.functional.cross_entropy", "_upsample_bilinear2d_aa"),
    *("sparse.mm", "nn.functional.upsample_bilinear", "nn.functional.avg_pool2d", "nn.functional.rrelu"),
)


def test_no_call_of_a_program_is_refused():
    """Torch's own samples of all families, forward and backward."""
    infos = [info for info in op_db if info.name in PROGRAMS and torch.float32 in info.dtypes]
    with Seen() as seen, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for info in infos:
            for given in list(info.sample_inputs("cpu", torch.float32, requires_grad=info.supports_autograd))[:12]:
                out = info.op(given.input, *given.args, **given.kwargs)
                outs = [t for t in (out if isinstance(out, (tuple, list)) else [out]) if getattr(t, "requires_grad", 0)]
                if outs:
                    torch.autograd.backward([t.abs().sum() for t in outs])
    assert not [found for found in seen.refused if "api_name" not in found[1]]
    assert sum(has_bounds_check(name.partition(".")[0]) for name in seen.names) > 25


# -- graphs ------------------------------------------------------------------------------------------------


def test_each_run_of_a_graph_is_looked_at():
    """In float32 its index is 0; in float64 it was far outside, and nothing looked at that run."""
    new = fx.Graph()
    x, grad = new.placeholder("x"), new.placeholder("grad")
    rounded = new.call_function(aten.sub.Tensor, (new.call_function(aten.add.Tensor, (x, 1.0)), x))
    far = new.call_function(aten.mul.Tensor, (rounded, 5e8))
    index = new.call_function(aten._to_copy.default, (far,), {"dtype": torch.int64})
    new.output((new.call_function(aten.embedding_dense_backward.default, (grad, index, 3, -1, False)),))
    graph = Graph(fx.GraphModule(torch.nn.Module(), new))
    snapshot = Snapshot.take([torch.full((1,), 1e9), torch.ones(1, 4)])
    runs = graph.runs(snapshot, RandomResults())
    assert runs.truth() is not None
    with checked_calls.graphs_of_file():
        graph.eager(snapshot.fresh())
        assert runs.truth() is None


LAST = object()
GROWING = {
    "a power": [(operator.pow, 2, 10**10)],
    "a shift": [(operator.lshift, 1, 10**12)],
    "a list": [(operator.mul, [1], 10**12)],
    "powers of powers": [(operator.pow, 7, 60), (operator.pow, LAST, 60)],
    "a list that doubles": [(operator.concat, [1] * 30_000, [2]), *[(operator.concat, LAST, LAST)] * 40],
    "a factorial": [(math.factorial, 10**9)],
}


@pytest.mark.parametrize("calls", GROWING.values(), ids=GROWING)
def test_numbers_and_lists_of_a_graph_have_bounds(calls):
    """Python's own take all memory, and hours."""
    new, last = fx.Graph(), None
    x = new.placeholder("x")
    for function, *given in calls:
        last = new.call_function(function, tuple(last if v is LAST else v for v in given))
    new.output(x)
    module = graph_text.from_text(graph_text.to_text(fx.GraphModule(torch.nn.Module(), new)))
    with pytest.raises(Refused, match="too large"):
        graph_text.DenseInterpreter(module).run(X)


def test_a_call_of_a_zoo_gives_no_tensor_for_a_dtype():
    """Calls that depend on no values were not looked at again when those of other calls were there."""
    described = [["x0", [3], "float32", ["constant", 1000.0, 0.0], [], 0, 0, "input"]]
    calls = [["aten::relu", [{"ref": [-1, 0]}], {}, ""]]
    calls.append(["aten::sum.dim_IntList", [{"ref": [-1, 0]}, [0], False], {"dtype": {"ref": [0, 0]}}, ""])
    graph = from_json([described, calls, [[1, 0]]])
    with pytest.raises(Refused, match="dtype is a Tensor"):
        Runner(graph)(make_inputs(graph.inputs))
