from collections.abc import Callable, Iterable
from typing import Any

import torch

VERSION: int
SOURCES: int

def setup_tensors(tensor: type, parameter: type, exact: frozenset[type], strided: torch.layout) -> bool: ...
def setup_shim(tensor: torch.Tensor, cdata: int, n_dims: int, sizes: int, dtype: int, device: int, /) -> bool: ...
def setup_places(samples: tuple[tuple[torch.Tensor, int], ...], strides: int, offset: int, size: int, /) -> bool: ...
def place(tensor: torch.Tensor, /) -> tuple[Any, ...] | None: ...
def setup_storage_rows(functions: tuple[Callable[..., Any], ...], /) -> None: ...
def plainly_equal(actual: Any, expected: Any) -> bool: ...
def statistics(
    actual: int,
    expected: int,
    n: int,
    n_bytes: int,
    form: tuple[str, float, float, bool, bytes | None],
    instructions: str | None = None,
    /,
) -> tuple[Any, ...]: ...
def setup_diff(
    diff: type, meta: type, formats: tuple[tuple[int, int, str, int, tuple[str, float, float, bool, bytes | None]], ...]
) -> bool: ...
def diff(name: str, actual: Any, expected: Any) -> Any: ...
def differing(
    actual: int, expected: int, n: int, width: int, mantissa: int, where: int, kinds: int, most: int, /
) -> tuple[int, int]: ...
def add_rounded_product(
    out: torch.Tensor,
    matrix: torch.Tensor,
    vector: torch.Tensor,
    rounding: tuple[int, int, int, int],
    instructions: str | None = None,
    /,
) -> bool: ...
def nearness(
    actual: torch.Tensor,
    expected: torch.Tensor,
    relative: float,
    absolute: float,
    weighted: bool,
    instructions: str | None = None,
    /,
) -> tuple[bytearray, float, float, float] | None: ...
def product_sketch(
    left: torch.Tensor,
    right: torch.Tensor,
    actual: torch.Tensor,
    vector: torch.Tensor,
    start: torch.Tensor | None,
    factor: float,
    rounding: tuple[int, int, int, int],
    instructions: str | None = None,
    /,
) -> tuple[float, float] | None: ...
def context_key(
    index: int, device: torch.device, origin: tuple[str, str, str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]: ...
def setup_digests(formats: tuple[tuple[int, int, int, int, float, bytes | None], ...], /) -> None: ...
def digest(tensor: torch.Tensor, n_ladders: int, /) -> tuple[bytes, bytes, bytes, bytes] | None: ...
def digest_memory(
    address: int, n: int, n_rows: int, n_ladders: int, form: int, parts: int, instructions: str | None = None, /
) -> tuple[bytes, bytes, bytes, bytes]: ...
def call_rows(pages: bytes, page_size: int, usable: int, after: float, /) -> bytes | None: ...
def keep_heap() -> None: ...
def install_dispatch_slot(mode: type, /) -> None: ...

class WatchSchedule:
    def __init__(self, first: int, rarer: int, free: int, share: int, /) -> None: ...
    def is_due(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any], /) -> bool: ...
    def watch_always(self, index: int, /) -> None: ...
    def is_always(self, index: int, /) -> bool: ...

class DispatchMethod:
    def __call__(
        self, func: object, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None, /
    ) -> Any: ...
    def leave(self) -> None: ...

class Origins:
    module_call: object
    def __init__(
        self,
        threads: object,
        kinds: dict[str, int],
        found: dict[tuple[int, int], Any],
        mark: type,
        phases: tuple[str, str, str],
        node: Callable[[], Any],
        number: Callable[[], int],
        find: Callable[[int], Any],
        max_links: int,
    ) -> None: ...
    def find(self, depth: int, /) -> Any: ...
    def note(self, depth: int, /) -> None: ...

class RowBuffer:
    step: int
    @property
    def last_step(self) -> int: ...
    def start(self, seq: int, step: int, /) -> None: ...
    def next_seq(self) -> int: ...
    def add(
        self,
        seq: int,
        context: int,
        verdict: int,
        ref_us: float,
        target_us: float,
        drift_abs: float = -1.0,
        drift_rel: float = -1.0,
        /,
    ) -> None: ...
    def append(self, row: Iterable[float], /) -> None: ...
    def head(self, n: int, /) -> bytes: ...
    def drop(self, n: int, /) -> None: ...
    def clear(self) -> None: ...
    def __len__(self) -> int: ...

OFF: int
COMPARING: int
RECORDING: int

FRESH: int
IN_PLACE: int
SEVERAL: int
SILENT: int
PASSING: int
LONG: int
MAX_COPIED: int
MAX_WRITTEN: int
MAX_RETURNS: int

class CloseBounds:
    def __init__(self, results: tuple[tuple[int, bool, bool], ...], enough: float, differing: float, /) -> None: ...
    def learn_form(
        self, position: int, tensor: torch.Tensor, strides: tuple[int, ...], key: tuple[Any, ...], /
    ) -> None: ...
    def learn_verdict(self, position: int, ulp: int, key: tuple[Any, ...], /) -> None: ...
    def pass_subnormals(self) -> None: ...

class CompareHandler:
    state: int
    on_target: int
    slow_ratio: float
    max_bytes: float
    own_ns: int
    def __init__(self, **parts: Any) -> None: ...
    def bind(self, mode: object, /) -> DispatchMethod: ...
    def add_operator(
        self,
        operator: object,
        plan: object,
        run: Callable[..., Any],
        index: int,
        skipped: tuple[str, str, str],
        route: int,
        written: tuple[int, ...],
        /,
    ) -> None: ...
    def guard(
        self, acquire: Callable[..., bool], release: Callable[[], None], locked: Callable[[], bool], /
    ) -> None: ...
    def collect(self, counter: dict[tuple[str, str, str], int], /) -> None: ...
    def clocks(self, on: bool, /) -> list[tuple[int, int]]: ...
    def collide(self) -> None: ...

class StorageRows:
    version: int
    counts: bool
    last: Any
    @property
    def rows(self) -> dict[int, Any]: ...
    @property
    def freed(self) -> bool: ...
    def __init__(self, tensor: torch.Tensor, version: int, /) -> None: ...
    def renew(self, version: int, /) -> None: ...

class TensorRows:
    first_row: int
    def __init__(self, **parts: Any) -> None: ...

class FiniteHandler:
    @property
    def n_calls(self) -> int: ...
    def __init__(self, **parts: Any) -> None: ...
    def bind(self, mode: object, /) -> DispatchMethod: ...
    def add_operator(
        self,
        operator: object,
        plan: object,
        run: Callable[..., Any],
        index: int,
        has_values: bool,
        written: tuple[int, ...],
        /,
    ) -> None: ...

class RecordHandler:
    @property
    def n_running(self) -> int: ...
    def __init__(self, **parts: Any) -> None: ...
    def bind(self, mode: object, /) -> DispatchMethod: ...
    def add_operator(
        self,
        operator: object,
        plan: object,
        run: Callable[..., Any],
        index: int,
        is_watched: bool,
        n_returns: int,
        aliases: int,
        uninitialised: int,
        has_values: bool,
        is_view: bool,
        counts: bool,
        written: tuple[int, ...],
        is_item: bool,
        is_random: bool,
        /,
    ) -> None: ...
    def remove_operator(self, operator: object, /) -> None: ...
    def guard(self, acquire: Callable[..., bool], release: Callable[[], None], /) -> None: ...
