"""Private APIs of torch's compiler, each with the versions that have it and what happens without it.

Those of Inductor's regions are in `torchregions.py`. Importing this module imports Dynamo (2 s).
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.metadata
import os
import threading
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.utils import _python_dispatch as _modes

from shadowrun.torch_versions import need, optional

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

__all__ = [
    "MODES_IN_GRAPHS",
    "OWN_BACKENDS",
    "CompileRequest",
    "compiled_functions",
    "fresh_dynamo",
    "graph_breaks",
    "has_saved_tensor_hooks",
    "is_plain_option",
    "mark_boxed",
    "modes",
    "module_of",
    "modules_of_backend",
    "no_modes",
    "own_tracing_context",
    "patched_attribute",
    "profiler_is_on",
    "resolve_backend",
    "same_for_dynamo",
    "through_autograd",
    "uses_cuda_graphs",
    "without_modes",
    "wrapped_backends",
]

Compiler = Any

need(
    *(
        "torch._dynamo.backends.common.aot_autograd",
        "torch._functorch.partitioners.min_cut_rematerialization_partition",
    ),
    *("torch._functorch.aot_autograd.aot_stage2_compile", "torch._guards.TracingContext.try_get"),
    "torch._guards.tracing",
    *("torch._TorchCompileInductorWrapper", "torch._TorchCompileWrapper"),
    *("torch.utils._python_dispatch._disable_current_modes", "torch.utils._python_dispatch._pop_mode"),
    *("torch.utils._python_dispatch._get_current_dispatch_mode_stack", "torch.utils._python_dispatch._push_mode"),
)

_OF_GRAPHS = "scripts for compiled graphs with no_grad or autocast inside"
# Seen on 2.11 and 2.13: what Dynamo writes into its graphs for `no_grad` and `autocast`. Without it, these have no
# script.
_IN_GRAPHS: dict[str, Callable[..., Any] | None] = {
    "torch._C._set_grad_enabled": optional("torch._C._set_grad_enabled", None, _OF_GRAPHS),
    "torch.amp.autocast_mode._enter_autocast": optional("torch.amp.autocast_mode._enter_autocast", None, _OF_GRAPHS),
    "torch.amp.autocast_mode._exit_autocast": optional("torch.amp.autocast_mode._exit_autocast", None, _OF_GRAPHS),
}
MODES_IN_GRAPHS: dict[str, Callable[..., Any]] = {name: f for name, f in _IN_GRAPHS.items() if f is not None}
# Seen on 2.11 and 2.13: compiled code is first called under a mode of torch's own, under which nothing else compiles.
no_modes = _modes._disable_current_modes
# Seen on 2.11 and 2.13: the dispatch modes of this thread, the innermost last.
modes = _modes._get_current_dispatch_mode_stack

_counters: Mapping[str, Mapping[Any, Any]] = optional(
    "torch._dynamo.utils.counters", {}, "graph breaks of compiled programs"
)
_of_inductor: type = optional(
    "torch._functorch._aot_autograd.schemas.SerializableAOTDispatchCompiler",
    type("NoCompiler", (), {}),
    "backends that hand on to Inductor compile anew what its cache has",
)
_top_hooks: Callable[[bool], Any] | None = optional(
    "torch._C._autograd._top_saved_tensors_default_hooks",
    None,
    "compiled graphs are not compared before decompositions",
)
_same: Callable[..., bool] = optional(
    "torch._dynamo.utils.same",
    lambda expected, actual, _, **_options: torch.allclose(expected, actual, rtol=1e-4, atol=1e-4, equal_nan=True),
    "Dynamo's rule for results is allclose",
)
_triton: Any = optional(
    "torch._inductor.config.triton", None, "compiled graphs on a GPU are not compared before decompositions"
)
_cleanup: Any = optional(
    "torch._dynamo.utils.CleanupManager.instance",
    None,
    "calls of what other backends than Inductor compiled earlier are not counted",
)
_registered: Mapping[str, Any] = optional(
    "torch._dynamo.backends.registry._COMPILER_FNS", {}, "backends of torch.compile are taken for functions"
)


OWN_BACKENDS: Final = frozenset(
    {
        *(
            "aot_eager",
            "aot_eager_decomp_partition",
            "aot_eager_decomp_partition_crossref",
            "aot_eager_default_partitioner",
        ),
        *("aot_eager_decomp_partition_with_mode", "eager", "eager_debug", "eager_noexcept", "inductor"),
        "pre_dispatch_eager",
    }
)
"""Backends that need no package but torch: others of torch's registry (``tvm``, ``openxla``) import one."""

# Settings of Inductor that only say how kernels are made. Others name compilers and folders, write what they do into
# files, load from caches of other machines, or leave out the checks of indices.
_INDUCTOR_OPTIONS: Final = frozenset(
    {
        *("aggressive_fusion", "alignment_asserts", "allow_buffer_reuse", "apply_gumbel_max_trick", "b2b_gemm_pass"),
        *("batch_fusion", "batch_invariant", "benchmark_epilogue_fusion", "benchmark_fusion", "combo_kernels"),
        *("combo_kernels_autotune", "comprehensive_padding", "constant_and_index_propagation", "conv_1x1_as_mm"),
        *("coordinate_descent_tuning", "cpp.dynamic_threads", "cpp.enable_concat_linear", "cpp.enable_loop_tail_vec"),
        *("cpp.enable_tiling_heuristics", "cpp.enable_unsafe_math_opt_flag", "cpp.fallback_scatter_reduce_sum"),
        *("cpp.force_inline_kernel", "cpp.max_horizontal_fusion_size", "cpp.min_chunk_size", "cpp.no_redundant_loops"),
        *("cpp.simdlen", "cpp.threads", "cpp.use_decompose_tanh", "cpp.use_small_dequant_buffer", "cpp.weight_prepack"),
        *("cuda.use_fast_math", "dce", "decompose_mem_bound_mm", "delay_realize_cheap_outputs"),
        *("deterministic", "disable_padding_cpu", "dynamic_scale_rblock", "emulate_precision_casts"),
        *("epilogue_fusion", "epilogue_fusion_first", "expand_dimension_for_pointwise_nodes", "fallback_random"),
        *("force_disable_caches", "force_fuse_int_mm_with_mul", "force_layout_optimization", "force_pointwise_cat"),
        *("force_shape_pad", "freezing", "fx_graph_cache", "graph_partition", "group_fusion", "implicit_fallbacks"),
        *("inplace_buffers", "inplace_padding", "joint_graph_constant_folding", "keep_output_stride"),
        *("layout_optimization", "loop_ordering_after_fusion", "max_autotune", "max_autotune_gemm"),
        *("max_autotune_pointwise", "max_fusion_size", "max_pointwise_cat_inputs", "memory_planning", "nan_asserts"),
        *("online_softmax", "optimize_scatter_upon_const_tensor", "pad_channels_last", "pad_outputs"),
        *("padding_alignment_bytes", "padding_stride_threshold", "pattern_matcher", "permute_fusion"),
        *("pick_loop_orders", "prologue_fusion", "realize_opcount_threshold", "realize_reads_threshold"),
        *("reorder_for_locality", "reorder_for_peak_memory", "shape_padding", "size_asserts", "split_cat_fx_passes"),
        *(
            "split_reductions",
            "triton.codegen_upcast_to_fp32",
            "triton.cooperative_reductions",
            "triton.cudagraph_trees",
        ),
        *("triton.cudagraphs", "triton.dense_indexing", "triton.divisible_by_16", "triton.max_tiles"),
        *("triton.multi_kernel", "triton.persistent_reductions", "triton.prefer_nd_tiling", "triton.tile_reductions"),
        *("triton.tiling_prevents_pointwise_fusion", "triton.tiling_prevents_reduction_fusion"),
        *("triton.use_block_ptr", "unroll_reductions_threshold", "use_fast_math", "use_mixed_mm"),
    }
)
_INDUCTOR_WORDS: Final = {
    "cpp.inject_log1p_bug_TESTING_ONLY": ("accuracy",),
    "cpp.inject_relu_bug_TESTING_ONLY": ("accuracy", "compile_error", "runtime_error"),
    "triton.inject_relu_bug_TESTING_ONLY": ("accuracy", "compile_error", "runtime_error"),
    "layout_opt_default": ("0", "1"),
}
_MAX_WORD: Final = 40
_THREADS: Final = "cpp.threads"


def is_plain_option(backend: str, name: str, value: Any) -> bool:
    """Whether an option of a backend may be taken from a file.

    Seen on 2.11 and 2.13: ``options={"cpp.cxx": ...}`` names the compiler that Inductor starts.

    Args:
        backend: Its name; that of a function, for which numbers and words are taken.
        name: Of the option.
        value: Of the option.
    """
    is_number = value is None or isinstance(value, (bool, int, float))
    if backend == "inductor" and name == _THREADS and is_number:
        # OpenMP ends the process where it cannot start them. -1 is the default: those of the process.
        return type(value) is int and (value == -1 or 1 <= value <= (os.cpu_count() or 1))
    if backend == "inductor":
        return (is_number and name in _INDUCTOR_OPTIONS) or value in _INDUCTOR_WORDS.get(name, ())
    is_word = isinstance(value, str) and len(value) <= _MAX_WORD and value.replace("-", "_").isidentifier()
    return name.isidentifier() and (is_number or is_word)


def resolve_backend(
    backend: Any, mode: str | None, options: Mapping[str, Any] | None, dynamic: bool | None
) -> Compiler:
    """What `torch.compile` makes of its arguments: takes a graph and inputs, returns a callable.

    Seen on 2.11 and 2.13. Unlike `torch.compile`, Inductor's takes mode and options together. Without it, a graph
    cannot be compiled exactly as `torch.compile(backend=..., mode=...)` would.
    """
    if backend == "inductor":
        return torch._TorchCompileInductorWrapper(mode, dict(options or {}), dynamic)  # type: ignore[no-untyped-call]
    return torch._TorchCompileWrapper(backend, mode, dict(options or {}) or None, dynamic)  # type: ignore[no-untyped-call]


def through_autograd(forward: Callable[..., Any], backward: Callable[..., Any], inference: Callable[..., Any]) -> Any:
    """A backend that splits a graph of Dynamo's into forward and backward of plain operators, as eager runs them.

    Seen on 2.11 and 2.13. No decompositions: what a backend replaces is inside the graphs that it is handed, so that a
    wrong decomposition is a deviation like any other. The partition is Inductor's.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    return aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=min_cut_rematerialization_partition,
        # As Inductor does: an inference graph writes to its inputs itself.
        keep_inference_input_mutations=True,
    )


def mark_boxed(function: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Mark a function that takes its inputs as one list, which it may empty. Seen on 2.11 and 2.13."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def graph_breaks() -> dict[str, int]:
    """Reasons of the graph breaks so far in this process, and how often. Seen on 2.11 and 2.13."""
    return {str(reason): int(n) for reason, n in _counters.get("graph_break", {}).items()}


@contextlib.contextmanager
def without_modes(unwanted: Callable[[Any], bool]) -> Iterator[None]:
    """Take some dispatch modes of this thread away; the others stay in their order. Seen on 2.11 and 2.13."""
    # Torch has a stack only: modes below the unwanted ones can be reached by popping all.
    stack = [_modes._pop_mode() for _ in modes()]
    wanted = [mode for mode in reversed(stack) if not unwanted(mode)]
    for mode in wanted:
        _modes._push_mode(mode)
    try:
        yield
    finally:
        for _ in wanted:
            _modes._pop_mode()
        for mode in reversed(stack):
            _modes._push_mode(mode)


@contextlib.contextmanager
def fresh_dynamo() -> Iterator[None]:
    """Nothing compiled before is met inside, and nothing compiled inside afterwards.

    The caches of Inductor's results stay: they are keyed by what was compiled.
    """
    torch.compiler.reset()
    try:
        yield
    finally:
        torch.compiler.reset()


@contextlib.contextmanager
def own_tracing_context() -> Iterator[None]:
    """What is compiled inside leaves nothing behind in the current compilation.

    Seen on 2.13 (`torch._guards.TracingContext`). Without it, two backends that are given one graph share its record.
    """
    context = torch._guards.TracingContext.try_get()
    if context is None:
        yield
    else:
        with torch._guards.tracing(torch._guards.TracingContext(context.fake_mode)):
            yield


class CompileRequest(NamedTuple):
    """What was asked of `torch.compile`.

    Attributes:
        backend: A name, if it is registered by that, or a function.
        name: As a reader knows it.
        mode, options, dynamic: As they were given.
        wrapper: What Dynamo calls: it takes a graph and inputs.
    """

    backend: Any
    name: str
    mode: str | None
    options: Mapping[str, Any]
    dynamic: bool | None
    wrapper: Compiler


class _Compiling(threading.local):
    """The backend at work in this thread, and whether it went through AOT autograd."""

    request: CompileRequest | None = None
    split = False


_compiling = _Compiling()
# Backends of torch that call the graph's operators one by one, seen on 2.11 and 2.13.
_ONE_BY_ONE = frozenset(
    {
        "aot_eager",
        "aot_eager_decomp_partition",
        "aot_eager_decomp_partition_crossref",
        "aot_eager_decomp_partition_with_mode",
        "aot_eager_default_partitioner",
        "eager",
        "eager_debug",
        "eager_noexcept",
        "pre_dispatch_eager",
    }
)


def _wrapped_compiler(compiler: Any, wrap: Callable[[Any, CompileRequest, bool], Callable[[Any], Any]]) -> Any:
    """A compiler that AOT autograd calls, wrapped: of a forward graph, or of a backward one."""
    request = _compiling.request
    if compiler is None or request is None or isinstance(compiler, _of_inductor):
        return compiler  # Inductor's wraps its regions itself

    @functools.wraps(compiler)
    def compile_graph(module: Any, inputs: Any) -> Any:
        finish = wrap(module, request, True)
        code = compiler(module, inputs)
        # Code of Inductor, reached through another backend: its region is wrapped there.
        return code if hasattr(code, "_wrap_compiled_regions") else finish(code)

    return compile_graph


@contextlib.contextmanager
def wrapped_backends(
    wrap: Callable[[Any, CompileRequest, bool], Callable[[Any], Any]], whole: Callable[[Any, CompileRequest], Any]
) -> Iterator[None]:
    """While inside, call `wrap` with each graph that a backend other than Inductor compiles; it may replace the code.

    Seen on 2.11 and 2.13: Dynamo calls backends by `torch._TorchCompileWrapper`, and AOT autograd their compilers in
    its second stage. Neither is part of a guard, so nothing is compiled anew.

    Args:
        wrap: Takes a graph, before it is compiled, what was asked of `torch.compile`, and whether the graph is one of
            plain operators (forward or backward); returns a function from the code to what is used in its place.
        whole: A context for each graph of Dynamo's while it is compiled, by Inductor too, which gives such a function;
            it is used where AOT autograd splits the graph.
    """
    aot: Any = importlib.import_module("torch._functorch.aot_autograd")
    original, original_stage = torch._TorchCompileWrapper.__call__, aot.aot_stage2_compile
    original_inductor: Any = torch._TorchCompileInductorWrapper.__call__

    @functools.wraps(original)
    def call(self: Any, module: Any, inputs: Any) -> Any:
        # Such a backend compiles nothing: its operators pass the comparison one by one.
        if _is_one_by_one(self):
            return original(self, module, inputs)  # type: ignore[no-untyped-call]
        # Put back afterwards: a backend may compile a part by another one, in the same thread.
        before = _compiling.request, _compiling.split
        request = _asked(self)
        _compiling.request, _compiling.split = request, False
        try:
            finish = wrap(module, request, False)
            with whole(module, request) as finish_whole:
                code: Any = original(self, module, inputs)  # type: ignore[no-untyped-call]
            return finish_whole(code) if _compiling.split else finish(code)
        finally:
            _compiling.request, _compiling.split = before

    @functools.wraps(original_inductor)
    def call_inductor(self: Any, module: Any, inputs: Any, **named: Any) -> Any:
        options = dict(self.config)
        with whole(module, CompileRequest("inductor", "inductor", None, options, self.dynamic, self)) as finish:
            code = original_inductor(self, module, inputs, **named)
        return finish(code)

    @functools.wraps(original_stage)
    def stage(state: Any, capture: Any, partition: Any, *compilers: Any, **named: Any) -> Any:
        # A backend that went through AOTAutograd has regions for forward and backward; the outer code is no region of
        # its own.
        _compiling.split = True
        named = {k: _wrapped_compiler(c, wrap) for k, c in named.items()}
        return original_stage(state, capture, partition, *(_wrapped_compiler(c, wrap) for c in compilers), **named)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patched_attribute(torch._TorchCompileWrapper, "__call__", call))
        stack.enter_context(patched_attribute(torch._TorchCompileInductorWrapper, "__call__", call_inductor))
        stack.enter_context(patched_attribute(aot, "aot_stage2_compile", stage))
        yield


@contextlib.contextmanager
def patched_attribute(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Replace an attribute of torch while inside; on exit it is restored, unless other code has replaced it."""
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if getattr(owner, name) is replacement:
            setattr(owner, name, original)


def has_saved_tensor_hooks() -> bool:
    """Whether the user has hooks on saved tensors, or may have. Seen on 2.13."""
    return _top_hooks is None or _top_hooks(True) is not None


def uses_cuda_graphs(request: CompileRequest) -> bool:
    """Whether a backend's code may be a CUDA graph, which another run would disturb. Seen on 2.11 and 2.13."""
    default = True if _triton is None else getattr(_triton, "cudagraphs", True)
    known = bool(request.options.get("triton.cudagraphs", default))
    return known or request.name == "cudagraphs" or request.mode in ("reduce-overhead", "max-autotune")


def compiled_functions() -> Iterator[tuple[dict[str, Any], str]]:
    """Where code that Dynamo has made calls what backends returned: global variables of the user's modules.

    Seen on 2.11 and 2.13 (`CleanupManager`). No guard is on them. Without it, calls of what was compiled earlier by
    backends other than Inductor are not counted.
    """
    # A list: a code object that is freed during the loop removes its entry.
    for hooks in [] if _cleanup is None else list(_cleanup.values.values()):
        yield from ((h.scope, h.name) for h in hooks if h.name.startswith("__compiled_fn"))


def _is_one_by_one(wrapper: Any) -> bool:
    return wrapper.compiler_name in _ONE_BY_ONE and _is_registered(wrapper)


def _is_registered(wrapper: Any) -> bool:
    """Whether the backend is the one of that name. Seen on 2.11 and 2.13; without it, it is taken for a function."""
    return _registered.get(wrapper.compiler_name) is wrapper.compiler_fn


def _asked(wrapper: Any) -> CompileRequest:
    name, given = str(wrapper.compiler_name), wrapper.kwargs
    backend = name if _is_registered(wrapper) else wrapper.compiler_fn
    return CompileRequest(backend, name, given.get("mode"), given.get("options") or {}, wrapper.dynamic, wrapper)


def module_of(resolve_backend: Compiler) -> str:
    """Name of the module that has the function behind a compiler; empty for Inductor's. Seen on 2.11 and 2.13."""
    return _module(getattr(resolve_backend, "compiler_fn", None))


def _module(function: Any) -> str:
    # Of the package that made it: `aot_autograd` and `partial` give objects of torch's and Python's classes.
    given = getattr(function, "kwargs", None)
    function = given.get("fw_compiler", function) if isinstance(given, dict) else function
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__module__", ""))


def modules_of_backend(name: str) -> set[str]:
    """The module that has registered a backend; those of packages with an entry point of its name, if none has.

    Seen on 2.11 and 2.13: torch imports the latter to find it.
    """
    torch.compiler.list_backends()  # torch registers its own, such as `tvm`, which imports a package, when first asked
    if name in _registered:
        return {_module(_registered[name])}
    return {entry.module for entry in importlib.metadata.entry_points(group="torch_dynamo_backends", name=name)}


def profiler_is_on() -> bool:
    """Whether a profiler of the user's is running.

    Seen on 2.11 and 2.13. Without ``torch.autograd._profiler_enabled``, peak memory would not be measured.
    """
    enabled = getattr(torch.autograd, "_profiler_enabled", None)
    return enabled is None or bool(enabled())


def same_for_dynamo(expected: torch.Tensor, actual: torch.Tensor, exact: torch.Tensor) -> bool:
    """Whether torch's own rule for compiled models accepts a result.

    Args:
        expected: Result of the reference.
        actual: Result of the target.
        exact: The result in float64, or `expected` again where there is none.
    """
    # Without a logger: it would log each difference as an error. Seen on 2.13 and 2.15.
    return bool(_same(expected, actual, exact, equal_nan=True, log_error=lambda *_: None))
