"""The private torch APIs that platforms need, each wrapped once.

Seen on torch 2.11.0 and 2.13.0, where no other version is named.
"""

from __future__ import annotations

import contextlib
import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _python_dispatch as _modes

from shadowrun.torch_versions import need

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

__all__ = [
    "allow_tf32",
    "below_autograd",
    "compute_lazy",
    "cuda_driver_version",
    "cuda_precisions",
    "cuda_stream_reader",
    "deterministic_state",
    "dispatch_key",
    "init_lazy",
    "kernel_route",
    "kernel_settings",
    "lazy_available",
    "mkldnn_enabled",
    "mkldnn_precision",
    "prepare_wrapped_numbers",
    "private_device_name",
    "private_device_present",
    "set_cuda_precisions",
    "set_deterministic_state",
    "set_kernel_settings",
    "set_mkldnn_enabled",
    "set_mkldnn_precision",
    "wait_for_lazy",
    "wait_for_running_lazy_graphs",
    "watching_registrations",
    "wrapped_number",
]

need(
    *("torch._C.DispatchKey", "torch._C._AutoDispatchBelowAutograd"),
    *("torch._C._dispatch_has_kernel_for_dispatch_key", "torch._C._dispatch_get_registrations_for_dispatch_key"),
    *("torch._C._dispatch_has_backend_fallback", "torch._C._dispatch_key_for_device"),
    *("torch._C._get_privateuse1_backend_name", "torch._C._get_mkldnn_enabled", "torch._C._set_mkldnn_enabled"),
    *("torch._C._get_deterministic_algorithms", "torch._C._get_deterministic_algorithms_warn_only"),
    *("torch._C._set_deterministic_algorithms", "torch._C._get_fp32_precision_getter"),
    *("torch._C._set_fp32_precision_setter", "torch._C._get_float32_matmul_precision"),
    *("torch._C._set_float32_matmul_precision", "torch._C._get_cudnn_allow_tf32", "torch._C._set_cudnn_allow_tf32"),
    *("torch._C._set_cublas_allow_tf32", "torch.utils._python_dispatch._disable_current_modes"),
)
_LAZY = (
    *("torch._lazy.ts_backend.init", "torch._lazy.mark_step", "torch._lazy.wait_device_ops"),
    *("torch._C._lazy._sync_multi", "torch._C._lazy._wait_device_ops", "torch._is_functional_tensor"),
    *("torch._functionalize_sync", "torch._from_functional_tensor"),
    *("torch._lazy.metrics.counter_names", "torch._lazy.metrics.counter_value"),
)

_lazy_ready = False
_CUDA_PRODUCTS = ("matmul", "conv", "rnn")


def private_device_name() -> str:
    """Name of torch's private-use device: ``privateuseone`` until a plug-in or `sim` renames it.

    Without ``torch._C._get_privateuse1_backend_name`` only the plug-in's own import could be asked.
    """
    return torch._C._get_privateuse1_backend_name()


@contextlib.contextmanager
def watching_registrations(registered: Callable[[], None]) -> Iterator[None]:
    """While inside, call `registered` after torch's private-use device got its name, a device its module, or a kernel.

    Seen on 2.11 to 2.13 (`torch._register_device_module`, `torch.utils.rename_privateuse1_backend`). A plug-in that
    registers from C++ alone is not noticed: `--import` it.
    """

    def noticing(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def register(*args: Any, **kwargs: Any) -> Any:
            done = original(*args, **kwargs)
            registered()
            return done

        return register

    with contextlib.ExitStack() as undo:
        places: tuple[tuple[Any, str], ...] = (
            (torch, "_register_device_module"),
            (torch.utils, "rename_privateuse1_backend"),
            (torch.utils.backend_registration, "rename_privateuse1_backend"),
            (torch.library.Library, "impl"),
        )
        # Python code of plug-ins passes one of these; kernels registered by C++ alone cannot be noticed.
        for module, name in places:
            original = getattr(module, name, None)
            if original is not None:
                undo.callback(setattr, module, name, original)
                setattr(module, name, noticing(original))
        yield


def private_device_present() -> bool:
    """Whether some plug-in has registered kernels for the private-use device.

    Without ``torch._C._dispatch_has_kernel_for_dispatch_key`` only its name could be asked, which it need not change.
    """
    return torch._C._dispatch_has_kernel_for_dispatch_key("aten::empty.memory_format", "PrivateUse1")


def dispatch_key(device_type: str) -> str:
    """Name of the dispatch key that kernels of a device are registered under: ``CPU``, ``PrivateUse1``.

    Without ``torch._C._dispatch_key_for_device`` a table of device types would do.
    """
    if device_type == private_device_name():
        # The renamed device's name is no key: its kernels stay under PrivateUse1.
        return "PrivateUse1"
    return torch._C._dispatch_key_for_device(device_type)


def kernels_registered(key: str) -> bool:
    """Whether this process has the kernels of a dispatch key's device, which cannot do without this one.

    Without ``torch._C._dispatch_has_kernel_for_dispatch_key`` static coverage has no answers.
    """
    return has_kernel("aten::empty.memory_format", key)


def has_kernel(op: str, key: str) -> bool:
    """Whether this process has a kernel for an operator and a dispatch key; False if it has no such operator.

    Seen on 2.11 and 2.13: an operator that is not registered raises a `RuntimeError`.
    """
    try:
        return torch._C._dispatch_has_kernel_for_dispatch_key(op, key)
    except RuntimeError:
        return False


def registrations(key: str) -> list[str]:
    """Operators with a kernel registered for a dispatch key.

    Seen on 2.11 and 2.13. Without it, each operator could be asked for by itself.
    """
    return torch._C._dispatch_get_registrations_for_dispatch_key(key)


def has_backend_fallback(key: str) -> bool:
    """Whether a dispatch key has a backend fallback, which nearly always runs operators on the CPU.

    Seen on 2.11 and 2.13. Without it, operators would be called absent that fall back.
    """
    return torch._C._dispatch_has_backend_fallback(getattr(torch._C.DispatchKey, key))


def mkldnn_enabled() -> bool:
    """Whether oneDNN kernels may be chosen.

    The public ``torch.backends.mkldnn.enabled`` refuses to be set after ``disable_global_flags()``,
    which test suites call; hence the functions below it.
    """
    return torch._C._get_mkldnn_enabled()


def set_mkldnn_enabled(enabled: bool) -> None:
    """Set what `mkldnn_enabled` reads."""
    torch._C._set_mkldnn_enabled(enabled)


def deterministic_state() -> tuple[bool, bool]:
    """Whether deterministic algorithms are asked for, and whether a lack only warns."""
    return torch._C._get_deterministic_algorithms(), torch._C._get_deterministic_algorithms_warn_only()


def set_deterministic_state(state: tuple[bool, bool]) -> None:
    """Set what `deterministic_state` reads.

    The public ``torch.use_deterministic_algorithms`` also changes the configuration of the inductor
    compiler, which a replay must leave alone.
    """
    mode, warn_only = state
    torch._C._set_deterministic_algorithms(mode, warn_only=warn_only)


def mkldnn_precision() -> str:
    """Precision of oneDNN's float32 products: ``none`` (not set), ``ieee``, ``tf32``, ``bf16``.

    Without ``torch._C._get_fp32_precision_getter`` (torch before 2.9) there is only
    ``torch.get_float32_matmul_precision``, which raises once a program used the old and the new API.
    """
    return str(torch._C._get_fp32_precision_getter("mkldnn", "matmul"))


def set_mkldnn_precision(precision: str) -> None:
    """Set what `mkldnn_precision` reads, and nothing of other devices."""
    torch._C._set_fp32_precision_setter("mkldnn", "matmul", precision)


def cuda_precisions() -> tuple[Any, ...]:
    """Settings of CUDA's float32 products: the old ones, the new ones of CUDA, and oneDNN's.

    Seen on 2.13, on a build without CUDA. An old setting cannot be read once a program has used both APIs; CUDA's own
    products raise then too.
    """
    read = torch._C._get_fp32_precision_getter
    # None: cannot be read, and is left as it is.
    old: list[Any] = [None, None]
    for i, get in enumerate((torch._C._get_float32_matmul_precision, torch._C._get_cudnn_allow_tf32)):
        with contextlib.suppress(RuntimeError):
            old[i] = get()
    return (*old, *(str(read("cuda", what)) for what in _CUDA_PRODUCTS), mkldnn_precision())


def set_cuda_precisions(state: tuple[Any, ...]) -> None:
    """Set what `cuda_precisions` reads."""
    products, cudnn, *new, mkldnn = state
    # Old settings come first: setting them overwrites the new ones.
    if products is not None:
        torch._C._set_float32_matmul_precision(products)
    if cudnn is not None:
        torch._C._set_cudnn_allow_tf32(cudnn)
    for what, precision in zip(_CUDA_PRODUCTS, new, strict=True):
        torch._C._set_fp32_precision_setter("cuda", what, precision)
    set_mkldnn_precision(mkldnn)


def allow_tf32(allowed: bool) -> None:
    """Whether CUDA may round the inputs of float32 products and convolutions to tf32.

    Both the old and the new setting are made: products on CUDA raise if they differ.
    """
    mkldnn = mkldnn_precision()
    torch._C._set_cublas_allow_tf32(allowed)
    torch._C._set_cudnn_allow_tf32(allowed)
    for what in _CUDA_PRODUCTS:
        torch._C._set_fp32_precision_setter("cuda", what, "tf32" if allowed else "ieee")
    set_mkldnn_precision(mkldnn)


def kernel_settings() -> tuple[Any, ...]:
    """The program's settings that CPU kernels read, in the order of `set_kernel_settings`."""
    return (
        torch.get_num_threads(),
        mkldnn_enabled(),
        deterministic_state(),
        mkldnn_precision(),
        torch.get_default_dtype(),
    )


def set_kernel_settings(state: tuple[Any, ...]) -> None:
    """Set what `kernel_settings` reads, in another process."""
    threads, mkldnn, deterministic, precision, dtype = state
    torch.set_num_threads(threads)
    set_mkldnn_enabled(mkldnn)
    set_deterministic_state(deterministic)
    set_mkldnn_precision(precision)
    torch.set_default_dtype(dtype)


def below_autograd() -> Any:
    """Context in which operators go to their kernels at once, as they do inside a dispatch mode's handler.

    Without ``torch._C._AutoDispatchBelowAutograd`` they run through autograd, which records nothing under no_grad.
    """
    return torch._C._AutoDispatchBelowAutograd()


def cuda_stream_reader() -> Callable[[int], int] | None:
    """What gives the handle of the current stream of a device, by its index; None in builds without CUDA.

    Seen on 2.11 and 2.13 (0.1 µs; an object for the stream takes 2 µs).
    """
    found: Callable[[int], int] | None = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return found


def lazy_available() -> bool:
    """Whether this torch was built with the lazy device; all wheels of PyPI were."""
    try:
        import torch._lazy.ts_backend
    except ImportError:
        return False
    return hasattr(torch._C, "_lazy_ts_backend")


def init_lazy() -> None:
    """Start the lazy device, once per process.

    Without ``torch._lazy.ts_backend.init`` the lazy device has no kernels.
    """
    global _lazy_ready  # noqa: PLW0603 - the state is torch's and process-wide
    if not _lazy_ready:
        # Asked for late: a torch without lazy must still run everything else.
        need(*_LAZY)
        import torch._lazy.metrics  # the fallback counters, which `backends` names
        import torch._lazy.ts_backend

        try:
            torch._lazy.ts_backend.init()  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            # The program has started it: torch would register its kernels a second time, and refuses.
            if "multiple backend fallbacks" not in str(error):
                raise
        else:
            _let_the_program_start_lazy()
        _lazy_ready = True


def _let_the_program_start_lazy() -> None:
    """Make the program's first start of the lazy device do nothing: it is started, and torch refuses a second start."""
    import torch._lazy.ts_backend as backend

    original = backend.init

    def init() -> None:
        # Once: a second start by the program raises, as it does without a comparison.
        if backend.init is init:
            backend.init = original
        else:
            original()  # type: ignore[no-untyped-call]

    backend.init = init


def kernel_route(op: str, key: str) -> str:
    """How the dispatch table routes an operator for a key: ``kernel``, ``backend fallback``, ``math kernel``, or "".

    Without ``torch._C._dispatch_dump_table`` the answer is "". It is unreliable alone: a backend may handle an operator
    under another key, and a functional operator may fall back in its out variant.
    """
    dump = getattr(torch._C, "_dispatch_dump_table", None)
    if dump is None:
        return ""
    # dlprim's relu is listed as a fallback, and handled in autograd; functional operators are listed with a default
    # kernel, and fall back inside of their `out` form.
    for line in dump(op).splitlines():
        if line.startswith(f"{key}:"):
            return str(line.rpartition("[")[2].rstrip("]"))
    return ""


def wait_for_lazy() -> None:
    """Run the pending graphs of the lazy device, and wait for them.

    Without ``torch._lazy`` there is no lazy device.
    """
    import torch._lazy

    # `wait_device_ops` waits for running graphs only: pending ones have to be started first.
    torch._lazy.mark_step(wait=True)
    torch._lazy.wait_device_ops()  # type: ignore[no-untyped-call]


def compute_lazy(tensors: list[torch.Tensor]) -> None:
    """Compute these lazy tensors, which then hold values instead of graphs.

    Without ``torch._C._lazy._sync_multi`` there is `wait_for_lazy`, which does so to all lazy tensors of the program.
    """
    # Not `mark_step`: that would run the program's pending graphs as well.
    torch._C._lazy._sync_multi([t for t in tensors if t.device.type == "lazy"], [], True, True)


def wait_for_running_lazy_graphs() -> None:
    """Wait for the graphs of the lazy device that are running.

    Without ``torch._C._lazy._wait_device_ops`` a graph that the program does not wait for may draw random numbers
    between two replays.
    """
    torch._C._lazy._wait_device_ops([])


def cuda_driver_version() -> str:
    """Newest CUDA version that the installed driver supports, ``12.4``; empty where it cannot be asked.

    Not run on a machine with CUDA. Without ``torch._C._cuda_getDriverVersion`` fingerprints lack the driver.
    """
    read = getattr(torch._C, "_cuda_getDriverVersion", None)
    if read is None:
        return ""
    number = int(read())
    return f"{number // 1000}.{number % 1000 // 10}"


_wrapped: dict[type, torch.Tensor] = {}


def prepare_wrapped_numbers() -> None:
    """Make the templates of `wrapped_number`: one tensor of each type of number."""
    if _wrapped:
        return
    # The product needs a node of autograd, and must not be observed as a call of the program.
    with _modes._disable_current_modes(), torch.inference_mode(mode=False), torch.enable_grad():
        for number in (True, 1, 1.0, 1j):
            like = torch.ones((), dtype=torch.complex128, device="cpu", requires_grad=True)
            # Autograd keeps the number of a product as the tensor that C++ made of it, and shows it as such.
            _wrapped[type(number)] = (like * number).grad_fn._saved_other  # type: ignore[union-attr]


def wrapped_number(number: complex) -> torch.Tensor:
    """The tensor that torch makes of a Python number (a "wrapped number", of lower rank in type promotion).

    torch gives such tensors to Python kernels as numbers, and takes no numbers back. Seen on 2.11 and 2.13.
    Without ``_saved_other`` an ordinary tensor would do, with another result dtype for 0-dimensional inputs.
    """
    like = _wrapped[type(number)]
    # Views and copies are ordinary tensors again; `detach` keeps the mark, and `set_` too.
    value = torch.tensor(number, dtype=like.dtype, device="cpu")
    return like.detach().set_(value.untyped_storage(), 0, (), ())
