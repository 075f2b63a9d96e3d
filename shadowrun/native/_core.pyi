from collections.abc import Callable
from typing import Any

import torch

VERSION: int
SOURCES: int

def setup(tensor: type, parameter: type, exact: frozenset[type]) -> bool: ...
def plainly_equal(actual: torch.Tensor, expected: torch.Tensor) -> bool: ...
def context_key(
    index: int, device: torch.device, place: tuple[str, str, str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, ...]: ...

class Places:
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
        get_frame: Callable[[int], Any],
        place: Callable[[int], Any],
        most_links: int,
    ) -> None: ...
    def place(self, depth: int, /) -> Any: ...
    def note(self, depth: int, /) -> None: ...
