"""Origins found in C: the same as in Python for every call, in either order."""

from __future__ import annotations

import gc
import sys
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shadowrun import native
from shadowrun.intercept import torchapi
from shadowrun.intercept.attribution import Attribution
from shadowrun.intercept.call_sites import FrameMark
from tests.models import digits, tokens

pytestmark = pytest.mark.skipif(native.core is None, reason="there is no compiled part to compare with")


class Asking(torchapi.DispatchMode):
    """Asks both for the place of each call; who asks first remembers it for the other."""

    def __init__(self, attribution, first):
        super().__init__()
        self.attribution, self.first = attribution, first
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        attribution = self.attribution
        if self.first == "python":
            python, compiled = attribution._find_origin(1), attribution.native_origins.find(1)
        else:
            compiled, python = attribution.native_origins.find(1), attribution._find_origin(1)
        self.found.append((str(func), compiled, python))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def attribution():
    made = Attribution()
    made.start()
    yield made
    made.stop()


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.reentrant = False
        self.inner = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    def forward(self, x):
        y = checkpoint(self.inner, x, use_reentrant=False) + self.inner(x)
        return y.view(-1).exp() * checkpoint(torch.sin, y.reshape(-1), use_reentrant=self.reentrant)


class Own(torch.optim.Optimizer):
    """An optimizer of the program's own."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self):
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(p.grad, alpha=0.1)


def nested(_):
    model = Outer()
    optimizer = Own(model.parameters())
    for _ in range(3):
        loss = model(torch.ones(2, 3, requires_grad=True)).sum()
        (g,) = torch.autograd.grad(loss, model.inner[0].weight, create_graph=True)
        (loss + g.square().sum()).backward()
        model.reentrant = True
        model(torch.ones(2, 3, requires_grad=True)).sum().backward()
        model.reentrant = False
        optimizer.step()
        optimizer.zero_grad()


def closure(attribution):
    _, optimizer, loss = digits()

    def again():
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    for _ in range(3):
        optimizer.step(again)
        attribution.end_step()


def transformer(attribution):
    _, optimizer, loss = tokens()
    for _ in range(3):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        attribution.end_step()


def generators(_):
    def each():
        for i in range(3):
            yield torch.ones(2, requires_grad=True) * i

    for _ in range(2):
        sum(each()).sum().backward()


@pytest.mark.parametrize("first", ["compiled", "python"])
@pytest.mark.parametrize("program", [nested, closure, transformer, generators], ids=lambda p: p.__name__)
def test_the_same_place_for_every_call(attribution, program, first):
    torch.manual_seed(0)
    mode = Asking(attribution, first)
    with mode:
        program(attribution)
    assert len(mode.found) > 10
    assert [f for f in mode.found if f[1] != f[2]] == []
    phases = {place[1].value for _, place, _ in mode.found}
    assert phases >= {"forward", "backward"}
    assert all(type(place) is tuple and len(place) == 3 for _, place, _ in mode.found)
    own = (__file__.rpartition("/")[2], "models.py", "")
    # Without a forward call, the search begins at the innermost frame: the mode's own, in this file.
    assert not any("__torch_dispatch__" in site for _, (_, phase, site), _ in mode.found if phase.value != "backward")
    assert all(any(name in place[2] for name in own) for _, place, _ in mode.found)


class Debugger:
    """Looks like our mark, and is none."""

    __slots__ = ("found",)

    def __init__(self):
        self.found = ("wrong.py:1 in nobody", True, None)

    def __call__(self, *_):
        return self


def test_a_debuggers_trace_in_an_optimizers_frame_is_no_mark(attribution):
    mode, before = Asking(attribution, "compiled"), sys.gettrace()
    sys.settrace(Debugger())
    try:
        with mode:
            transformer(attribution)
    finally:
        sys.settrace(before)
    assert [f for f in mode.found if f[1] != f[2]] == []
    assert {place[2].rpartition("/")[2].partition(":")[0] for _, place, _ in mode.found} <= {
        "models.py",
        "test_origins.py",
    }
    assert any(place[1].value == "optimizer" for _, place, _ in mode.found)


def test_python_is_asked_only_where_nothing_is_known(monkeypatch, attribution):
    """Else this would be a test of Python against itself."""
    asked = []
    original = Attribution._find_origin

    def telling(self, depth):
        asked.append(original(self, depth + 1))
        return asked[-1]

    monkeypatch.setattr(Attribution, "_find_origin", telling)
    counted = Attribution()
    counted.start()
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    found = []

    class Placing(torchapi.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            found.append(counted.find_origin(1))
            return func(*args, **(kwargs or {}))

    try:
        with Placing():
            for n in range(4):
                model(torch.ones(2, 3)).sum().backward()
                if n == 1:
                    asked.clear()
    finally:
        counted.stop()
    assert len(found) > 40
    # Gradients of leaves have no forward call, and are searched for each time.
    assert len(asked) < len(found) / 2 * 0.5
    assert [place for place in asked if place[1].value == "forward"] == []
    half = len(found) // 2
    assert [p for p in found[half : half * 2] if p[1].value == "forward"] == [
        p for p in found[:half] if p[1].value == "forward"
    ]


def test_each_thread_is_told_of_its_own_modules(attribution):
    modes = []

    def work():
        inner = nn.Linear(2, 2)
        with Asking(attribution, "compiled") as mode:
            modes.append(mode)
            for _ in range(3):
                inner(torch.ones(1, 2))

    class Waits(nn.Module):
        def forward(self, x):
            for _ in range(3):
                x = x.exp()
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            return x.neg()

    with Asking(attribution, "compiled") as mode:
        modes.append(mode)
        Waits()(torch.ones(2))
    found = [f for mode in modes for f in mode.found]
    assert [f for f in found if f[1] != f[2]] == []
    assert {place[0] for _, place, _ in found} == {"", "Waits", "Linear"}


def raising(error):
    def function(*_):
        raise error

    return function


class Interrupt(BaseException):
    """What is no error, and must reach the program."""


def places(**changed):
    made = Attribution()
    parts = {
        "threads": made._threads,
        "kinds": made._sites.kinds,
        "found": made._sites.known,
        "mark": FrameMark,
        "phases": ("forward", "backward", "optimizer"),
        "node": lambda: None,
        "number": lambda: 7,
        "find": lambda _: ("slow", "", ""),
        "max_links": 10,
    }
    return native.core.Origins(**parts | changed)


class Node:
    """Of autograd, made by the fifth forward call."""

    def _sequence_nr(self):
        return 5


@pytest.mark.parametrize(
    "changed",
    [
        *({"entered": False}, {"recomputing": 1}, {"recomputed": {5: ("RebuiltCase", "")}}),
        *({"links": {4: ("Net", "here")}}, {"last_number": 6}),
    ],
    ids=",".join,
)
def test_what_python_must_look_at_in_a_backward_pass(changed):
    threads = Attribution()._threads
    state = threads.state
    state.entered, state.last_number, state.links = True, 7, {5: ("Net", "here")}
    asked = places(threads=threads, node=Node)
    assert asked.find(0) == ("Net", "backward", "here")
    for name, value in changed.items():
        setattr(state, name, value)
    assert asked.find(0) == ("slow", "", "")


@pytest.mark.parametrize("part", ["node", "number"])
def test_errors_are_left_to_python_and_interrupts_are_not(part):
    assert places(**{part: raising(ValueError())}).find(0) == ("slow", "", "")
    with pytest.raises(Interrupt):
        known = {__file__: 1}
        asked = places(**{part: raising(Interrupt()), "kinds": known})
        asked.find(0)
        # The number is asked for where the line is known.
        code = sys._getframe().f_code
        asked = places(
            **{part: raising(Interrupt()), "kinds": known},
            found=Everywhere(("here", False, code)),
        )
        asked.find(0)


class Everywhere(dict):
    """Knows every line as one."""

    def __init__(self, found):
        super().__init__()
        code = sys._getframe(1).f_code
        self.update({(id(code), offset): found for offset in range(0, 4096, 2)})


def test_what_the_slow_way_raises_comes_out():
    for error in (Interrupt(), ValueError("as it is")):
        with pytest.raises(type(error)):
            places(find=raising(error)).find(0)
        with pytest.raises(type(error)):
            places(find=raising(error)).note(0)


def test_wrong_parts():
    for changed in ({"kinds": []}, {"phases": ("forward",)}, {"phases": []}, {"max_links": "many"}):
        with pytest.raises((TypeError, ValueError)):
            places(**changed)


def test_no_place_is_too_deep():
    assert places().find(10**6) == ("slow", "", "")


def test_nothing_is_left_behind(attribution):
    model, found = nn.Linear(2, 2), []

    class Placing(torchapi.DispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            attribution.note_origin(1)
            found[:] = [attribution.find_origin(1)]
            return func(*args, **(kwargs or {}))

    fixed = [attribution, attribution._threads.state, "forward", None, True]

    def counts():
        gc.collect()
        return [sys.getrefcount(v) for v in fixed], len(gc.get_objects())

    def work(n):
        for _ in range(n):
            with Placing():
                model(torch.ones(1, 2)).sum().backward()
            attribution.end_step()

    work(20)
    refs, n = counts()
    work(400)
    later_refs, later = counts()
    assert all(abs(a - b) < 20 for a, b in zip(refs, later_refs, strict=True)), (refs, later_refs)
    assert later - n < 100
