"""Executors by name: ``dask://host:8786``, ``dask://`` for this machine, ``module:factory`` for any other."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from typing import TYPE_CHECKING, Any, Final

from shadowrun.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shadowrun.studies.campaign.engine import Executor, Future

__all__ = ["executor_named"]

_DASK: Final = "dask://"


@contextlib.contextmanager
def executor_named(name: str, jobs: int) -> Iterator[Executor]:
    """An executor; what was started for it ends with the block.

    Args:
        name: As `--executor` has it.
        jobs: Processes of ``dask://``.

    Raises:
        UsageError: There is no such module, function or scheduler, or what the function made has no `submit`.
    """
    if name.startswith(_DASK):
        with _dask(name, jobs) as executor:
            yield executor
        return
    made = _made(name)
    try:
        yield made
    finally:
        # Of `concurrent.futures`, and of anything that has to be ended.
        ends: Callable[[], Any] | None = getattr(made, "shutdown", None) or getattr(made, "close", None)
        if ends is not None:
            ends()


def _made(name: str) -> Executor:
    module, colon, function = name.partition(":")
    if not (colon and module and function.isidentifier()):
        raise _bad(name, "use dask://HOST:PORT, dask://, or MODULE:FUNCTION")
    sys.path.append(os.getcwd())  # noqa: PTH109 - last, so that a file here shadows no installed module
    try:
        made = getattr(importlib.import_module(module), function)()
    except Exception as error:
        raise _bad(name, f"{type(error).__name__}: {error}") from error
    finally:
        sys.path.pop()
    if not callable(getattr(made, "submit", None)):
        raise _bad(name, f"what it returns, a {type(made).__name__}, has no method submit(function, *args)")
    executor: Executor = made
    return executor


@contextlib.contextmanager
def _dask(name: str, jobs: int) -> Iterator[Executor]:
    try:
        distributed: Any = importlib.import_module("distributed")
    except ImportError as error:
        raise _bad(name, f"{error}; pip install -c constraints.txt -e '.[dask]'") from error
    address = name.removeprefix(_DASK)
    with contextlib.ExitStack() as stack:
        try:
            if address:
                cluster: Any = f"tcp://{address}"
            else:
                # Threads of one process would share its kernels' state; our own processes run the variants anyway.
                cluster = stack.enter_context(
                    distributed.LocalCluster(n_workers=jobs, threads_per_worker=1, dashboard_address=None)
                )
            client = stack.enter_context(distributed.Client(cluster, timeout="20s"))
        except (OSError, ValueError) as error:
            raise _bad(name, f"{type(error).__name__}: {error}") from error
        yield _Dask(client)


class _Dask:
    """Jobs of Dask that are run, not looked up: to Dask, a function of the same arguments has the same result.

    Args:
        client: A `distributed.Client`.
    """

    def __init__(self, client: Any) -> None:
        self._client = client

    def submit(self, function: Callable[..., Any], /, *args: Any) -> Future:
        """Run a function somewhere."""
        future: Future = self._client.submit(function, *args, pure=False)
        return future


def _bad(name: str, why: str) -> UsageError:
    return UsageError(f"--executor {name!r} cannot be used: {why}.", slug="campaign-executor")
