"""Who made a call: module path, phase of the step, line of the user's code.

* Modules: `nn.Module.__call__` is wrapped while a comparison runs, and keeps a stack of paths per thread
  (4 µs per module call; module hooks cost four times that and change the order of gradients). The same wrapper calls
  `outermost`, with which `comparison.steps` ends a step or a stretch at the next call of a model.
* Line: the first frame outside torch and shadowrun (`call_sites.py`).
* Phase: backward while autograd runs a node; optimizer if a frame of `torch.optim` is on the stack.
* Backward: a node carries the sequence number of its forward call, whose module and line it gets. Each thread counts
  for itself and a node does not say which one made it, so each has its own table; where the thread that runs the node
  has no such number, the one other that has it is taken, and none where there are several.
"""

from __future__ import annotations

import sys
import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shadowrun.intercept import torch_compiler, torchapi
from shadowrun.intercept.call_sites import CallSites, FrameMark
from shadowrun.native import core
from shadowrun.types import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType, ModuleType

    from shadowrun.intercept.api_calls import ApiCalls
    from shadowrun.intercept.call_sites import FoundSite

__all__ = ["NOWHERE", "Attribution", "Origin"]

Origin = tuple[str, Phase, str]
"""Module path, phase, site."""

# Reading a member of an enum takes ten times as long as a global name.
_FORWARD, _BACKWARD, _OPTIMIZER = Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER
_autograd_node, _next_number = torchapi.autograd_node, torchapi.next_sequence_number
_frame = sys._getframe
NOWHERE: Origin = "", Phase.FORWARD, ""
# A program that never ends a step would collect the forward calls of its whole run.
_MAX_LINKS = 100_000
# A program may start a thread for each batch: of those that ended, the links of so many are kept.
_MAX_CHAINS = 64


class _ThreadState:
    """What is known of a thread."""

    __slots__ = ("above", "chain", "entered", "last_number", "links", "modules", "recomputed", "recomputing")

    def __init__(self) -> None:
        self.modules: list[str] = []
        self.above: list[FoundSite | None] = []
        self.last_number = -1
        self.recomputing = 0
        self.recomputed: dict[int, tuple[str, str]] = {}
        self.entered = False
        self.links: dict[int, tuple[str, str]] = {}
        self.chain: _Chain | None = None


class _Threads(threading.local):
    """The state of each thread: one look-up for all of it, since each costs as much as a call."""

    def __init__(self) -> None:
        self.state = _ThreadState()


class _Chain:
    """Forward calls of a thread that the program started."""

    __slots__ = ("done", "links", "mark", "oldest")

    def __init__(self, links: dict[int, tuple[str, str]]) -> None:
        self.links = links
        self.done = False
        self.oldest = self.mark = 0

    def end_step(self) -> None:
        # Numbers of nodes grow: those below `oldest` were made before the last step began.
        numbers = list(self.links)
        for number in [number for number in numbers if number < self.oldest]:
            self.links.pop(number, None)
        self.oldest, self.mark = self.mark, numbers[-1] + 1 if numbers else self.mark


class Attribution:
    """Finds where a call comes from. One instance per comparison; safe to ask from any thread.

    Attributes:
        following: Whether module calls are followed now: between `start` or `resume`, and `pause` or `stop`.
        call: What stands for `nn.Module.__call__` since `start`.
        unfollowed: Called where a thread that is not followed calls a module.
        outermost: Called with a module that the thread that started it calls from outside of any, followed or not; it
            may call `pause` and `resume`. None: not asked.
        api: Asked for each call of a module that is followed, with ``api=True``.
        find_origin: ``find_origin(depth)``: module, phase and site of the operator call in hand; `depth` is the number
            of frames between its caller and the user's code that may be skipped.
        note_origin: ``note_origin(depth)``: remember the forward origin of a call that is not recorded, if autograd
            made a node for it.
        native_origins: Both in C; None without the C extension.
    """

    def __init__(self) -> None:
        self._threads = _Threads()
        self._sites = CallSites()
        self._links: dict[int, tuple[str, str]] = {}
        self._earlier_links: dict[int, tuple[str, str]] = {}
        self._state: _ThreadState | None = None
        self._chains: list[_Chain] = []
        self._paths: dict[int, tuple[weakref.ref[nn.Module], str]] = {}
        self._original_call: Callable[..., Any] | None = None
        self.following = False
        self.unfollowed: Callable[[], None] = lambda: None
        self.outermost: Callable[[nn.Module], None] | None = None
        self.api: ApiCalls | None = None
        self._inside = False
        self.find_origin: Callable[[int], Origin] = self._find_origin
        self.note_origin: Callable[[int], None] = self._note_origin
        self.native_origins = None if core is None else self._native_origins(core)

    def _native_origins(self, core: ModuleType) -> Any:
        """The same in C, which calls `_find_origin` for what it does not know."""
        origins = core.Origins(
            threads=self._threads,
            kinds=self._sites.kinds,
            found=self._sites.known,
            mark=FrameMark,
            phases=(_FORWARD, _BACKWARD, _OPTIMIZER),
            node=_autograd_node,
            number=_next_number,
            find=self._find_origin,
            max_links=_MAX_LINKS,
        )
        self.find_origin, self.note_origin = origins.find, origins.note
        return origins

    def start(self) -> None:
        """Begin to follow module calls."""
        attribution = self
        self._original_call = original = nn.Module.__call__
        threads = self._threads
        paths, path_of = self._paths, self._path_of
        autograd_node = torchapi.autograd_node
        is_compiling: Callable[[], bool] = torch.compiler.is_compiling

        def __call__(self: nn.Module, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
            if is_compiling():  # Dynamo then leaves our wrapper out of the graph
                return original(self, *args, **kwargs)  # type: ignore[unreachable, unused-ignore]
            is_outermost = attribution.outermost is not None and attribution._begin_outermost(self)
            # Asked after that: a step that ends here may pause it, or resume it.
            if not attribution.following:
                try:
                    return original(self, *args, **kwargs)
                except BaseException as error:
                    torch_compiler.drop_frames_of(error, code)
                    raise
                finally:
                    if is_outermost:
                        attribution._inside = False
            # Threads may be inside the same module at once: each has a stack of its own.
            state = threads.state
            modules, above = state.modules, state.above
            # A checkpoint calls its modules again inside backward.
            recomputing = autograd_node() is not None
            if recomputing:
                state.recomputing += 1
            # This thread has no mode: its operators are not observed, and the report has to name it.
            elif not state.entered:
                attribution.unfollowed()
            known = paths.get(id(self))
            # An id may belong to a new module at the address of an old one: the weak reference decides.
            modules.append(known[1] if known is not None and known[0]() is self else path_of(self, modules))
            above.append(None)
            api = attribution.api
            entered = None if api is None else api.enter_module(self)
            try:
                return original(self, *args, **kwargs)
            except BaseException as error:
                # A nested model would show one line of shadowrun for each module in a traceback.
                torch_compiler.drop_frames_of(error, code)
                raise
            finally:
                above.pop()
                path = modules.pop()
                if api is not None and entered is not None:
                    api.leave_module(entered, path)
                if recomputing:
                    state.recomputing -= 1
                if is_outermost:
                    attribution._inside = False

        self._replace_call(__call__, original)
        code = __call__.__code__  # which replacing it has changed
        self._inside = False
        self.resume()

    def _replace_call(self, call: Any, original: Callable[..., Any]) -> None:
        """Let `nn.Module` use the wrapper, and all that look at frames know it."""
        # Without this, each module inside a compiled one breaks the graph.
        torch_compiler.replace_module_call(call, original)
        nn.Module.__call__ = call  # type: ignore[method-assign]
        self.call = call
        self._sites.module_call = call.__code__
        if self.native_origins is not None:
            self.native_origins.module_call = call.__code__

    def _begin_outermost(self, module: nn.Module) -> bool:
        """Call `outermost` if this call comes from outside of any module; returns whether it does."""
        state = self._threads.state
        # `modules` is kept while calls are followed, `_inside` where `outermost` was there when the call began.
        if self._inside or state.modules or state is not self._state or _autograd_node() is not None:
            return False
        if self.outermost is not None:
            self._inside = True
            try:
                self.outermost(module)
            except BaseException:
                self._inside = False
                raise
        return True

    def pause(self) -> None:
        """Let module calls pass until `resume`. To take the wrapper off and put it back takes more than 1 ms."""
        self.following = False

    def resume(self) -> None:
        """Follow the module calls of this thread (again)."""
        state = self._threads.state
        # Nodes made before belong to no call that was observed.
        state.last_number = torchapi.next_sequence_number()
        state.entered = True
        # The thread that starts a comparison shares its links with autograd's own threads, which run its backward.
        state.links = self._links
        self._state = state
        self.following = True

    def enter_thread(self) -> None:
        """This thread, which the program has just started, is followed too."""
        state = self._threads.state
        state.last_number = torchapi.next_sequence_number()
        state.entered = True
        state.chain = _Chain(state.links)
        self._chains.append(state.chain)

    def leave_thread(self) -> None:
        """This thread ends; what it computed may still be used in a backward pass."""
        chain = self._threads.state.chain
        if chain is not None:
            # Kept, since a backward pass may still use what this thread computed.
            chain.done = True
        self._threads.state.entered = False  # a thread of C++ may come back, and not to us
        if len(self._chains) > _MAX_CHAINS:
            self._chains = [c for c in self._chains[:-_MAX_CHAINS] if not c.done] + self._chains[-_MAX_CHAINS:]

    def stop(self) -> None:
        """Restore `nn.Module.__call__`, unless other code has wrapped it since (then this wrapper is inert)."""
        if self._original_call is not None:
            # Another library may have wrapped the wrapper: restoring would remove that one too.
            if nn.Module.__call__ is self.call:
                nn.Module.__call__ = self._original_call  # type: ignore[method-assign]
            torch_compiler.restore_module_call(self.call, self._original_call)
        self._original_call = None
        self.following = False

    def _find_origin(self, depth: int) -> Origin:
        """See `find_origin`."""
        try:
            state = self._threads.state
            # In backward there may be no Python frame of the program at all: the node decides first.
            node = _autograd_node()
            if node is not None:
                recomputing = state.recomputing and state.modules[-1]
                return self._recomputed_origin(depth + 1) if recomputing else self._backward_origin(node)
            try:
                frame = _frame(depth + 1)
            except ValueError:  # on autograd's own threads the stack may end before that
                frame = _frame(0)
            modules, above = state.modules, state.above
            site, optimizer, _ = self._sites.find(frame, above, len(above) - 1)
            module = modules[-1] if modules else ""
            if optimizer:
                return module, _OPTIMIZER, site
            # The counter moves only where autograd records: under no_grad there is nothing to link.
            number = _next_number()
            if number != state.last_number:
                # The node of this very call already exists: its number is the one before the next.
                state.last_number = number
                _keep(state.links, number - 1, (module, site))
        except Exception:  # an origin is not worth the user's program
            return NOWHERE
        return module, _FORWARD, site

    def module_path(self) -> str:
        """Path of the innermost module that this thread is in; empty outside of modules."""
        modules = self._threads.state.modules
        return modules[-1] if modules else ""

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """All modules that were called, and those in them, with their paths."""
        for reference, path in list(self._paths.values()):
            module = reference()
            if module is not None:
                yield path, module

    def end_step(self) -> None:
        """Forget the forward calls of all steps but the last: their graphs have been used."""
        # The last step's calls stay: a backward pass may still use its graph.
        self._earlier_links, self._links = self._links, {}
        if self._state is not None:
            self._state.links = self._links
        # The links of threads grow with each step as well.
        for chain in self._chains:
            chain.end_step()
        self._chains = [c for c in self._chains if c.links or not c.done]

    def _note_origin(self, depth: int) -> None:
        """See `note_origin`."""
        if _next_number() != self._threads.state.last_number:
            self._find_origin(depth + 1)

    def _recomputed_origin(self, depth: int) -> Origin:
        """Origin of a call that a checkpoint repeats in backward, inside a module."""
        state = self._threads.state
        try:
            frame = sys._getframe(depth + 1)
        except ValueError:
            frame = sys._getframe(0)
        module, site = state.modules[-1], self._sites.find(frame, state.above, len(state.above) - 1)[0]
        number = torchapi.next_sequence_number()
        if number != state.last_number:
            state.last_number = number
            _keep(state.recomputed, number - 1, (module, site))
        return module, _BACKWARD, site

    def _backward_origin(self, node: Any) -> Origin:
        state = self._threads.state
        number = torchapi.autograd_node_number(node)
        links = state.links if state.entered else self._links
        link = links.get(number)
        # The graph may be of the step before.
        if link is None and links is self._links:
            link = self._earlier_links.get(number)
        if self._chains and (link is None or not state.entered):
            link = self._link_of_another(number)
        # Each thread counts its nodes for itself: on autograd's own threads, those that a checkpoint made there
        # have numbers that the program's thread has used too. They run in a backward called from there.
        if state.recomputed and (state.entered or _in_nested_backward()):
            link = state.recomputed.get(number, link)
        counter = torchapi.next_sequence_number()
        if counter != state.last_number:
            # A node of the second derivative: it belongs to the same forward call.
            state.last_number = counter
            if link is not None and state.entered:
                _keep(state.links, counter - 1, link)
        if link is None:
            # AccumulateGrad and nodes made before the comparison began have no forward call that we saw.
            return "", _BACKWARD, self._sites.find(sys._getframe(0), state.above, len(state.above) - 1)[0]
        return link[0], _BACKWARD, link[1]

    def _link_of_another(self, number: int) -> tuple[str, str] | None:
        """Forward call of that number, if only one thread made one."""
        tables = (self._links, self._earlier_links, *[c.links for c in self._chains])
        found = [link for links in tables if (link := links.get(number)) is not None]
        # Threads count alone, so a number may be in several tables: a wrong module is worse than none.
        return found[0] if len(found) == 1 else None

    def _path_of(self, module: nn.Module, modules: list[str]) -> str:
        """Path of a module that is not known yet; all that are in it get theirs with it."""
        if isinstance(module, torch.fx.GraphModule) and (modules or torchapi.autograd_node() is not None):
            # Made by torch from a function that a higher-order operator was given: it has no path.
            return modules[-1] if modules else ""
        name = type(module).__name__
        path = f"{modules[-1]}.{name}" if modules else name
        paths = self._paths
        try:
            # The whole tree at once: a child that is called by itself later keeps its path in the root.
            for sub_name, sub in module.named_modules():
                known = paths.get(id(sub))
                if known is None or known[0]() is not sub:
                    paths[id(sub)] = weakref.ref(sub), f"{path}.{sub_name}" if sub_name else path
        except Exception:  # a module whose containers are changing under us: a name is not worth a failure
            return path
        known = paths.get(id(module))
        return path if known is None else known[1]


def _keep(links: dict[int, tuple[str, str]], number: int, link: tuple[str, str]) -> None:
    links[number] = link
    if len(links) > _MAX_LINKS:
        # Half at a time: removing one per call would cost each call of a long program.
        for old in list(links)[: _MAX_LINKS // 2]:
            links.pop(old, None)


def _in_nested_backward() -> bool:
    """Whether Python code on this thread called `backward`: on autograd's own threads, that of a checkpoint."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "_engine_run_backward":
            return True
        frame = frame.f_back
    return False
